"""Short step of a decoder as a compiled function: up to 64 tokens through the blocks that a plan keeps.

It has the order and the names of the readable blocks (``model.llama``, ``model.gemma2``). Numbers are float32; inputs
of products and cache entries are rounded to the model's dtype. Two functions run on all threads: ``multiply``, over
neurons, and ``attend``, over rows and heads. One thread computes a number from beginning to end, so its bits depend
neither on the other rows nor on the number of threads.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from model.fast.cpu import elements
from model.fast.cpu.dot import INT4, dot_keys, dot_rows, sum_rows
from model.fast.cpu.elements import BYTES_OF, address, compiled, floats_at

# Rows of a layer's table of matrices, and the columns of such a table.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
MATRICES = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
KIND, ADDRESS, ROW_BYTES, ROWS, BIAS = range(5)
ABSENT = -1  # kind of matrices that a plan skips, address of an absent bias


class Weights(NamedTuple):
    """Model under a layer plan.

    ``kind`` is that of the embedding, the cache and all weights not in low bits. Sizes count numbers, not bytes.
    ``attention_cap``, ``final_cap`` and windows are 0 where there is none. ``matrices`` ``[layers, 7, 5]`` and ``head``
    ``[1, 5]`` are tables of matrices; biases are given by address. ``norms`` is ``[layers, norms, hidden]``, with two
    norms per layer for Llama and four for Gemma-2; ``cos`` and ``sin`` are ``[positions, D / 2]``. Arrays of numbers
    are float32.
    """

    kind: int
    mlp: int
    heads: int
    kv_heads: int
    embedding: int
    embedding_scale: np.float32
    eps: np.float32
    attention_scale: np.float32
    attention_cap: np.float32
    final_cap: np.float32
    is_gemma: bool
    matrices: np.ndarray
    head: np.ndarray
    norms: np.ndarray
    final_norm: np.ndarray
    windows: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Batch(NamedTuple):
    """Rows of a step, and the caches of their texts.

    ``tokens`` (ids), ``positions`` and ``texts`` (indices) are ``[rows]`` int64. ``entries`` ``[texts, layers, 2]``
    holds the addresses of keys and values, ``head_bytes`` ``[texts]`` the bytes from one head to the next.
    """

    tokens: np.ndarray
    positions: np.ndarray
    texts: np.ndarray
    entries: np.ndarray
    head_bytes: np.ndarray


@compiled(parallel=True)
def multiply(matrices: np.ndarray, inputs: np.ndarray, columns: int, out: np.ndarray) -> None:
    """Products of each row of ``inputs`` with all ``matrices``, one after another, into ``out[row]``."""
    x, stride, places, out_stride, rows = address(inputs), inputs.strides[0], address(out), out.strides[0], len(out)
    for index in prange(out.shape[1]):
        column = np.int64(index)  # Numba's index is unsigned, and mixed arithmetic would be done in floats
        matrix, neuron = 0, column
        while neuron >= matrices[matrix, ROWS]:
            neuron -= matrices[matrix, ROWS]
            matrix += 1
        kind = matrices[matrix, KIND]
        w = matrices[matrix, ADDRESS] + neuron * matrices[matrix, ROW_BYTES]
        width = elements.in_blocks(columns) if kind >= INT4 else columns  # low bits are packed in blocks
        dot_rows(kind, w, x, stride, rows, width, places + 4 * column, out_stride)


@compiled(inline="always")
def project(matrices: np.ndarray, x: np.ndarray, inputs: np.ndarray, out: np.ndarray) -> None:
    """Linear layers on the same inputs: ``x`` ``[rows, columns]`` -> ``out`` ``[rows, neurons of all layers]``."""
    elements.prepare(matrices[0, KIND], x, inputs)
    multiply(matrices, inputs, x.shape[1], out)
    first = 0
    for matrix in range(len(matrices)):
        count = matrices[matrix, ROWS]
        if matrices[matrix, BIAS] != ABSENT:
            bias = floats_at(matrices[matrix, BIAS], count)
            for row in range(len(out)):
                for neuron in range(count):
                    out[row, first + neuron] += bias[neuron]
        first += count


@compiled()
def attend_head(
    kind: int, query: int, keys: int, values: int, count: int, scale: float, cap: float, out: np.ndarray
) -> None:
    """Attention of one query to ``count`` keys and values, all given by address: ``out`` ``[D]``."""
    size, entry_bytes = len(out), len(out) * BYTES_OF[kind]
    scores = np.empty(count, np.float32)
    dot_keys(kind, query, keys, entry_bytes, count, size, address(scores), 4)
    for index in range(count):
        scores[index] *= scale
    if cap:
        elements.soft_cap(scores, cap)
    divisor = elements.softmax(scores)
    sum_rows(kind, values, entry_bytes, address(scores), count, size, address(out))
    for index in range(size):
        out[index] /= divisor


@compiled(parallel=True)
def attend(weights: Weights, layer: int, queries: np.ndarray, batch: Batch, out: np.ndarray) -> None:
    """Causal grouped-query attention (arXiv 2305.13245) of each row to its text's entries, up to its position.

    ``queries`` ``[rows, H, bytes]`` in the cache's dtype. Writes ``out`` ``[rows, H, D]``.
    """
    kind, window = weights.kind, weights.windows[layer]
    scale, cap = weights.attention_scale, weights.attention_cap
    entries, head_bytes, positions, texts = batch.entries, batch.head_bytes, batch.positions, batch.texts
    heads, entry_bytes, place = out.shape[1], queries.shape[2], address(queries)
    groups = heads // weights.kv_heads
    for index in prange(len(out) * heads):
        task = np.int64(index)
        row, head = task // heads, task % heads
        position, text = positions[row], texts[row]
        first = max(0, position + 1 - window) if window else 0
        begin = head // groups * head_bytes[text] + first * entry_bytes
        keys, values = entries[text, layer, 0] + begin, entries[text, layer, 1] + begin
        query, count = place + task * entry_bytes, position + 1 - first
        attend_head(kind, query, keys, values, count, scale, cap, out[row, head])


@compiled(inline="always")
def add(x: np.ndarray, y: np.ndarray) -> None:
    """Sum x + y, into x: the residual stream."""
    for row in range(len(x)):
        for column in range(x.shape[1]):
            x[row, column] += y[row, column]


@compiled(inline="always")
def attention(weights: Weights, layer: int, x: np.ndarray, batch: Batch, inputs: np.ndarray, out: np.ndarray) -> None:
    """Attention sublayer (``model.layers.Attention``) of ``x`` ``[rows, hidden]``, into ``out`` of the same shape."""
    kind, heads, kv_heads, size, count = weights.kind, weights.heads, weights.kv_heads, 2 * weights.cos.shape[1], len(x)
    matrices, entry_bytes = weights.matrices[layer], size * BYTES_OF[kind]
    qkv = np.empty((count, (heads + 2 * kv_heads) * size), np.float32)
    project(matrices[Q : V + 1], x, inputs, qkv)
    queries = np.empty((count, heads, entry_bytes), np.uint8)
    for row in range(count):
        position, text = batch.positions[row], batch.texts[row]
        for head in range(heads + 2 * kv_heads):
            numbers = qkv[row, head * size : (head + 1) * size]
            if head < heads + kv_heads:
                elements.rotate(numbers, weights.cos[position], weights.sin[position])
            if head < heads:
                elements.store(kind, numbers, address(queries[row, head]))
            else:
                which, group = divmod(head - heads, kv_heads)  # key heads, then value heads
                place = batch.entries[text, layer, which] + group * batch.head_bytes[text]
                elements.store(kind, numbers, place + position * entry_bytes)
    attended = np.empty((count, heads, size), np.float32)
    attend(weights, layer, queries, batch, attended)
    project(matrices[O : O + 1], attended.reshape(count, heads * size), inputs, out)


@compiled(inline="always")
def gated_mlp(weights: Weights, layer: int, x: np.ndarray, inputs: np.ndarray, out: np.ndarray) -> None:
    """MLP sublayer (``model.layers.GatedMLP``) of ``x`` ``[rows, hidden]``, into ``out`` of the same shape."""
    matrices, size = weights.matrices[layer], weights.mlp
    gate_up, activated = np.empty((len(x), 2 * size), np.float32), np.empty((len(x), size), np.float32)
    project(matrices[GATE : UP + 1], x, inputs, gate_up)
    elements.activate(gate_up, weights.is_gemma, activated)
    project(matrices[DOWN : DOWN + 1], activated, inputs, out)


@compiled(cache=True, no_cpython_wrapper=False)
def step(weights: Weights, batch: Batch, logits: np.ndarray) -> None:
    """Logits ``[rows, vocab]`` of the rows; writes their keys and values into the cache.

    Blocks are those of ``model.llama`` (a norm before each sublayer) and ``model.gemma2`` (one before, one behind).
    """
    count, hidden = len(batch.tokens), len(weights.final_norm)
    widest = max(hidden, weights.mlp, weights.heads * 2 * weights.cos.shape[1])
    inputs = np.empty((count, elements.input_bytes(widest)), np.uint8)
    x, normed = np.empty((count, hidden), np.float32), np.empty((count, hidden), np.float32)
    out = np.empty((count, hidden), np.float32)
    for row in range(count):
        place = weights.embedding + batch.tokens[row] * hidden * BYTES_OF[weights.kind]
        elements.load(weights.kind, place, weights.embedding_scale, x[row])
    for layer in range(len(weights.matrices)):
        for number, sublayer in enumerate((Q, GATE)):
            if weights.matrices[layer, sublayer, KIND] == ABSENT:
                continue
            norm = weights.norms[layer, (2 if weights.is_gemma else 1) * number]
            elements.normalise(x, norm, weights.eps, normed)
            if sublayer == Q:
                attention(weights, layer, normed, batch, inputs, out)
            else:
                gated_mlp(weights, layer, normed, inputs, out)
            if weights.is_gemma:
                elements.normalise(out, weights.norms[layer, 2 * number + 1], weights.eps, normed)
                add(x, normed)
            else:
                add(x, out)
    elements.normalise(x, weights.final_norm, weights.eps, normed)
    project(weights.head, normed, inputs, logits)
    if weights.final_cap:
        for row in range(count):
            elements.soft_cap(logits[row], weights.final_cap)
