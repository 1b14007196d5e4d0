"""Short step of a decoder as a compiled function, for up to 64 tokens under a plan.

It has the order and the names of the readable blocks (``model.llama``, ``model.gemma2``). Numbers
are float32; inputs of products and cache entries are rounded to the model's dtype. Three tasks run
on all threads (``tasks``): the rounding of inputs, by row; products, by block of weights;
attention, by chunk of a text and key head. A number is always the same sums in the same order, of
which each is computed by one thread, so its bits depend neither on the other rows nor on the number
of threads.
"""

from typing import NamedTuple

import numpy as np

from model.fast.cpu import elements, team
from model.fast.cpu.dot import GROUP, NUMBER_BYTES, narrow_row, widen_row
from model.fast.cpu.kernels import address, compiled, keep_alive
from model.fast.cpu.tasks import CHUNK

# Matrices of a layer, and their names in a block.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
MATRICES = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]
SPAN_QUERIES = 12  # of rows and heads that attend together
SCORES = 1 << 11  # of attention, that a thread computes at least
ROUNDED = 1 << 13  # inputs that a thread rounds at least
PIECE = 1 << 16  # bytes of weights that a thread claims at least


class Weights(NamedTuple):
    """Model under a layer plan, in float32. Soft caps are 0 where there is none.

    Weights and biases are given by address. The tensors there are kept by ``FastDecoder``: its
    ``model``, ``low_bits`` and ``biases``.
    """

    kind: int  # of the cache and of all weights not in low bits
    embedding: int  # address
    embedding_scale: np.float32
    eps: np.float32
    attention_task: int  # address
    attention_factors: np.ndarray  # [2], scale and soft cap
    final_soft_cap: np.float32
    is_gemma: bool
    matrices: np.ndarray  # records tasks.MATRIX [layers, 7]
    head: np.ndarray  # the same [1]
    norms: np.ndarray  # [layers, 2, norms, hidden]: one per sublayer in Llama, two in Gemma-2
    final_norm: np.ndarray  # [hidden]
    head_norms: np.ndarray  # [layers, 2, D], of q and k; [0, 2, D] where there are none
    windows: np.ndarray  # int64 [layers]
    ropes: np.ndarray  # int64 [layers], indices into cos and sin
    cos: np.ndarray  # [ropes, positions, D / 2]
    sin: np.ndarray


class Batch(NamedTuple):
    """Rows of a step, and the caches of their texts, which the step's caller keeps. All arrays are
    int64.
    """

    tokens: np.ndarray  # [rows], ids
    positions: np.ndarray  # [rows]
    entries: np.ndarray  # [rows, layers, 2], addresses of the keys and the values of a text
    head_bytes: np.ndarray  # [rows], bytes from one head of these to the next


@compiled()
def embed(weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Embeddings of tokens times their scale: ``[rows]`` ids -> ``[rows, hidden]``."""
    hidden = len(weights.final_norm)
    x = np.empty((len(tokens), hidden), np.float32)
    for row in range(len(tokens)):
        place = weights.embedding + tokens[row] * hidden * NUMBER_BYTES[weights.kind]
        widen_row(weights.kind, place, hidden, address(x[row]))
    x *= weights.embedding_scale
    return x


@compiled()
def project(board: np.ndarray, matrices: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Linear layers on the same inputs ``[rows, columns]``: ``[rows, neurons of all layers]``."""
    rows, columns = x.shape
    out = np.empty((rows, matrices["neurons"].sum()), np.float32)
    padded = (columns + GROUP - 1) // GROUP * GROUP
    inputs = np.empty((rows, 4 * padded), np.uint8)  # enough for any kind
    arguments = (  # in the order of the record ``PROJECTION``
        address(x),
        rows,
        columns,
        address(inputs),
        inputs.strides[0],
        address(matrices),
        address(out),
        out.strides[0],
    )
    team.run(board, matrices[0].input_task, rows, ROUNDED // columns + 1, arguments)
    least = PIECE // matrices[0].block_bytes + 1
    team.run(board, matrices[0].product_task, matrices["blocks"].sum(), least, arguments)
    keep_alive(inputs)
    return out


@compiled()
def attend_to_cache(
    board: np.ndarray, weights: Weights, layer: int, queries: np.ndarray, batch: Batch
) -> np.ndarray:
    """Causal grouped-query attention of each row to its text (arXiv 2305.13245).

    ``queries`` ``[key heads, rows, groups, bytes]`` in the cache's dtype -> ``[rows, H · D]``.
    """
    key_heads, rows, groups, entry_bytes = queries.shape
    size = weights.matrices[layer, Q].neurons // (key_heads * groups)
    most_rows = max(1, SPAN_QUERIES // groups)
    spans = spans_of(batch, most_rows)
    positions = batch.positions.max() + 1
    chunks = (positions + CHUNK - 1) // CHUNK
    parts = np.empty((rows, key_heads * groups, chunks, size + 2), np.float32)
    arguments = (  # in the order of the record ``ATTENTION``
        address(queries),
        rows,
        address(spans),
        address(batch.positions),
        address(batch.head_bytes),
        address(batch.entries[:, layer]),
        batch.entries.strides[0],
        entry_bytes,
        key_heads,
        chunks,
        groups,
        weights.windows[layer],
        address(weights.attention_factors),
        address(parts),
    )
    least = SCORES // (min(positions, CHUNK) * min(rows, most_rows) * groups) + 1
    pieces = (len(spans) - 1) * key_heads * chunks
    team.run(board, weights.attention_task, pieces, least, arguments)
    keep_alive(spans)
    return joined(parts).reshape(rows, -1)


@compiled()
def joined(parts: np.ndarray) -> np.ndarray:
    """Attention ``[rows, H, D]`` to all chunks, of the results of ``attention_task`` for each."""
    rows, heads, chunks, numbers = parts.shape
    size = numbers - 2
    out = np.zeros((rows, heads, size), np.float32)
    for row in range(rows):
        for head in range(heads):
            largest = parts[row, head, :, size + 1].max()
            total = np.float32(0)
            for chunk in range(chunks):
                part = parts[row, head, chunk]
                factor = elements.exponential(part[size + 1] - largest)
                total += part[size] * factor
                for index in range(size):
                    out[row, head, index] += part[index] * factor
            out[row, head] /= total
    return out


@compiled()
def spans_of(batch: Batch, most: int) -> np.ndarray:
    """First rows of the spans, and after them the number of rows: a span is up to ``most`` rows of
    one text at positions that follow each other.
    """
    rows = len(batch.positions)
    firsts = [0]
    for row in range(1, rows):
        follows = (
            batch.positions[row] == batch.positions[row - 1] + 1
            and batch.entries[row, 0, 0] == batch.entries[row - 1, 0, 0]
        )
        if not follows or row == firsts[-1] + most:
            firsts.append(row)
    firsts.append(rows)
    return np.array(firsts)


@compiled()
def attention(
    board: np.ndarray, weights: Weights, layer: int, x: np.ndarray, batch: Batch
) -> np.ndarray:
    """Attention sublayer (``model.layers.Attention``): ``[rows, hidden]`` -> same shape."""
    size = 2 * weights.cos.shape[2]
    matrices = weights.matrices[layer]
    heads = matrices[Q].neurons // size
    kv_heads = matrices[K].neurons // size
    entry_bytes = size * NUMBER_BYTES[weights.kind]
    cos = weights.cos[weights.ropes[layer]]
    sin = weights.sin[weights.ropes[layer]]
    qkv = project(board, matrices[Q : V + 1], x)
    groups = heads // kv_heads
    queries = np.empty((kv_heads, len(x), groups, entry_bytes), np.uint8)
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
                place = address(queries[head // groups, row, head % groups])
            else:
                which, group = divmod(head - heads, kv_heads)
                first = batch.entries[row, layer, which] + group * batch.head_bytes[row]
                place = first + position * entry_bytes
            narrow_row(weights.kind, address(numbers), size, place)
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
    return team.on_all_threads(run_step, weights, batch)


@compiled(cache=True, no_cpython_wrapper=False)
def run_step(board: np.ndarray, weights: Weights, batch: Batch) -> np.ndarray:
    """Logits ``[rows, vocab]`` of the rows; writes their keys and values into the cache.

    Blocks are those of ``model.llama`` (a norm before each sublayer) and ``model.gemma2`` (one
    before, one after).
    """
    x = embed(weights, batch.tokens)
    for layer in range(len(weights.matrices)):
        if weights.matrices[layer, Q].neurons:
            norms = weights.norms[layer, 0]
            normed = elements.normalise(x, norms[0], weights.eps)
            out = attention(board, weights, layer, normed, batch)
            x += elements.normalise(out, norms[1], weights.eps) if weights.is_gemma else out
        if weights.matrices[layer, GATE].neurons:
            norms = weights.norms[layer, 1]
            normed = elements.normalise(x, norms[0], weights.eps)
            out = gated_mlp(board, weights, layer, normed)
            x += elements.normalise(out, norms[1], weights.eps) if weights.is_gemma else out
    logits = project(board, weights.head, elements.normalise(x, weights.final_norm, weights.eps))
    if weights.final_soft_cap:
        for row in range(len(logits)):
            elements.soft_cap(logits[row], weights.final_soft_cap)
    return logits
