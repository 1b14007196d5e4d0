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
from model.fast.cpu.elements import BYTES_OF, array_at, compiled

# Rows of a layer's table of matrices, and the columns of such a table.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
MATRICES = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
KIND, ADDRESS, ROW_BYTES, ROWS, BIAS = range(5)
ABSENT = -1  # kind of matrices that a plan skips, address of an absent bias


class Weights(NamedTuple):
    """Model under a layer plan.

    ``kind`` is that of the cache and of all weights not in low bits; the embedding and biases are given by address.
    ``attention_cap``, ``final_cap`` and windows are 0 where there is none. ``matrices`` ``[layers, 7, 5]`` and ``head``
    ``[1, 5]`` are tables of matrices. ``norms`` is ``[layers, 2, norms, hidden]``: each sublayer has one norm in Llama
    and two in Gemma-2. ``cos`` and ``sin`` are ``[positions, D / 2]``. Arrays of numbers are float32.
    """

    kind: int
    embedding: int
    embedding_scale: np.ndarray
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
    """Rows of a step: ``tokens`` (ids) and ``positions`` ``[rows]``, and the caches of their texts.

    ``entries`` ``[rows, layers, 2]`` holds the addresses of keys and values, ``head_bytes`` ``[rows]`` the bytes from
    one head to the next. All are int64.
    """

    tokens: np.ndarray
    positions: np.ndarray
    entries: np.ndarray
    head_bytes: np.ndarray


@compiled(parallel=True)
def multiply(matrices: np.ndarray, inputs: np.ndarray, columns: int, out: np.ndarray) -> None:
    """Products of each row of ``inputs`` with all ``matrices``, one after another, into ``out[row]``."""
    x, stride, places, out_stride = inputs.ctypes.data, inputs.strides[0], out.ctypes.data, out.strides[0]
    for index in prange(out.shape[1]):
        column = np.int64(index)  # Numba's index is unsigned, and mixed arithmetic would be done in floats
        matrix, neuron = 0, column
        while neuron >= matrices[matrix, ROWS]:
            neuron -= matrices[matrix, ROWS]
            matrix += 1
        kind = matrices[matrix, KIND]
        w = matrices[matrix, ADDRESS] + neuron * matrices[matrix, ROW_BYTES]
        width = elements.in_blocks(columns) if kind >= INT4 else columns  # low bits are packed in blocks
        dot_rows(kind, w, x, stride, len(out), width, places + 4 * column, out_stride)


@compiled()
def project(matrices: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Linear layers on the same inputs: ``x`` ``[rows, columns]`` -> ``[rows, neurons of all layers]``."""
    out = np.empty((len(x), np.sum(matrices[:, ROWS])), np.float32)
    multiply(matrices, elements.operands(matrices[0, KIND], x), x.shape[1], out)
    first = 0
    for _, _, _, neurons, bias in matrices:
        if bias != ABSENT:
            out[:, first : first + neurons] += array_at(bias, neurons, np.float32)
        first += neurons
    return out


@compiled(parallel=True)
def attend(weights: Weights, layer: int, queries: np.ndarray, batch: Batch, out: np.ndarray) -> None:
    """Causal grouped-query attention (arXiv 2305.13245) of each row to its text's entries, up to its position.

    ``queries`` ``[rows, H, bytes]`` in the cache's dtype. Writes ``out`` ``[rows, H, D]``.
    """
    window, heads, size, entry_bytes = weights.windows[layer], out.shape[1], out.shape[2], queries.shape[2]
    groups = heads * size // weights.matrices[layer, K, ROWS]
    for index in prange(len(out) * heads):
        task = np.int64(index)
        row, head = task // heads, task % heads
        position = batch.positions[row]
        first = max(0, position + 1 - window) if window else 0
        begin = head // groups * batch.head_bytes[row] + first * entry_bytes
        keys, values = batch.entries[row, layer, 0] + begin, batch.entries[row, layer, 1] + begin
        scores, attended = np.empty(position + 1 - first, np.float32), out[row, head]
        query = queries[row, head].ctypes.data
        dot_keys(weights.kind, query, keys, entry_bytes, len(scores), size, scores.ctypes.data, 4)
        for key in range(len(scores)):
            scores[key] *= weights.attention_scale
        if weights.attention_cap:
            elements.soft_cap(scores, weights.attention_cap)
        elements.exponentials(scores)
        sum_rows(weights.kind, values, entry_bytes, scores.ctypes.data, len(scores), size, attended.ctypes.data)
        divisor = elements.total(scores)  # after the sum: Numba frees an array behind its last use by name
        for column in range(size):
            attended[column] /= divisor


@compiled()
def attention(weights: Weights, layer: int, x: np.ndarray, batch: Batch) -> np.ndarray:
    """Attention sublayer (``model.layers.Attention``): ``x`` ``[rows, hidden]`` -> the same shape."""
    kind, size, matrices = weights.kind, 2 * weights.cos.shape[1], weights.matrices[layer]
    heads, kv_heads = matrices[Q, ROWS] // size, matrices[K, ROWS] // size
    entry_bytes = size * BYTES_OF[kind]
    qkv = project(matrices[Q : V + 1], x)
    queries = np.empty((len(x), heads, entry_bytes), np.uint8)
    for row in range(len(x)):
        position = batch.positions[row]
        for head in range(heads + 2 * kv_heads):
            numbers = qkv[row, head * size : (head + 1) * size]
            if head < heads + kv_heads:
                elements.rotate(numbers, weights.cos[position], weights.sin[position])
            if head < heads:
                elements.store(kind, numbers, queries[row, head].ctypes.data)
            else:
                which, group = divmod(head - heads, kv_heads)  # key heads, then value heads
                place = batch.entries[row, layer, which] + group * batch.head_bytes[row]
                elements.store(kind, numbers, place + position * entry_bytes)
    attended = np.empty((len(x), heads, size), np.float32)
    attend(weights, layer, queries, batch, attended)
    return project(matrices[O : O + 1], attended.reshape(len(x), heads * size))


@compiled()
def gated_mlp(weights: Weights, layer: int, x: np.ndarray) -> np.ndarray:
    """MLP sublayer (``model.layers.GatedMLP``): ``x`` ``[rows, hidden]`` -> the same shape."""
    matrices = weights.matrices[layer]
    gate_up = project(matrices[GATE : UP + 1], x)
    return project(matrices[DOWN : DOWN + 1], elements.activate(gate_up, weights.is_gemma))


@compiled(cache=True, no_cpython_wrapper=False)
def step(weights: Weights, batch: Batch) -> np.ndarray:
    """Logits ``[rows, vocab]`` of the rows; writes their keys and values into the cache.

    Blocks are those of ``model.llama`` (a norm before each sublayer) and ``model.gemma2`` (one before, one behind).
    """
    kind, hidden = weights.kind, len(weights.final_norm)
    x = np.empty((len(batch.tokens), hidden), np.float32)
    for row in range(len(x)):  # an embedding times its scale: a sum of one row
        place = weights.embedding + batch.tokens[row] * hidden * BYTES_OF[kind]
        sum_rows(kind, place, 0, weights.embedding_scale.ctypes.data, 1, hidden, x[row].ctypes.data)
    for layer in range(len(weights.matrices)):
        for number, sublayer in enumerate((Q, GATE)):
            if weights.matrices[layer, sublayer, KIND] == ABSENT:
                continue
            norms = weights.norms[layer, number]
            normed = elements.normalise(x, norms[0], weights.eps)
            out = attention(weights, layer, normed, batch) if sublayer == Q else gated_mlp(weights, layer, normed)
            x += elements.normalise(out, norms[1], weights.eps) if weights.is_gemma else out
    logits = project(weights.head, elements.normalise(x, weights.final_norm, weights.eps))
    if weights.final_cap:
        for row in range(len(logits)):
            elements.soft_cap(logits[row], weights.final_cap)
    return logits
