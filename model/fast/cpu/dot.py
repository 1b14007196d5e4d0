"""Dot products of rows of weights with rows of inputs, and weighted sums of rows: instructions on
vectors of 16 lanes (``kernels``).

A *tile* is the products of a few rows of weights with a few rows of inputs. Each vector that it
loads takes part in several products, so processors multiply rather than load. A *block* is the rows
of weights of a tile, which all rows of inputs meet, tile after tile, while it is in the cache.

Steps are row-invariant by construction: the instructions that sum a row's products are spelled out
here, and their order depends neither on the tile nor on the other rows of the call. Each product of
two rows has one sum of 16 lanes, to which vectors of columns are added from the first to the last,
and a fixed tree adds the lanes (``kernels.add_lanes``). LLVM splits such a vector into the
registers that a processor has, so the bits are the same on every processor, except where vdpbf16ps
is used, which rounds differently.

    kind          inputs                                       product
    BF16          bfloat16 where the processor has vdpbf16ps   pairs of bfloat16
                  float32 elsewhere                            fused multiply-add of widened weights
    F16, F32      float32                                      fused multiply-add of widened weights
    INT4, INT8    int8 with a scale per 32 inputs              exact integer sums (vpdpbusd)

Weights and inputs are passed by address: the weights stay in the tensors that torch reads for a
prompt.

In low bits a block of 16 rows of weights, one per lane, is multiplied by a row of inputs, group by
group of 32 columns. Both lie in memory as follows, with the bytes of each part. ::

    weights, 4 bits   | 256 codes | 32 scales | 32 zeros | next group ...       bfloat16 numbers
    weights, 8 bits   | 512 codes | next group ... | 64 scales of the rows      float32 numbers
    inputs            | 32 codes per group | 4 scale | 4 total | 4 correction, each per group

    64 codes of weights     row 0           row 1                 row 15
    (vector v)            | c c c c       | c c c c       | ... | c c c c       |
    8 bits: columns         4v ... 4v + 3   4v ... 4v + 3         4v ... 4v + 3   plus 128
    4 bits, lower halves    4v ... 4v + 3   the same              the same
    4 bits, upper halves    16 + 4v ...     the same              the same

Four neighbouring codes of inputs, repeated for all 16 rows, meet such a vector of weights. A total
is the sum of a group's codes times its scale, in float32; a correction is the sum times -128, in
int32, for weights that are stored plus 128. ``rounding.pack`` writes the weights,
``elements.round_to_int8`` the inputs.
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from model.fast.cpu.kernels import (
    FLOAT,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    SHORTS,
    Sum,
    Value,
    add_lanes,
    broadcast,
    in_blocks,
    instruction,
    load,
    on_lanes,
    prefetch,
    store,
    turns,
)
from model.quantise import GROUP

BF16, F16, F32, INT4, INT8 = range(5)  # kinds of numbers
LOW_BITS = {4: INT4, 8: INT8}
NUMBER_BYTES = (2, 2, 4)  # of BF16, F16 and F32
NUMBER_TYPES = (I16, I16, FLOAT)  # of LLVM

# processor and instruction sets that Numba compiles for
TRIPLE, _, FEATURES = cpu_target.target_context.codegen().magic_tuple()
CONVERTS_FLOAT16 = "+f16c" in FEATURES or TRIPLE.startswith(("aarch64", "arm64"))
HAS_VDPBF16PS = "+avx512bf16" in FEATURES
HAS_VPDPBUSD = "+avx512vnni" in FEATURES

# Rows of weights of a block, and rows of inputs of its tiles. A register holds one sum of a tile.
BLOCK_ROWS = 4 if "+avx512f" in FEATURES else 2
TILES = (4, 2, 1) if "+avx512f" in FEATURES else (2, 1)
BLOCK = BLOCK_ROWS * LANES  # columns that ``add_rows`` sums side by side
BLOCKS_AHEAD = (1, 2)  # of prefetching

# kind of the inputs of weights
INPUTS = {BF16: BF16 if HAS_VDPBF16PS else F32, F16: F32, F32: F32, INT4: INT8, INT8: INT8}


class BFloat(ir.Type):
    """Type ``bfloat`` of LLVM, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOATS = ir.VectorType(BFloat(), 2 * LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)


def widen(kind: int, values: Value) -> Value:
    """Exact float32 of 16 numbers of this kind."""
    if kind == F32:
        return values
    if kind == F16:
        return values.cast(HALVES).cast(FLOATS, "fpext")
    return (values.cast(INTS, "zext") << 16).cast(FLOATS)


def narrow(kind: int, values: Value) -> Value:
    """Float32 numbers rounded to this kind, ties to even. NaN and infinity stay, so that non-finite
    numbers are still found.
    """
    if kind == F32:
        return values
    if kind == F16:
        return values.cast(HALVES, "fptrunc").cast(SHORTS)
    bits = values.cast(INTS)
    is_nan = bits.constant(0x7F800000) < (bits & 0x7FFFFFFF)
    rounded = is_nan.select(bits | 0x400000, bits + 0x7FFF + (bits >> 16 & 1))
    return (rounded >> 16).cast(SHORTS, "trunc")


def fused_multiply_add(total: Value, a: Value, b: Value) -> Value:
    """Fused multiply-add, total + a · b, in 16 lanes of float32, rounded once."""
    return on_lanes("fma", a, b, total)


def add_pairs(total: Value, a: Value, b: Value) -> Value:
    """Instruction vdpbf16ps: adds to each of 16 lanes the products of two neighbouring bfloat16
    numbers of 32.
    """
    return total.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, a.cast(BFLOATS), b.cast(BFLOATS))


def add_bytes(total: Value, codes: Value, x: Value) -> Value:
    """Instruction vpdpbusd: adds to 16 int32 lanes four products of codes and inputs each."""
    if HAS_VPDPBUSD:
        codes, x = (each.cast(ir.VectorType(I8, 4 * LANES)) for each in (codes, x))
        return total.call("llvm.x86.avx512.vpdpbusd.512", INTS, codes, x)
    for byte in range(4):
        total += ((codes >> 8 * byte) & 255) * (x << 24 - 8 * byte).combine("ashr", 24)
    return total


def read(
    kind: int, row: Value, column: Value, left: Value | None = None, lanes: int = LANES
) -> Value:
    """Numbers of a row from a column on, only ``left`` of them if given, the others 0: 16, widened,
    or 32 as they are, for ``add_pairs``.
    """
    vector = ir.VectorType(NUMBER_TYPES[kind], lanes)
    found = load(row + column * NUMBER_BYTES[kind], vector, left)
    return widen(kind, found) if lanes == LANES else found


def multiply_floats(
    kind: int,
    x_kind: int,
    rows: list[Value],
    inputs: list[Value],
    columns: Value,
    size: Value,
    is_only: Value,
) -> Value:
    """Dot products of each of ``rows`` of weights with each of ``inputs``, row by row of inputs.

    Each takes ``columns`` columns. The next blocks of weights, of ``size`` bytes each, are
    prefetched; once more if this is the only tile of the block, since a processor drops requests.
    """
    lanes = 2 * LANES if kind == x_kind == BF16 and HAS_VDPBF16PS else LANES
    multiply_add = fused_multiply_add if lanes == LANES else add_pairs
    sums = [[Sum(columns.builder) for _ in rows] for _ in inputs]
    line = lanes * NUMBER_BYTES[kind]  # bytes of a row's vector

    def add_vector(first: Value, left: Value | None) -> None:
        """Add the products of the columns from ``first`` on, only ``left`` of them if given."""
        place = rows[0] + first * (len(rows) * NUMBER_BYTES[kind])
        ahead = [
            place + size * blocks + number * line
            for blocks in BLOCKS_AHEAD
            for number in range(len(rows))
        ]
        for each in ahead:
            prefetch(each)
        with columns.builder.if_then(is_only.raw):
            for each in ahead:
                prefetch(each)
        vectors = [read(x_kind, each, first, left, lanes) for each in inputs]
        for number, row in enumerate(rows):
            weights = read(kind, row, first, left, lanes)
            for vector, accumulators in zip(vectors, sums, strict=True):
                accumulators[number].add(multiply_add, weights, vector)

    in_blocks(columns, lanes, add_vector)
    return add_lanes([total.value for accumulators in sums for total in accumulators])


def multiply_codes(kind: int, w: Value, inputs: list[Value], columns: Value) -> list[Value]:
    """Dot products of 16 packed rows of low-bit weights, one per lane, with each of ``inputs``.

    These are rows of int8, and ``columns`` are whole groups. For both operands see the module's
    docstring.
    """
    groups = columns // GROUP
    vectors = GROUP // 4 if kind == INT8 else GROUP // 8
    codes_bytes = vectors * 4 * LANES
    group_bytes = codes_bytes if kind == INT8 else codes_bytes + 4 * LANES
    sums = [Sum(w.builder) for _ in inputs]
    with turns(groups) as group:
        at = w + group * group_bytes
        scales = [x + columns + group * 4 for x in inputs]
        corrections = [broadcast(load(scale + groups * 8, I32)) for scale in scales]
        products = [each if kind == INT8 else each.constant(0) for each in corrections]
        for vector in range(vectors):
            codes = load(at + 4 * LANES * vector, INTS)
            parts = [codes] if kind == INT8 else [codes & 0x0F0F0F0F, codes >> 4 & 0x0F0F0F0F]
            for half, part in enumerate(parts):
                place = group * GROUP + (4 * vector + half * (GROUP // 2))
                products = [
                    add_bytes(total, part, broadcast(load(x + place, I32)))
                    for total, x in zip(products, inputs, strict=True)
                ]
        if kind == INT4:
            step = widen(BF16, load(at + codes_bytes, SHORTS))
            zero = widen(BF16, load(at + (codes_bytes + 2 * LANES), SHORTS))
        for number, total in enumerate(sums):
            values = products[number].cast(FLOATS, "sitofp")
            scale = broadcast(load(scales[number], FLOAT))
            if kind == INT4:
                scale *= step
                of_inputs = broadcast(load(scales[number] + groups * 4, FLOAT))
                total.add(fused_multiply_add, zero, of_inputs)
            total.add(fused_multiply_add, values, scale)
    if kind == INT4:
        return [total.value for total in sums]
    row_scales = load(w + groups * group_bytes, FLOATS)
    return [total.value * row_scales for total in sums]


@instruction(types.void(*[types.int64] * 11), constants=2)
def dot(
    builder: ir.IRBuilder,
    kind: int,
    x_kind: int,
    w: Value,
    w_stride: Value,
    x: Value,
    x_stride: Value,
    rows: Value,
    columns: Value,
    out: Value,
    out_stride: Value,
    count: Value,
) -> None:
    """Dot products of the first ``count`` rows of a block of weights at ``w`` with ``rows`` rows of
    ``columns`` inputs at ``x``.

    Rows are ``w_stride`` and ``x_stride`` bytes apart, except those of packed weights. The float32
    products of a row of inputs are side by side at ``out``, ``out_stride`` bytes after those of
    the row before.
    """
    last = count - 1
    # A missing row is the last one once more.
    numbers = [last.call("llvm.smin.i64", I64, last.constant(row)) for row in range(BLOCK_ROWS)]
    weights = [w + w_stride * number for number in numbers]

    def store_tile(first: Value, size: int) -> None:
        """Store the products of ``size`` rows of inputs from ``first`` on."""
        inputs = [x + x_stride * (first + number) for number in range(size)]
        if x_kind == INT8:
            found = multiply_codes(kind, w, inputs, columns)
        else:
            sums = multiply_floats(
                kind,
                x_kind,
                weights,
                inputs,
                columns,
                size=w_stride * BLOCK_ROWS,
                is_only=rows < rows.constant(size + 1),
            )
            of_rows = range(0, size * BLOCK_ROWS, BLOCK_ROWS)
            found = [sums.shuffle(list(range(place, place + BLOCK_ROWS))) for place in of_rows]
        for number, values in enumerate(found):
            store(out + out_stride * (first + number), values, count)

    in_tiles(rows, store_tile)


def in_tiles(count: Value, append: Callable[[Value, int], None]) -> None:
    """Loops over ``count`` rows: ``append(first, size)`` for each tile of ``size`` rows."""
    done = count.constant(0)
    for size in TILES:
        whole = (count - done) // size
        with turns(whole) as turn:
            append(done + turn * size, size)
        done += whole * size


@instruction(types.void(*[types.int64] * 9), constants=1)
def add_rows(
    builder: ir.IRBuilder,
    kind: int,
    rows: Value,
    stride: Value,
    count: Value,
    columns: Value,
    weights: Value,
    weights_stride: Value,
    out: Value,
    sums: Value,
) -> None:
    """Add to each of the ``sums`` rows of float32 numbers at ``out`` a weighted sum of ``count``
    rows of numbers of this kind, one after the other.

    The rows have ``columns`` numbers and begin ``stride`` bytes apart, the float32 weights of a sum
    ``weights_stride`` bytes.
    """

    def add_to_tile(first: Value, size: int) -> None:
        """Add the rows to the sums of a tile, ``size`` from ``first`` on."""
        numbers = [first + number for number in range(size)]

        def add_columns(start: Value, rest: Value | None) -> None:
            """Add 64 columns from ``start`` on, only ``rest`` of them if given."""
            vectors = [
                (start + column, None if rest is None else rest - column)
                for column in range(0, BLOCK, LANES)
            ]
            places = [
                [out + (columns * number + column) * 4 for column, _ in vectors]
                for number in numbers
            ]
            tile = [
                [
                    Sum(builder, load(place, FLOATS, left))
                    for place, (_, left) in zip(row, vectors, strict=True)
                ]
                for row in places
            ]
            with turns(count) as turn:
                row = rows + turn * stride
                values = [read(kind, row, column, left) for column, left in vectors]
                for number, totals in zip(numbers, tile, strict=True):
                    weight = broadcast(load(weights + weights_stride * number + turn * 4, FLOAT))
                    for vector, total in zip(values, totals, strict=True):
                        total.add(fused_multiply_add, vector, weight)
            for row, totals in zip(places, tile, strict=True):
                for place, total, (_, left) in zip(row, totals, vectors, strict=True):
                    store(place, total.value, left)

        in_blocks(columns, BLOCK, add_columns)

    in_tiles(sums, add_to_tile)


@instruction(types.float32(*[types.int64] * 3), constants=1)
def add_numbers(builder: ir.IRBuilder, power: int, place: Value, count: Value) -> Value:
    """Sum of ``count`` float32 numbers at a place, or in the second power of their squares."""
    total = Sum(builder)

    def add_vector(first: Value, left: Value | None) -> None:
        numbers = read(F32, place, first, left)
        factors = numbers if power == 2 else numbers.constant(1.0)
        total.add(fused_multiply_add, numbers, factors)

    in_blocks(count, LANES, add_vector)
    sums = add_lanes([total.value])
    return Value(builder, builder.extract_element(sums.raw, ir.Constant(I32, 0)))


@instruction(types.void(*[types.int64] * 4))
def widen_row(builder: ir.IRBuilder, kind: Value, row: Value, columns: Value, out: Value) -> None:
    """Store the numbers of a row of this kind as float32."""

    def widen_vector(kind: int, first: Value, left: Value | None) -> None:
        store(out + first * 4, read(kind, row, first, left), left)

    in_kind(kind, columns, widen_vector)


@instruction(types.void(*[types.int64] * 4))
def narrow_row(builder: ir.IRBuilder, kind: Value, row: Value, columns: Value, out: Value) -> None:
    """Store a row of float32 numbers rounded to this kind."""

    def narrow_vector(kind: int, first: Value, left: Value | None) -> None:
        store(out + first * NUMBER_BYTES[kind], narrow(kind, read(F32, row, first, left)), left)

    in_kind(kind, columns, narrow_vector)


def in_kind(
    kind: Value, columns: Value, append: Callable[[int, Value, Value | None], None]
) -> None:
    """Loop over vectors of ``columns`` (``in_blocks``) for a kind that is known when it runs."""
    for each in (BF16, F16, F32):
        is_each = kind.builder.icmp_signed("==", kind.raw, kind.constant(each).raw)
        with kind.builder.if_then(is_each):
            in_blocks(columns, LANES, partial(append, each))
