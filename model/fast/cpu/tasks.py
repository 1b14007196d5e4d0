"""Tasks of a step, which threads do piece by piece (``team``), compiled by themselves for each kind
of numbers.

``step`` calls them by their addresses, so it has none of their code: only the kinds that a model
and its plans use are ever compiled.
"""

from functools import cache

import numpy as np

from model.fast.cpu import elements, team
from model.fast.cpu.dot import INPUTS, INT8, LANES, NUMBERS, dot, sum_rows
from model.fast.cpu.elements import address, array_at, whole

# Columns of a table of matrices. A matrix has blocks of rows: one row, or 16 in low bits.
KIND, INPUT_TASK, PRODUCT_TASK, ADDRESS, BLOCK_BYTES, ROWS, BIAS = range(7)
FIELDS = 7
PLACE = 8 * team.ARGUMENTS


@cache
def input_task(kind: int) -> int:
    """Address of the task that writes inputs as weights of this kind read them; a piece is a
    row.
    """
    x_kind = INPUTS[kind]
    is_widened = x_kind in NUMBERS and x_kind != kind

    def inputs(board: int, first: int, end: int) -> None:
        x, columns, out, stride = array_at(board + PLACE, 4, np.int64)
        one = np.ones(1, np.float32)
        for number in range(first, end):
            row = array_at(x + number * columns * 4, columns, np.float32)
            place = out + number * stride
            if x_kind == INT8:
                elements.round_to_int8(row, place, kind == INT8)
            elif is_widened:  # but float32: as a sum of one row, from the upper half to both
                elements.store(kind, row, place + 2 * columns)
                sum_rows(kind, place + 2 * columns, 0, address(one), 1, columns, place)
            else:
                elements.store(kind, row, place)
        one[0] = 0  # keeps it until here

    return team.compiled_task(inputs, kind)


@cache
def product_task(kind: int) -> int:
    """Address of the task that multiplies rows of inputs by matrices of this kind; a piece is
    a block of them.
    """
    x_kind = INPUTS[kind]
    together = LANES if x_kind == INT8 else 1

    def product(board: int, first: int, end: int) -> None:
        x, stride, rows, columns, out, out_stride, table = array_at(board + PLACE, 7, np.int64)
        matrices = array_at(table, (3, FIELDS), np.int64)
        for number in range(first, end):
            matrix = 0
            block = number
            neuron = 0
            while block >= whole(matrices[matrix, ROWS], together):
                block -= whole(matrices[matrix, ROWS], together)
                neuron += matrices[matrix, ROWS]
                matrix += 1
            w = matrices[matrix, ADDRESS] + block * matrices[matrix, BLOCK_BYTES]
            count = min(together, matrices[matrix, ROWS] - block * together)
            place = out + 4 * (neuron + block * together)
            dot(kind, x_kind, w, x, stride, rows, columns, place, out_stride, count)

    return team.compiled_task(product, kind)


@cache
def attention_task(kind: int) -> int:
    """Address of the task of attention to a cache of this kind; a piece is a head of a row."""

    def attention(board: int, begin: int, end: int) -> None:
        (
            out,
            queries,
            positions,
            head_bytes,
            entries,
            stride,
            heads,
            groups,
            size,
            entry_bytes,
            window,
            settings,
        ) = array_at(board + PLACE, 12, np.int64)
        for piece in range(begin, end):
            row, head = divmod(piece, heads)
            position = array_at(positions, row + 1, np.int64)[row]
            first = max(0, position + 1 - window) if window else 0
            skipped = (
                head // groups * array_at(head_bytes, row + 1, np.int64)[row] + first * entry_bytes
            )
            keys, values = array_at(entries + row * stride, 2, np.int64)
            scale, cap = array_at(settings, 2, np.float32)
            scores = np.empty(position + 1 - first, np.float32)
            attended = array_at(out + piece * size * 4, size, np.float32)
            query = queries + piece * entry_bytes
            place = address(scores)
            count = len(scores)
            dot(kind, kind, query, keys + skipped, entry_bytes, count, size, place, 4, 1)
            scores *= scale
            if cap:
                elements.soft_cap(scores, cap)
            elements.exponentials(scores)
            sum_rows(kind, values + skipped, entry_bytes, place, count, size, address(attended))
            # after the sum: Numba frees an array behind its last use by name
            attended /= elements.total(scores)

    return team.compiled_task(attention, kind)
