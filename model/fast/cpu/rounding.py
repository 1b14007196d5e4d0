"""Compiled rounding of weights: codes, scales and zeros as ``model.quantise`` finds them, bit for
bit, written as the steps read them (``dot``).

A block of 16 rows is rounded at a time, a row per lane, group by group of 32 columns. A group's
weights are read once, and stay in the first cache while its grids are tried.
"""

from collections.abc import Callable, Generator
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from model.fast.cpu.dot import BF16, F16, F32, GROUP, NUMBER_BYTES, read
from model.fast.cpu.kernels import (
    FLOAT,
    FLOATS,
    I16,
    I64,
    INTS,
    LANES,
    Sum,
    Value,
    array_at,
    broadcast,
    instruction,
    load,
    on_lanes,
    store,
    turns,
)
from model.fast.cpu.team import compiled_task, on_all_threads, run
from model.quantise import CUTS, FITS, shares_of

KINDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
PIECE = 1 << 21  # weights rounded at a time: a millisecond or two
VECTOR = 4 * LANES  # bytes
LEVELS = 15.0  # the largest code in four bits

# Arguments of ``packing_task``.
PACKING = np.dtype(
    [
        ("weights", np.int64),  # address of the first row
        ("stride", np.int64),  # bytes from one row to the next
        ("groups", np.int64),
        ("shares", np.int64),  # address of [groups, 32] float32
        ("out", np.int64),
        ("block_bytes", np.int64),
    ]
)


def multiply_then_add(total: Value, a: Value, b: Value) -> Value:
    """total + a · b, rounded twice, as torch's operators round."""
    return total + a * b


def bfloat16_bits(x: Value) -> Value:
    """Bits of finite numbers rounded to bfloat16, ties to even, in int32 lanes."""
    bits = x.bitcast(INTS)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def columns_of(kind: int, rows: list[Value], first: Value) -> list[Value]:
    """The 32 columns from ``first`` on of 16 rows of weights, each a vector with a lane per row."""
    low = [place for lane in range(LANES // 2) for place in (lane, lane + LANES)]
    high = [place + LANES // 2 for place in low]
    found = []
    for start in range(0, GROUP, LANES):
        vectors = [read(kind, row, first + start) for row in rows]
        for _ in range(4):  # a perfect shuffle, log2 of 16 times: a transposition
            pairs = zip(vectors[: LANES // 2], vectors[LANES // 2 :], strict=True)
            vectors = [a.shuffle(order, b) for a, b in pairs for order in (low, high)]
        found += vectors
    return found


def bytes_of(codes: list[Value]) -> Value:
    """Four codes of each lane as the bytes of an int32, the first in the lowest."""
    first, *more = (Value(code.builder, code.builder.fptosi(code.raw, INTS)) for code in codes)
    for number, code in enumerate(more, start=1):
        first |= code << 8 * number
    return first


class Grid:
    """Rounding of one group of 16 rows in four bits: see ``model.quantise``, whose order of
    operations it has.

    ``weights`` is the address of its 32 columns, a vector each, ``shares`` that of 32 numbers.
    """

    def __init__(self, weights: Value, shares: Value) -> None:
        self.weights = weights
        self.shares = shares

    def code(self, weight: Value, inverse: Value, zero: Value) -> Value:
        """Code of a weight, as float32."""
        code = on_lanes("floor", (weight - zero) * inverse + 0.5)
        return on_lanes(
            "minnum", on_lanes("maxnum", code, code.constant(0.0)), code.constant(LEVELS)
        )

    def inverse(self, scale: Value) -> Value:
        """1 / scale, or 0 where it is not above 0."""
        zero = scale.constant(0.0)
        return (zero < scale).select(scale.constant(1.0).combine("div", scale), zero)

    def means(self, count: int, values: Callable[[Value], tuple[Value, ...]]) -> list[Value]:
        """Weighted means over the group of ``count`` values of each weight."""
        sums = [Sum(self.weights.builder) for _ in range(count)]
        with turns(self.weights.constant(GROUP)) as column:
            share = broadcast(load(self.shares + column * 4, FLOAT))
            weight = load(self.weights + column * VECTOR, FLOATS)
            for total, each in zip(sums, values(weight), strict=True):
                total.add(multiply_then_add, each, share)
        return [total.value for total in sums]

    def fit(self, scale: Value, zero: Value) -> list[Value]:
        """Weighted means of the squared error, the code, its square, and code times weight."""
        inverse = self.inverse(scale)

        def values(weight: Value) -> tuple[Value, ...]:
            code = self.code(weight, inverse, zero)
            off = code * scale + zero - weight
            return off * off, code, code * code, code * weight

        return self.means(4, values)

    def best(self, columns: list[Value]) -> tuple[Value, Value]:
        """Scale and zero with the least weighted error of the candidates, in bfloat16's bits."""
        (mean,) = self.means(1, lambda weight: (weight,))
        low = high = columns[0]
        for column in columns[1:]:
            low = on_lanes("minnum", low, column)
            high = on_lanes("maxnum", high, column)
        best = []
        for cut in CUTS:
            scale = (high - low) * ((1 - 2 * cut / LEVELS) / LEVELS)
            zero = (low + high - scale * LEVELS) * 0.5
            for _ in range(FITS + 1):
                rounded = [bfloat16_bits(each) for each in (scale, zero)]
                scale, zero = ((each << 16).bitcast(FLOATS) for each in rounded)
                error, mean_code, mean_square, mean_product = self.fit(scale, zero)
                found = [error, *rounded]
                is_better = error < best[0] if best else None
                best = (
                    [is_better.select(*pair) for pair in zip(found, best, strict=True)]
                    if best
                    else found
                )
                spread = mean_square - mean_code * mean_code
                slope = (mean_product - mean_code * mean).combine("div", spread)
                scale = (spread.constant(0.0) < spread).select(slope, scale)
                zero = mean - scale * mean_code
        return best[1], best[2]


@instruction(types.void(*[types.int64] * 6), constants=1)
def pack_four_bits(
    builder: ir.IRBuilder,
    kind: int,
    w: Value,
    stride: Value,
    groups: Value,
    shares: Value,
    out: Value,
) -> None:
    """Round and write a block of 16 rows of weights, ``stride`` bytes apart, in four bits."""
    rows = [w + stride * number for number in range(LANES)]
    buffer = cgutils.alloca_once(builder, FLOATS, GROUP)
    place = Value(builder, builder.ptrtoint(buffer, I64))
    halves = ir.VectorType(I16, LANES)
    with turns(groups) as group:
        columns = columns_of(kind, rows, group * GROUP)
        for number, column in enumerate(columns):
            store(place + VECTOR * number, column)
        grid = Grid(place, shares + group * (4 * GROUP))
        scale, zero = grid.best(columns)
        step, offset = ((each << 16).bitcast(FLOATS) for each in (scale, zero))
        inverse = grid.inverse(step)
        codes = [grid.code(column, inverse, offset) for column in columns]
        at = out + group * (GROUP // 8 * VECTOR + 4 * LANES)
        for vector in range(GROUP // 8):
            low, high = (
                bytes_of(codes[first : first + 4])
                for first in (4 * vector, 4 * vector + GROUP // 2)
            )
            store(at + vector * VECTOR, low | high << 4)
        for number, each in enumerate((scale, zero)):
            bits = Value(builder, builder.trunc(each.raw, halves))
            store(at + (GROUP // 8 * VECTOR + 2 * LANES * number), bits)


@instruction(types.void(*[types.int64] * 5), constants=1)
def pack_eight_bits(
    builder: ir.IRBuilder, kind: int, w: Value, stride: Value, groups: Value, out: Value
) -> None:
    """Round and write a block of 16 rows of weights, ``stride`` bytes apart, in eight bits."""
    rows = [w + stride * number for number in range(LANES)]
    largest = Sum(builder)
    with turns(groups) as group:
        for column in columns_of(kind, rows, group * GROUP):
            largest.add(
                lambda most, a, _: on_lanes("maxnum", most, a), on_lanes("fabs", column), column
            )
    scale = largest.value.combine("div", largest.value.constant(127.0))
    zeros = scale * 0.0
    is_used = zeros < scale
    with turns(groups) as group:
        columns = columns_of(kind, rows, group * GROUP)
        ratios = [is_used.select(each.combine("div", scale), zeros) for each in columns]
        # at most 127 times the scale: no code is out of range
        codes = [on_lanes("rint", each) + 128.0 for each in ratios]
        for vector in range(GROUP // 4):
            four = bytes_of(codes[4 * vector : 4 * vector + 4])
            store(out + group * (GROUP * LANES) + vector * VECTOR, four)
    store(out + groups * (GROUP * LANES), scale)


@cache
def packing_task(kind: int, bits: int) -> int:
    """Address of the task that rounds weights of this kind to these bits; a piece is a block."""

    def pack(arguments: int, first: int, end: int) -> None:
        given = array_at(arguments, 1, PACKING)[0]
        for block in range(first, end):
            w = given.weights + block * LANES * given.stride
            out = given.out + block * given.block_bytes
            if bits == 4:
                pack_four_bits(kind, w, given.stride, given.groups, given.shares, out)
            else:
                pack_eight_bits(kind, w, given.stride, given.groups, out)

    return compiled_task(pack, 10 * bits + kind)


def pack(weight: Tensor, bits: int, importance: Tensor | None) -> Generator[None, None, Tensor]:
    """Low-bit copy of ``[out, in]`` weights, made in pieces: uint8 ``[blocks, bytes]``, in the
    layout drawn in ``dot``.

    A block is 16 rows, padded with rows of zeros. For ``importance`` see ``quantise``.
    """
    count, columns = weight.shape
    groups = -(-columns // GROUP)
    blocks = -(-count // LANES)
    block_bytes = LANES * (groups * (GROUP // 2 + 4) if bits == 4 else groups * GROUP + 4)
    out = torch.empty(blocks, block_bytes, dtype=torch.uint8)
    shares = shares_of(importance, columns, weight.device)
    least = max(1, PIECE // (columns * LANES))
    for first in range(0, blocks, least):
        part = weight[first * LANES : (first + least) * LANES]
        if columns % GROUP:
            part = F.pad(
                part.float(), (0, -columns % GROUP), mode="replicate" if bits == 4 else "constant"
            )
        part = F.pad(part, (0, 0, 0, -len(part) % LANES)) if len(part) % LANES else part
        kind = KINDS[part.dtype]
        arguments = (  # in the order of the record
            part.data_ptr(),
            part.stride(0) * NUMBER_BYTES[kind],
            groups,
            shares.data_ptr(),
            out[first].data_ptr(),
            block_bytes,
        )
        on_all_threads(run, packing_task(kind, bits), len(part) // LANES, 1, arguments)
        yield
    return out
