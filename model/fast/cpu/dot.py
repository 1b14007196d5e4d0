"""Dot products of a row of weights with one or more rows of inputs, written as vectors of 16 lanes
in LLVM's IR.

Steps are row-invariant by construction: the instructions that sum a row's products are spelled out
here, and their order does not depend on the other rows of the call. Two accumulators of 16 lanes
alternate, and a fixed tree adds the lanes. LLVM splits such a vector into the registers that a
processor has, so the bits are the same on every processor, except where vdpbf16ps is used, which
rounds differently.

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
    inputs            | 32 codes per group | 4 scale per group | 4 total per group

    64 codes of weights     row 0           row 1                 row 15
    (vector v)            | c c c c       | c c c c       | ... | c c c c       |
    8 bits: columns         4v ... 4v + 3   4v ... 4v + 3         4v ... 4v + 3   plus 128
    4 bits, lower halves    4v ... 4v + 3   the same              the same
    4 bits, upper halves    16 + 4v ...     the same              the same

Four neighbouring codes of inputs, repeated for all 16 rows, meet such a vector of weights.
``decoder.packed`` writes the weights, ``elements.round_to_int8`` the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

BF16, F16, F32, INT4, INT8 = range(5)
LOW_BITS = {4: INT4, 8: INT8}
PACKED = {INT4: 320, INT8: 512}  # bytes of a group of 16 rows of weights
# Rows of inputs that share one reading of the weights. A loop takes time to compile, so rare kinds
# have smaller ones.
TILES = {BF16: (4, 1), F16: (2, 1), F32: (2, 1), INT4: (1,), INT8: (1,)}

LANES = 16
BLOCK = 64  # columns that are summed side by side
GROUP = 32  # inputs per scale; weights too, in four bits
# bytes of prefetching: with many rows of inputs a processor does not read weights ahead by itself
AHEAD = 2048

# instruction sets that Numba compiles for
FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]
PAIRS = "+avx512bf16" in FEATURES  # vdpbf16ps
BYTES = "+avx512vnni" in FEATURES  # vpdpbusd

# kind of the inputs of weights
INPUTS = {BF16: BF16 if PAIRS else F32, F16: F32, F32: F32, INT4: INT8, INT8: INT8}

I8, I16, I32, I64 = map(ir.IntType, (8, 16, 32, 64))
FLOAT = ir.FloatType()
WORDS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(FLOAT, LANES)
# type and bytes of a number of each kind
NUMBERS = {BF16: (I16, 2), F16: (I16, 2), F32: (FLOAT, 4)}


class BFloat(ir.Type):
    """Type ``bfloat`` of LLVM, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOATS = ir.VectorType(BFloat(), 2 * LANES)


class Value:
    """Number or vector of LLVM's IR with Python's operators; a Python number beside it is a
    constant of its type.
    """

    def __init__(self, builder: ir.IRBuilder, raw: ir.Value) -> None:
        self.builder = builder
        self.raw = raw

    def constant(self, *numbers: float) -> Value:
        """Constant of this value's type; the lanes of a vector repeat ``numbers``."""
        lanes = getattr(self.raw.type, "count", 0)
        value = list(numbers) * (lanes // len(numbers)) if lanes else numbers[0]
        return Value(self.builder, ir.Constant(self.raw.type, value))

    def combine(self, operation: str, other: Value | float) -> Value:
        """Result of a builder's method; of its variant for floating point where the numbers are
        float32.
        """
        other = other if isinstance(other, Value) else self.constant(other)
        is_float = getattr(self.raw.type, "element", self.raw.type) == FLOAT
        return Value(
            self.builder, getattr(self.builder, "f" * is_float + operation)(self.raw, other.raw)
        )

    __add__ = partialmethod(combine, "add")
    __sub__ = partialmethod(combine, "sub")
    __mul__ = partialmethod(combine, "mul")
    __floordiv__ = partialmethod(combine, "sdiv")
    __and__ = partialmethod(combine, "and_")
    __or__ = partialmethod(combine, "or_")
    __lshift__ = partialmethod(combine, "shl")
    __rshift__ = partialmethod(combine, "lshr")

    def __lt__(self, other: Value) -> ir.Value:
        return self.builder.icmp_signed("<", self.raw, other.raw)

    def bitcast(self, kind: ir.Type) -> Value:
        """Same bits as another type."""
        return Value(self.builder, self.builder.bitcast(self.raw, kind))

    def shuffle(self, lanes: list[int]) -> Value:
        """Vector of these lanes."""
        numbers = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return Value(self.builder, self.builder.shuffle_vector(self.raw, self.raw, numbers))

    def call(self, name: str, result: ir.Type, *more: Value | ir.Constant) -> Value:
        """Result of an LLVM intrinsic, called with this value and ``more``."""
        arguments = [each.raw if isinstance(each, Value) else each for each in (self, *more)]
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return Value(self.builder, self.builder.call(function, arguments))


class Sum:
    """Sum of products, as 16 partial sums in float32 that LLVM keeps in a register."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder
        self.place = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * LANES))

    @property
    def value(self) -> Value:
        return Value(self.builder, self.builder.load(self.place))

    def add(self, multiply_add: Callable[[Value, Value, Value], Value], a: Value, b: Value) -> None:
        """Add a · b."""
        self.builder.store(multiply_add(self.value, a, b).raw, self.place)


@contextmanager
def turns(count: Value) -> Iterator[Value]:
    """Loop of ``count`` turns, which yields its index; not unrolled, since that would take long to
    compile.
    """
    with cgutils.for_range(count.builder, count.raw) as loop:
        yield Value(count.builder, loop.index)
    module = count.builder.module
    _, last = loop.index.incomings[1]
    not_unrolled = module.add_metadata(["llvm.loop.unroll.disable"])
    last.terminator.set_metadata("llvm.loop", module.add_metadata([not_unrolled]))


def pointer(address: Value, kind: ir.Type) -> Value:
    """Pointer of this type to an address."""
    return Value(address.builder, address.builder.inttoptr(address.raw, kind.as_pointer()))


def load(address: Value, kind: ir.Type, count: Value | None = None) -> Value:
    """Value of this type at an address, aligned or not; with ``count``, only its first lanes, the
    others 0.
    """
    place = pointer(address, kind)
    if count is None:
        return Value(place.builder, place.builder.load(place.raw, align=1))
    name = f"llvm.masked.load.v{kind.count}{'f32' if kind.element == FLOAT else 'i16'}.p0"
    return place.call(
        name, kind, ir.Constant(I32, 1), first_lanes(kind.count, count), ir.Constant(kind, None)
    )


def store(address: Value, value: Value, count: Value | None = None) -> None:
    """Store a float32 number or vector at an address; with ``count``, only its first lanes."""
    place = pointer(address, value.raw.type)
    if count is None:
        place.builder.store(value.raw, place.raw, align=1)
    else:
        value.call(
            f"llvm.masked.store.v{LANES}f32.p0",
            ir.VoidType(),
            place,
            ir.Constant(I32, 1),
            first_lanes(LANES, count),
        )


def first_lanes(lanes: int, count: Value) -> Value:
    """Boolean mask of the first ``count`` lanes."""
    counts = broadcast(count, lanes)
    return Value(count.builder, counts.constant(*range(lanes)) < counts)


def broadcast(value: Value, lanes: int = LANES) -> Value:
    """Vector with ``value`` in every lane."""
    undefined = ir.Constant(ir.VectorType(value.raw.type, lanes), ir.Undefined)
    first = value.builder.insert_element(undefined, value.raw, ir.Constant(I32, 0))
    return Value(value.builder, first).shuffle([0] * lanes)


def add_lanes(values: Value) -> Value:
    """Sum of 16 lanes: one half is added to the other until a single lane remains."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        values = values.shuffle(list(range(lanes))) + values.shuffle(list(range(lanes, 2 * lanes)))
    return Value(values.builder, values.builder.extract_element(values.raw, ir.Constant(I32, 0)))


def widen(kind: int, values: Value) -> Value:
    """Exact float32 of 16 weights, by integer operations, since not every processor converts
    float16.
    """
    if kind == F32:
        return values
    builder = values.builder
    bits = Value(builder, builder.zext(values.raw, WORDS))
    if kind == BF16:
        return (bits << 16).bitcast(FLOATS)
    magnitude = (bits & 0x7FFF) << 13
    sign = (bits & 0x8000) << 16
    # The exponents' biases differ by 112; the largest exponent is that of infinity and NaN in both.
    number = (magnitude.bitcast(FLOATS) * 2.0**112).bitcast(WORDS)
    is_special = builder.icmp_unsigned(">=", magnitude.raw, magnitude.constant(0x0F800000).raw)
    found = builder.select(is_special, (magnitude | 0x7F800000).raw, number.raw)
    return (Value(builder, found) | sign).bitcast(FLOATS)


def fused_multiply_add(total: Value, a: Value, b: Value) -> Value:
    """Fused multiply-add, total + a · b, in 16 lanes of float32, rounded once."""
    return a.call(f"llvm.fma.v{LANES}f32", FLOATS, b, total)


def add_pairs(total: Value, a: Value, b: Value) -> Value:
    """Instruction vdpbf16ps: adds to each of 16 lanes the products of two neighbouring bfloat16
    numbers of 32.
    """
    return total.call(
        "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, a.bitcast(BFLOATS), b.bitcast(BFLOATS)
    )


def add_bytes(total: Value, codes: Value, x: Value) -> Value:
    """Instruction vpdpbusd: adds to each of 16 int32 lanes the products of four unsigned codes and
    signed inputs.
    """
    if BYTES:
        codes, x = (each.bitcast(ir.VectorType(I8, 4 * LANES)) for each in (codes, x))
        return total.call("llvm.x86.avx512.vpdpbusd.512", WORDS, codes, x)
    for byte in range(4):
        total += ((codes >> 8 * byte) & 255) * (x << 24 - 8 * byte).combine("ashr", 24)
    return total


def read(
    kind: int, row: Value, column: Value, left: Value | None = None, lanes: int = LANES
) -> Value:
    """Numbers of a row from a column on, only ``left`` of them if given, the others 0: 16, widened,
    or 32 as they are, for ``add_pairs``.
    """
    number, size = NUMBERS[kind]
    found = load(row + column * size, ir.VectorType(number, lanes), left)
    return widen(kind, found) if lanes == LANES else found


def multiply_floats(
    kind: int, x_kind: int, w: Value, places: list[Value], columns: Value, ahead: Value | None
) -> list[Value]:
    """Dot products of ``columns`` weights at ``w`` with the inputs at each of ``places``, as 16
    partial sums each.

    Weights ``ahead`` bytes further on are prefetched.
    """
    lanes = 2 * LANES if kind == x_kind == BF16 and PAIRS else LANES
    multiply_add = fused_multiply_add if lanes == LANES else add_pairs
    sums = [[Sum(w.builder), Sum(w.builder)] for _ in places]

    def add(first: Value, end: Value | None = None) -> None:
        """Add the products of two vectors of columns from ``first`` on, of those before ``end`` if
        given.
        """
        for number in range(2):
            column = first + number * lanes
            left = None if end is None else end - column
            weights = read(kind, w, column, left, lanes)
            for place, accumulators in zip(places, sums, strict=True):
                inputs = read(x_kind, place, column, left, lanes)
                accumulators[number].add(multiply_add, weights, inputs)

    size = NUMBERS[kind][1]
    whole = columns // (2 * lanes)
    with turns(whole) as turn:
        first = turn * (2 * lanes)
        for line in range(0, 2 * lanes * size, 64) if ahead else ():
            place = pointer(w + ahead + first * size + line, I8)
            to_read = (ir.Constant(I32, each) for each in (0, 3, 1))
            place.call("llvm.prefetch.p0", ir.VoidType(), *to_read)
        add(first)
    rest = whole * (2 * lanes)
    with w.builder.if_then(rest < columns):
        add(rest, columns)
    return [one.value + other.value for one, other in sums]


def multiply_codes(kind: int, w: Value, x: Value, columns: Value) -> Value:
    """Dot products of 16 packed rows of low-bit weights with a row of int8 inputs: one per lane.

    ``columns`` are whole groups. For both operands see the module's docstring.
    """
    groups = columns // GROUP
    scales = x + columns
    totals = scales + groups * 4
    size = PACKED[kind]
    total = Sum(w.builder)
    with turns(groups) as group:
        at = w + group * size
        inputs = x + group * GROUP
        group_total = broadcast(load(totals + group * 4, I32))
        products = group_total if kind == INT8 else group_total.constant(0)
        for vector in range(GROUP // 4 if kind == INT8 else GROUP // 8):
            codes = load(at + 4 * LANES * vector, WORDS)
            parts = [codes] if kind == INT8 else [codes & 0x0F0F0F0F, codes >> 4 & 0x0F0F0F0F]
            for half, each in enumerate(parts):
                four = broadcast(load(inputs + 4 * vector + half * (GROUP // 2), I32))
                products = add_bytes(products, each, four)
        values = Value(w.builder, w.builder.sitofp(products.raw, FLOATS))
        scale = broadcast(load(scales + group * 4, FLOAT))
        if kind == INT4:
            halves = ir.VectorType(I16, LANES)
            scale *= widen(BF16, load(at + (size - 4 * LANES), halves))
            zero = widen(BF16, load(at + (size - 2 * LANES), halves))
            total.add(fused_multiply_add, zero, group_total.bitcast(FLOATS))
        total.add(fused_multiply_add, values, scale)
    return total.value * load(w + groups * size, FLOATS) if kind == INT8 else total.value


class DotOperands(NamedTuple):
    """Operands of ``dot`` behind the kinds, in its order."""

    w: Value
    x: Value
    stride: Value
    rows: Value
    columns: Value
    out: Value
    out_stride: Value
    count: Value


def store_tile(
    kind: int, x_kind: int, given: DotOperands, ahead: Value, first: Value, size: int
) -> None:
    """Store the dot products of ``size`` rows of inputs from ``first`` on, for ``dot``."""
    out = given.out + given.out_stride * first
    places = [given.x + given.stride * (first + number) for number in range(size)]
    if x_kind == INT8:
        store(out, multiply_codes(kind, given.w, places[0], given.columns), given.count)
        return
    ahead = ahead if size > 2 else None
    sums = multiply_floats(kind, x_kind, given.w, places, given.columns, ahead)
    for number, values in enumerate(sums):
        store(out + given.out_stride * number, add_lanes(values))


@intrinsic(prefer_literal=True)
def dot(
    typing: Any,
    kind: Any,
    x_kind: Any,
    w: Any,
    x: Any,
    stride: Any,
    rows: Any,
    columns: Any,
    out: Any,
    out_stride: Any,
    count: Any,
):
    """Dot products of the row of weights at ``w`` with ``rows`` rows of ``columns`` inputs at
    ``x``; in low bits those of the first ``count`` rows of 16.

    Both kinds are constants: each has loops of its own. Rows of inputs are ``stride`` bytes apart,
    and the float32 numbers at ``out`` are ``out_stride`` bytes apart.
    """

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]
    ) -> ir.Value:
        operands = DotOperands(*(Value(builder, each) for each in arguments[2:]))
        rows = operands.rows
        many = builder.icmp_signed(">", rows.raw, ir.Constant(I64, 4))
        ahead = Value(builder, builder.select(many, ir.Constant(I64, AHEAD), ir.Constant(I64, 0)))
        tile = partial(store_tile, kind.literal_value, x_kind.literal_value, operands, ahead)
        done = rows.constant(0)
        for size in TILES[kind.literal_value]:
            whole = (rows - done) // size
            with turns(whole) as turn:
                tile(done + turn * size, size)
            done += whole * size
        return context.get_dummy_value()

    return types.void(kind, x_kind, *[types.int64] * 8), generate


class SumOperands(NamedTuple):
    """Operands of ``sum_rows`` behind the kind, in its order."""

    rows: Value
    stride: Value
    weights: Value
    count: Value
    columns: Value
    out: Value


def store_sums(kind: int, given: SumOperands, first: Value, end: Value | None = None) -> None:
    """Store the sums of the 64 columns from ``first`` on, of those before ``end`` if given, for
    ``sum_rows``.
    """
    columns = [first + start for start in range(0, BLOCK, LANES)]
    left = [None if end is None else end - column for column in columns]
    sums = [Sum(first.builder) for _ in columns]
    with turns(given.count) as turn:
        row = given.rows + turn * given.stride
        weight = broadcast(load(given.weights + turn * 4, FLOAT))
        for column, total, rest in zip(columns, sums, left, strict=True):
            total.add(fused_multiply_add, read(kind, row, column, rest), weight)
    for column, total, rest in zip(columns, sums, left, strict=True):
        store(given.out + column * 4, total.value, rest)


@intrinsic(prefer_literal=True)
def sum_rows(
    typing: Any, kind: Any, rows: Any, stride: Any, weights: Any, count: Any, columns: Any, out: Any
):
    """Weighted sum, in float32, of ``count`` rows of numbers of this kind, in order, by their
    float32 ``weights``.

    Rows have ``columns`` numbers and begin ``stride`` bytes apart. Four vectors of 16 columns are
    summed side by side.
    """
    kinds = [kind.literal_value] if isinstance(kind, types.Literal) else list(NUMBERS)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]
    ) -> ir.Value:
        operands = SumOperands(*(Value(builder, each) for each in arguments[1:]))
        columns = operands.columns
        whole = columns // BLOCK
        for each in kinds:
            with builder.if_then(builder.icmp_signed("==", arguments[0], ir.Constant(I64, each))):
                with turns(whole) as turn:
                    store_sums(each, operands, turn * BLOCK)
                with builder.if_then(whole * BLOCK < columns):
                    store_sums(each, operands, whole * BLOCK, columns)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), generate
