"""Tasks of a step, which threads do piece by piece (``team``), for each kind of numbers.

``step`` calls them by their addresses, so it has none of their code: only the kinds that a model
and its plans use are ever compiled. The arguments of a task are words on the board, which it reads
as a record. It owns none of the arrays whose addresses these give: the function of ``step`` that
runs the task keeps them until it has ended.
"""

from functools import cache

import numpy as np

from model.fast.cpu import elements
from model.fast.cpu.dot import (
    BLOCK_ROWS,
    GROUP,
    INPUTS,
    INT8,
    NUMBER_BYTES,
    add_numbers,
    add_rows,
    dot,
    narrow_row,
    widen_row,
)
from model.fast.cpu.kernels import LANES, address, array_at, compiled, keep_alive
from model.fast.cpu.team import compiled_task

# A matrix of weights. Its blocks have ``BLOCK_ROWS`` rows, or 16 in low bits.
MATRIX = np.dtype(
    [
        ("input_task", np.int64),  # addresses of the tasks of its kind of numbers: see ``dot``
        ("product_task", np.int64),
        ("weights", np.int64),  # address
        ("block_bytes", np.int64),
        ("blocks", np.int64),
        ("neurons", np.int64),  # rows of weights; 0 where a plan skips the matrix
        ("bias", np.int64),  # address of float32 numbers, 0 if there is none
    ]
)

# Arguments of ``input_task`` and ``product_task``.
PROJECTION = np.dtype(
    [
        ("x", np.int64),  # address of [rows, columns] float32
        ("rows", np.int64),
        ("columns", np.int64),
        ("inputs", np.int64),  # address of the rounded rows
        ("inputs_stride", np.int64),  # bytes from one to the next
        ("matrices", np.int64),  # address of up to three records ``MATRIX``
        ("out", np.int64),  # address of [rows, neurons of all matrices] float32
        ("out_stride", np.int64),
    ]
)

# Arguments of ``attention_task``. A span is rows of one text at positions that follow each other, a
# chunk is ``CHUNK`` positions of a text.
ATTENTION = np.dtype(
    [
        ("queries", np.int64),  # address of [key heads, rows, groups, D] in the cache's dtype
        ("rows", np.int64),
        ("spans", np.int64),  # address of the first row of each span, and the number of rows
        ("positions", np.int64),  # addresses of [rows], as in ``step.Batch``
        ("head_bytes", np.int64),
        ("entries", np.int64),  # address of the addresses of the first row's keys and values
        ("entries_stride", np.int64),  # bytes to those of the next row
        ("entry_bytes", np.int64),  # of a query, key or value
        ("key_heads", np.int64),
        ("chunks", np.int64),
        ("groups", np.int64),  # query heads that share a key head
        ("window", np.int64),  # positions, more than any text has if there is none
        ("factors", np.int64),  # address of [2] float32: scale, and soft cap or 0
        ("out", np.int64),  # address of [rows, heads, chunks, D + 2] float32
    ]
)
CHUNK = 512


@cache
def input_task(kind: int) -> int:
    """Address of the task that writes rows of inputs as weights of this kind read them."""
    x_kind = INPUTS[kind]

    def inputs(arguments: int, first: int, end: int) -> None:
        given = array_at(arguments, 1, PROJECTION)[0]
        columns = given.columns
        for number in range(first, end):
            row = given.x + number * columns * 4
            place = given.inputs + number * given.inputs_stride
            if x_kind == INT8:
                elements.round_to_int8(array_at(row, columns, np.float32), place)
            elif x_kind == kind:
                narrow_row(kind, row, columns, place)
            else:
                # Rounded in the upper half of the place, then widened to float32 in both halves:
                # the stores of a block end before the next block's numbers begin.
                rounded = place + 2 * columns
                narrow_row(kind, row, columns, rounded)
                widen_row(kind, rounded, columns, place)

    return compiled_task(inputs, kind)


@cache
def product_task(kind: int) -> int:
    """Address of the task that multiplies matrices of this kind by all rows of inputs, and adds
    their biases; a piece is a block of weights.
    """
    x_kind = INPUTS[kind]
    block_rows = LANES if x_kind == INT8 else BLOCK_ROWS

    def product(arguments: int, first: int, end: int) -> None:
        given = array_at(arguments, 1, PROJECTION)[0]
        matrices = array_at(given.matrices, 3, MATRIX)
        columns = given.columns
        if x_kind == INT8:
            columns = (columns + GROUP - 1) // GROUP * GROUP
        for number in range(first, end):
            matrix = 0
            block = number  # of this matrix
            neuron = 0  # the first of this matrix
            while block >= matrices[matrix].blocks:
                block -= matrices[matrix].blocks
                neuron += matrices[matrix].neurons
                matrix += 1
            row = block * block_rows  # the block's first, of this matrix
            count = min(block_rows, matrices[matrix].neurons - row)
            out = given.out + 4 * (neuron + row)
            dot(
                kind,
                x_kind,
                w=matrices[matrix].weights + block * matrices[matrix].block_bytes,
                w_stride=matrices[matrix].block_bytes // block_rows,
                x=given.inputs,
                x_stride=given.inputs_stride,
                rows=given.rows,
                columns=columns,
                out=out,
                out_stride=given.out_stride,
                count=count,
            )
            if matrices[matrix].bias:
                biases = array_at(matrices[matrix].bias + 4 * row, count, np.float32)
                for x_row in range(given.rows):
                    products = array_at(out + x_row * given.out_stride, count, np.float32)
                    products += biases

    return compiled_task(product, kind)


@compiled()
def weigh(
    scores: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    scale: float,
    soft_cap: float,
    sums: np.ndarray,
) -> None:
    """Weights of the scores ``[queries, groups, positions]``, in place, of each query from where it
    begins to where it ends: exponentials of the scaled scores less the largest.

    ``sums`` ``[queries, groups, 2]`` get the sum of the weights, and the largest score.
    """
    for query in range(len(ends)):
        for group in range(scores.shape[1]):
            own = scores[query, group, begins[query] : ends[query]]
            own *= scale
            if soft_cap:
                elements.soft_cap(own, soft_cap)
            sums[query, group, 1] = elements.exponentials(own)
            sums[query, group, 0] = add_numbers(1, address(own), len(own))


@cache
def attention_task(kind: int) -> int:
    """Address of the task of attention to a cache of this kind; a piece is a chunk of a span's key
    head.

    For each query it stores a weighted sum of values, the sum of these weights, and the largest
    score: the weights are exponentials of the scores less this score.
    """

    def attention(arguments: int, begin: int, end: int) -> None:
        given = array_at(arguments, 1, ATTENTION)[0]
        groups = given.groups
        scale, soft_cap = array_at(given.factors, 2, np.float32)
        size = given.entry_bytes // NUMBER_BYTES[kind]
        stored = array_at(
            given.out, given.rows * given.key_heads * groups * given.chunks * (size + 2), np.float32
        ).reshape(given.rows, given.key_heads, groups, given.chunks, size + 2)
        all_positions = array_at(given.positions, given.rows, np.int64)
        for piece in range(begin, end):
            rest, chunk = divmod(piece, given.chunks)
            span, head = divmod(rest, given.key_heads)
            row, end_row = array_at(given.spans + 8 * span, 2, np.int64)
            positions = all_positions[row:end_row]
            limits = chunk * CHUNK, (chunk + 1) * CHUNK
            begins = np.clip(positions + 1 - given.window, *limits)
            ends = np.clip(positions + 1, *limits)
            first = begins[0]
            keys, values = array_at(given.entries + row * given.entries_stride, 2, np.int64)
            head_bytes = array_at(given.head_bytes + 8 * row, 1, np.int64)[0]
            skipped = head * head_bytes + first * given.entry_bytes
            queries = given.queries + (head * given.rows + row) * groups * given.entry_bytes
            scores = np.empty((len(ends), groups, ends[-1] - first), np.float32)
            for key in range(0, scores.shape[2], BLOCK_ROWS):
                # The keys play the weights, the queries play the inputs.
                dot(
                    kind,
                    kind,
                    w=keys + skipped + key * given.entry_bytes,
                    w_stride=given.entry_bytes,
                    x=queries,
                    x_stride=given.entry_bytes,
                    rows=len(ends) * groups,
                    columns=size,
                    out=address(scores) + 4 * key,
                    out_stride=scores.strides[1],
                    count=min(BLOCK_ROWS, scores.shape[2] - key),
                )
            found = stored[row:end_row, head, :, chunk]
            weigh(scores, begins - first, ends - first, scale, soft_cap, found[:, :, size:])
            attended = np.zeros((len(ends), groups, size), np.float32)
            # Between two beginnings or ends, the same queries attend to all positions.
            position = first
            while position < ends[-1]:
                query = np.searchsorted(ends, position, "right")  # the first that has not ended
                behind = np.searchsorted(begins, position, "right")  # the first that has not begun
                stop = min(ends[query], begins[behind]) if behind < len(ends) else ends[query]
                add_rows(
                    kind,
                    rows=values + head * head_bytes + position * given.entry_bytes,
                    stride=given.entry_bytes,
                    count=stop - position,
                    columns=size,
                    weights=address(scores[query]) + 4 * (position - first),
                    weights_stride=scores.strides[1],
                    out=address(attended[query]),
                    sums=(behind - query) * groups,
                )
                position = stop
            found[:, :, :size] = attended
            keep_alive(scores)

    return compiled_task(attention, kind)
