"""Tasks of a step, which threads do piece by piece (``team``), for each kind of numbers.

``step`` calls them by their addresses, so it has none of their code: only the kinds that a model
and its plans use are ever compiled. It writes the arguments of a task on the board, as a record of
words, and the task reads them there.
"""

from functools import cache

import numpy as np

from model.fast.cpu import elements
from model.fast.cpu.dot import BLOCK_ROWS, GROUP, INPUTS, INT8, NUMBER_BYTES, dot, sum_rows
from model.fast.cpu.kernels import address, array_at
from model.fast.cpu.team import compiled_task
from model.fast.cpu.vectors import LANES

# A matrix of weights. Its blocks have ``BLOCK_ROWS`` rows, or 16 in low bits.
MATRIX = np.dtype(
    [
        ("kind", np.int64),  # of numbers: see ``dot``
        ("input_task", np.int64),  # addresses of the tasks of this kind
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

# Arguments of ``attention_task``.
ATTENTION = np.dtype(
    [
        ("queries", np.int64),  # address of [rows, heads, D] in the cache's dtype
        ("positions", np.int64),  # addresses of [rows], as in ``step.Batch``
        ("head_bytes", np.int64),
        ("entries", np.int64),  # address of the addresses of the first row's keys and values
        ("entries_stride", np.int64),  # bytes to those of the next row
        ("entry_bytes", np.int64),  # of a query, key or value
        ("heads", np.int64),
        ("groups", np.int64),  # query heads that share a key head
        ("window", np.int64),  # 0 if there is none
        ("scale", np.float32),
        ("soft_cap", np.float32),  # 0 if there is none
        ("out", np.int64),  # address of [rows, heads, D] float32
    ]
)

ONE = np.ones(1, np.float32)  # weight of a row in a sum of one row


@cache
def input_task(kind: int) -> int:
    """Address of the task that writes rows of inputs as weights of this kind read them."""
    x_kind = INPUTS[kind]

    def inputs(arguments: int, first: int, end: int) -> None:
        given = array_at(arguments, 1, PROJECTION)[0]
        columns = given.columns
        for number in range(first, end):
            row = array_at(given.x + number * columns * 4, columns, np.float32)
            place = given.inputs + number * given.inputs_stride
            if x_kind == INT8:
                elements.round_to_int8(row, place, kind == INT8)
            elif x_kind == kind:
                elements.store_rounded(kind, row, place)
            else:
                # Rounded in the upper half of the place, then widened to float32 in both halves:
                # the stores of a block end before the next block's numbers begin.
                rounded = place + 2 * columns
                elements.store_rounded(kind, row, rounded)
                sum_rows(
                    kind,
                    rows=rounded,
                    stride=0,
                    weights=address(ONE),
                    count=1,
                    columns=columns,
                    out=place,
                )

    return compiled_task(inputs, kind)


@cache
def product_task(kind: int) -> int:
    """Address of the task that multiplies matrices of this kind by all rows of inputs; a piece is a
    block of weights.
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
            dot(
                kind,
                x_kind,
                w=matrices[matrix].weights + block * matrices[matrix].block_bytes,
                w_stride=matrices[matrix].block_bytes // block_rows,
                x=given.inputs,
                x_stride=given.inputs_stride,
                rows=given.rows,
                columns=columns,
                out=given.out + 4 * (neuron + row),
                out_stride=given.out_stride,
                count=min(block_rows, matrices[matrix].neurons - row),
            )

    return compiled_task(product, kind)


@cache
def attention_task(kind: int) -> int:
    """Address of the task of attention to a cache of this kind; a piece is a head of a row."""

    def attention(arguments: int, begin: int, end: int) -> None:
        given = array_at(arguments, 1, ATTENTION)[0]
        size = given.entry_bytes // NUMBER_BYTES[kind]
        for piece in range(begin, end):
            row, head = divmod(piece, given.heads)
            position = array_at(given.positions + 8 * row, 1, np.int64)[0]
            head_bytes = array_at(given.head_bytes + 8 * row, 1, np.int64)[0]
            keys, values = array_at(given.entries + row * given.entries_stride, 2, np.int64)
            first = max(0, position + 1 - given.window) if given.window else 0
            skipped = head // given.groups * head_bytes + first * given.entry_bytes
            scores = np.empty(position + 1 - first, np.float32)
            attended = array_at(given.out + piece * size * 4, size, np.float32)
            # The keys play the weights, the query plays the inputs.
            for key in range(0, len(scores), BLOCK_ROWS):
                dot(
                    kind,
                    kind,
                    w=keys + skipped + key * given.entry_bytes,
                    w_stride=given.entry_bytes,
                    x=given.queries + piece * given.entry_bytes,
                    x_stride=0,
                    rows=1,
                    columns=size,
                    out=address(scores) + 4 * key,
                    out_stride=0,
                    count=min(BLOCK_ROWS, len(scores) - key),
                )
            scores *= given.scale
            if given.soft_cap:
                elements.soft_cap(scores, given.soft_cap)
            elements.exponentials(scores)
            sum_rows(
                kind,
                rows=values + skipped,
                stride=given.entry_bytes,
                weights=address(scores),
                count=len(scores),
                columns=size,
                out=address(attended),
            )
            # after the sum: Numba frees an array behind its last use by name
            attended /= elements.total(scores)

    return compiled_task(attention, kind)
