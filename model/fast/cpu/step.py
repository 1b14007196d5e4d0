"""Short step of a decoder as a compiled function: up to 64 tokens through the blocks that a plan
keeps.

It has the order and the names of the readable blocks (``model.llama``, ``model.gemma2``). Numbers
are float32; inputs of products and cache entries are rounded to the model's dtype. Three tasks run
on all threads (``tasks``): the rounding of inputs, by row; products, by neuron; attention, by row
and head. One thread computes a number from beginning to end, so its bits depend neither on the
other rows nor on the number of threads.
"""

from typing import NamedTuple

import numpy as np

from model.fast.cpu import elements, team
from model.fast.cpu.dot import GROUP, INT4, LANES, sum_rows
from model.fast.cpu.elements import BYTES_OF, address, array_at, ceil_div, compiled
from model.fast.cpu.tasks import (
    BIAS,
    BLOCK_BYTES,
    INPUT_TASK,
    KIND,
    PRODUCT_TASK,
    ROWS,
    AttentionArguments,
    InputArguments,
    ProductArguments,
)

# Rows of a layer's table of matrices, and the columns of such a table.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
MATRICES = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]
PIECE = 1 << 16  # bytes of weights that a thread claims at least
ABSENT = -1  # kind of matrices that a plan skips, address of an absent bias


class Weights(NamedTuple):
    """Model under a layer plan.

    ``kind`` is that of the cache and of all weights not in low bits; the embedding and biases are
    given by address. ``attention_task`` is the address of that task, and ``attention_settings``
    holds scale and soft cap. Caps and windows are 0 where there is none. ``matrices`` ``[layers, 7,
    FIELDS]`` and ``head`` ``[1, FIELDS]`` are tables of matrices, with the columns of ``tasks``.
    ``norms`` is ``[layers, 2, norms, hidden]``: each sublayer has one norm in Llama and two in
    Gemma-2. ``head_norms`` ``[layers, 2, D]`` are those of q and k, with 0 layers where there are
    none. ``cos`` and ``sin`` are ``[ropes, positions, D / 2]``, and ``ropes`` ``[layers]`` holds
    each layer's index there. Arrays of numbers are float32.
    """

    kind: int
    embedding: int
    embedding_scale: np.ndarray
    eps: np.float32
    attention_task: int
    attention_settings: np.ndarray
    final_cap: np.float32
    is_gemma: bool
    matrices: np.ndarray
    head: np.ndarray
    norms: np.ndarray
    final_norm: np.ndarray
    head_norms: np.ndarray
    windows: np.ndarray
    ropes: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Batch(NamedTuple):
    """Rows of a step: ``tokens`` (ids) and ``positions`` ``[rows]``, and the caches of their texts.

    ``entries`` ``[rows, layers, 2]`` holds the addresses of keys and values, ``head_bytes``
    ``[rows]`` the bytes from one head to the next. All are int64.
    """

    tokens: np.ndarray
    positions: np.ndarray
    entries: np.ndarray
    head_bytes: np.ndarray


@compiled()
def embed(weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Embeddings of tokens times their scale: ``[rows]`` ids -> ``[rows, hidden]``."""
    hidden = len(weights.final_norm)
    x = np.empty((len(tokens), hidden), np.float32)
    for row in range(len(tokens)):
        sum_rows(  # of one row
            weights.kind,
            rows=weights.embedding + tokens[row] * hidden * BYTES_OF[weights.kind],
            stride=0,
            weights=address(weights.embedding_scale),
            count=1,
            columns=hidden,
            out=address(x[row]),
        )
    return x


@compiled()
def project(board: np.ndarray, matrices: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Linear layers on the same inputs: ``x`` ``[rows, columns]`` -> ``[rows, neurons of all
    layers]``.
    """
    rows, columns = x.shape
    is_low = matrices[0, KIND] >= INT4
    neurons = matrices[:, ROWS].sum()
    blocks = 0
    for matrix in range(len(matrices)):
        blocks += ceil_div(matrices[matrix, ROWS], LANES if is_low else 1)
    out = np.empty((rows, neurons), np.float32)
    padded = ceil_div(columns, GROUP) * GROUP
    inputs = np.empty((rows, 4 * padded), np.uint8)  # enough for any kind
    rounding = InputArguments(
        x=address(x),
        columns=columns,
        out=address(inputs),
        stride=inputs.strides[0],
    )
    team.run(board, matrices[0, INPUT_TASK], rows, 1, rounding)
    products = ProductArguments(
        x=address(inputs),
        stride=inputs.strides[0],
        rows=rows,
        columns=padded if is_low else columns,
        matrices=address(matrices),
        out=address(out),
        out_stride=out.strides[0],
    )
    least = PIECE // matrices[0, BLOCK_BYTES] + 1
    team.run(board, matrices[0, PRODUCT_TASK], blocks, least, products)
    inputs[0, 0] = 0  # keeps them until here: Numba frees an array behind its last use by name
    add_biases(matrices, out)
    return out


@compiled()
def add_biases(matrices: np.ndarray, out: np.ndarray) -> None:
    """Add the biases of linear layers to ``out`` ``[rows, neurons of all layers]``."""
    first = 0
    for matrix in range(len(matrices)):
        neurons = matrices[matrix, ROWS]
        bias = matrices[matrix, BIAS]
        if bias != ABSENT:
            biases = array_at(bias, neurons, np.float32)
            for row in range(len(out)):
                out[row, first : first + neurons] += biases
        first += neurons


@compiled()
def attend_to_cache(
    board: np.ndarray, weights: Weights, layer: int, queries: np.ndarray, batch: Batch
) -> np.ndarray:
    """Causal grouped-query attention (arXiv 2305.13245) of each row to its text's entries, up to
    its position.

    ``queries`` ``[rows, H, bytes]`` in the cache's dtype -> ``[rows, H · D]``.
    """
    rows, heads, entry_bytes = queries.shape
    size = weights.matrices[layer, Q, ROWS] // heads
    out = np.empty((rows, heads * size), np.float32)
    attentions = AttentionArguments(
        queries=address(queries),
        positions=address(batch.positions),
        head_bytes=address(batch.head_bytes),
        entries=address(batch.entries[:, layer]),
        entries_stride=batch.entries.strides[0],
        heads=heads,
        groups=heads * size // weights.matrices[layer, K, ROWS],
        size=size,
        entry_bytes=entry_bytes,
        window=weights.windows[layer],
        settings=address(weights.attention_settings),
        out=address(out),
    )
    team.run(board, weights.attention_task, rows * heads, 1, attentions)
    return out


@compiled()
def attention(
    board: np.ndarray, weights: Weights, layer: int, x: np.ndarray, batch: Batch
) -> np.ndarray:
    """Attention sublayer (``model.layers.Attention``): ``x`` ``[rows, hidden]`` -> the same
    shape.
    """
    kind = weights.kind
    size = 2 * weights.cos.shape[2]
    matrices = weights.matrices[layer]
    heads = matrices[Q, ROWS] // size
    kv_heads = matrices[K, ROWS] // size
    entry_bytes = size * BYTES_OF[kind]
    cos = weights.cos[weights.ropes[layer]]
    sin = weights.sin[weights.ropes[layer]]
    qkv = project(board, matrices[Q : V + 1], x)
    queries = np.empty((len(x), heads, entry_bytes), np.uint8)
    for row in range(len(x)):
        position = batch.positions[row]
        for head in range(heads + 2 * kv_heads):  # of queries, then of keys, then of values
            numbers = qkv[row, head * size : (head + 1) * size]
            if head < heads + kv_heads:
                if len(weights.head_norms):
                    norm = weights.head_norms[layer, 0 if head < heads else 1]
                    numbers[:] = elements.normalise(numbers.reshape(1, size), norm, weights.eps)[0]
                elements.rotate(numbers, cos[position], sin[position])
            if head < heads:
                elements.store_rounded(kind, numbers, queries[row, head].ctypes.data)
            else:
                which, group = divmod(head - heads, kv_heads)
                place = batch.entries[row, layer, which] + group * batch.head_bytes[row]
                elements.store_rounded(kind, numbers, place + position * entry_bytes)
    attended = attend_to_cache(board, weights, layer, queries, batch)
    return project(board, matrices[O : O + 1], attended)


@compiled()
def gated_mlp(board: np.ndarray, weights: Weights, layer: int, x: np.ndarray) -> np.ndarray:
    """MLP sublayer (``model.layers.GatedMLP``): ``x`` ``[rows, hidden]`` -> the same shape."""
    matrices = weights.matrices[layer]
    gate_up = project(board, matrices[GATE : UP + 1], x)
    return project(board, matrices[DOWN : DOWN + 1], elements.activate(gate_up, weights.is_gemma))


def step(weights: Weights, batch: Batch) -> np.ndarray:
    """``run_step`` on torch's number of threads."""
    with team.one_at_a_time:
        team.wake_helpers()
        return run_step(team.board, weights, batch)


@compiled(cache=True, no_cpython_wrapper=False)
def run_step(board: np.ndarray, weights: Weights, batch: Batch) -> np.ndarray:
    """Logits ``[rows, vocab]`` of the rows; writes their keys and values into the cache.

    Blocks are those of ``model.llama`` (a norm before each sublayer) and ``model.gemma2`` (one
    before, one behind).
    """
    x = embed(weights, batch.tokens)
    for layer in range(len(weights.matrices)):
        if weights.matrices[layer, Q, KIND] != ABSENT:
            norms = weights.norms[layer, 0]
            normed = elements.normalise(x, norms[0], weights.eps)
            out = attention(board, weights, layer, normed, batch)
            x += elements.normalise(out, norms[1], weights.eps) if weights.is_gemma else out
        if weights.matrices[layer, GATE, KIND] != ABSENT:
            norms = weights.norms[layer, 1]
            normed = elements.normalise(x, norms[0], weights.eps)
            out = gated_mlp(board, weights, layer, normed)
            x += elements.normalise(out, norms[1], weights.eps) if weights.is_gemma else out
    logits = project(board, weights.head, elements.normalise(x, weights.final_norm, weights.eps))
    if weights.final_cap:
        for row in range(len(logits)):
            elements.soft_cap(logits[row], weights.final_cap)
    return logits
