"""Compiled rounding of weights: codes, scales and zeros as ``model.quantise`` finds them, bit for
bit, written as the steps read them (``dot``).

A block of 16 rows is rounded at a time, a row per lane, group by group of 32 columns. A group's
weights are read once, and stay in the first cache while its grids are tried.
"""

from collections.abc import Generator
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from model.fast.cpu.dot import BF16, F16, F32, NUMBER_BYTES, narrow, read, widen
from model.fast.cpu.kernels import (
    FLOAT,
    FLOATS,
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
from model.quantise import CUTS, FITS, GROUP, LEVELS, shares_of

KINDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
PIECE = 1 << 21  # weights rounded at a time: a millisecond or two
VECTOR = 4 * LANES  # bytes

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
    first, *more = (code.cast(INTS, "fptosi") for code in codes)
    for number, code in enumerate(more, start=1):
        first |= code << 8 * number
    return first


def code_of(weight: Value, scale: Value, zero: Value) -> Value:
    """Code of a weight in four bits, as float32."""
    least = scale.constant(0.0)
    inverse = (least < scale).select(scale.constant(1.0).combine("div", scale), least)
    code = on_lanes("floor", (weight - zero) * inverse + 0.5)
    return on_lanes("minnum", on_lanes("maxnum", code, least), code.constant(LEVELS))


def fit(weights: Value, shares: Value, scale: Value, zero: Value) -> list[Value]:
    """Weighted means over a group of the squared error, the code, its square, and code times
    weight: see ``best_grid``.
    """
    sums = [Sum(scale.builder) for _ in range(4)]
    with turns(weights.constant(GROUP)) as column:
        share = broadcast(load(shares + column * 4, FLOAT))
        weight = load(weights + column * VECTOR, FLOATS)
        code = code_of(weight, scale, zero)
        off = code * scale + zero - weight
        for total, value in zip(sums, (off * off, code, code * code, code * weight), strict=True):
            total.add(multiply_then_add, value, share)
    return [total.value for total in sums]


def best_grid(columns: list[Value], weights: Value, shares: Value) -> tuple[Value, Value]:
    """Scale and zero of a group of 16 rows with the least weighted error of the candidates, in the
    order of operations of ``model.quantise.round_groups``.

    ``columns`` are its weights, which are also stored at ``weights``; at ``shares`` are 32 numbers.
    """
    low = high = columns[0]
    mean = low.constant(0.0)
    for number, column in enumerate(columns):
        low = on_lanes("minnum", low, column)
        high = on_lanes("maxnum", high, column)
        mean += column * broadcast(load(shares + 4 * number, FLOAT))
    best: list[Value] = []  # error, scale and zero
    for cut in CUTS:
        scale = (high - low) * ((1 - 2 * cut / LEVELS) / LEVELS)
        zero = (low + high - scale * LEVELS) * 0.5
        for _ in range(FITS + 1):
            scale = widen(BF16, narrow(BF16, scale))
            zero = widen(BF16, narrow(BF16, zero))
            error, mean_code, mean_square, mean_product = fit(weights, shares, scale, zero)
            found = [error, scale, zero]
            if best:
                is_better = error < best[0]
                found = [is_better.select(*pair) for pair in zip(found, best, strict=True)]
            best = found
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
    with turns(groups) as group:
        columns = columns_of(kind, rows, group * GROUP)
        for number, column in enumerate(columns):
            store(place + VECTOR * number, column)
        scale, zero = best_grid(columns, place, shares + group * (4 * GROUP))
        codes = [code_of(column, scale, zero) for column in columns]
        at = out + group * (GROUP // 8 * VECTOR + 4 * LANES)
        for vector in range(GROUP // 8):
            low = bytes_of(codes[4 * vector : 4 * vector + 4])
            high = bytes_of(codes[4 * vector + GROUP // 2 : 4 * vector + GROUP // 2 + 4])
            store(at + vector * VECTOR, low | high << 4)
        for number, each in enumerate((scale, zero)):
            store(at + (GROUP // 8 * VECTOR + 2 * LANES * number), narrow(BF16, each))


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
            part = F.pad(part.float(), (0, -columns % GROUP), mode="replicate")
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
