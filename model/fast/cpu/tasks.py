"""Tasks of a step, which threads do piece by piece (``team``), compiled by themselves for each kind
of numbers.

``step`` calls them by their addresses, so it has none of their code: only the kinds that a model
and its plans use are ever compiled. It writes the arguments of a task on the board as a named tuple
of words, and the task reads the same tuple off it.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba.np.unsafe.ndarray import to_fixed_tuple

from model.fast.cpu import elements, team
from model.fast.cpu.dot import INPUTS, INT8, LANES, NUMBERS, dot, sum_rows
from model.fast.cpu.elements import address, array_at, ceil_div

# Columns of a table of matrices. A matrix has blocks of rows: one row, or 16 in low bits.
KIND, INPUT_TASK, PRODUCT_TASK, ADDRESS, BLOCK_BYTES, ROWS, BIAS = range(7)
FIELDS = 7
ARGUMENTS = 8 * team.ARGUMENTS  # bytes of the board before the arguments


class InputArguments(NamedTuple):
    """Arguments of ``input_task``: rows of ``columns`` float32 numbers at ``x``, which are written
    to ``out``, ``stride`` bytes apart.
    """

    x: int
    columns: int
    out: int
    stride: int


class ProductArguments(NamedTuple):
    """Arguments of ``product_task``: ``rows`` rows of ``columns`` inputs at ``x``, ``stride`` bytes
    apart, the table of ``matrices``, and float32 rows at ``out``, ``out_stride`` bytes apart.
    """

    x: int
    stride: int
    rows: int
    columns: int
    matrices: int
    out: int
    out_stride: int


class AttentionArguments(NamedTuple):
    """Arguments of ``attention_task``.

    ``queries`` are ``[rows, heads, size]`` in the cache's dtype, in which a head has
    ``entry_bytes``; the results at ``out`` are ``[rows, heads, size]`` float32. ``positions`` and
    ``head_bytes`` are ``[rows]`` (see ``step.Batch``). The addresses of a row's keys and values are
    at ``entries``, ``entries_stride`` bytes after those of the row before. ``groups`` query heads
    share a key head. ``settings`` are scale and soft cap.
    """

    queries: int
    positions: int
    head_bytes: int
    entries: int
    entries_stride: int
    heads: int
    groups: int
    size: int
    entry_bytes: int
    window: int
    settings: int
    out: int


@cache
def input_task(kind: int) -> int:
    """Address of the task that writes inputs as weights of this kind read them; a piece is a
    row.
    """
    x_kind = INPUTS[kind]
    is_widened = x_kind in NUMBERS and x_kind != kind

    def inputs(board: int, first: int, end: int) -> None:
        words = array_at(board + ARGUMENTS, 4, np.int64)
        given = InputArguments(*to_fixed_tuple(words, 4))
        columns = given.columns
        one = np.ones(1, np.float32)
        for number in range(first, end):
            row = array_at(given.x + number * columns * 4, columns, np.float32)
            place = given.out + number * given.stride
            if x_kind == INT8:
                elements.round_to_int8(row, place, kind == INT8)
            elif is_widened:
                # Rounded in the upper half of the place, then widened to float32 in both halves: as
                # a sum of one row.
                rounded = place + 2 * columns
                elements.store_rounded(kind, row, rounded)
                sum_rows(
                    kind,
                    rows=rounded,
                    stride=0,
                    weights=address(one),
                    count=1,
                    columns=columns,
                    out=place,
                )
            else:
                elements.store_rounded(kind, row, place)
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
        words = array_at(board + ARGUMENTS, 7, np.int64)
        given = ProductArguments(*to_fixed_tuple(words, 7))
        matrices = array_at(given.matrices, (3, FIELDS), np.int64)
        for number in range(first, end):
            matrix = 0
            block = number  # of this matrix
            neuron = 0  # the first of this matrix
            while block >= ceil_div(matrices[matrix, ROWS], together):
                block -= ceil_div(matrices[matrix, ROWS], together)
                neuron += matrices[matrix, ROWS]
                matrix += 1
            row = block * together
            dot(
                kind,
                x_kind,
                w=matrices[matrix, ADDRESS] + block * matrices[matrix, BLOCK_BYTES],
                x=given.x,
                stride=given.stride,
                rows=given.rows,
                columns=given.columns,
                out=given.out + 4 * (neuron + row),
                out_stride=given.out_stride,
                count=min(together, matrices[matrix, ROWS] - row),
            )

    return team.compiled_task(product, kind)


@cache
def attention_task(kind: int) -> int:
    """Address of the task of attention to a cache of this kind; a piece is a head of a row."""

    def attention(board: int, begin: int, end: int) -> None:
        words = array_at(board + ARGUMENTS, 12, np.int64)
        given = AttentionArguments(*to_fixed_tuple(words, 12))
        size = given.size
        scale, cap = array_at(given.settings, 2, np.float32)
        for piece in range(begin, end):
            row, head = divmod(piece, given.heads)
            position = array_at(given.positions, row + 1, np.int64)[row]
            head_bytes = array_at(given.head_bytes, row + 1, np.int64)[row]
            keys, values = array_at(given.entries + row * given.entries_stride, 2, np.int64)
            first = max(0, position + 1 - given.window) if given.window else 0
            skipped = head // given.groups * head_bytes + first * given.entry_bytes
            scores = np.empty(position + 1 - first, np.float32)
            attended = array_at(given.out + piece * size * 4, size, np.float32)
            dot(
                kind,
                kind,
                w=given.queries + piece * given.entry_bytes,
                x=keys + skipped,
                stride=given.entry_bytes,
                rows=len(scores),
                columns=size,
                out=address(scores),
                out_stride=4,
                count=1,
            )
            scores *= scale
            if cap:
                elements.soft_cap(scores, cap)
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

    return team.compiled_task(attention, kind)
