"""Dot products of a row of weights with one or more rows of inputs, written as vectors of 16 lanes in LLVM's IR.

Steps are row-invariant by construction: the instructions that sum a row's products are spelled out here, and their
order does not depend on the other rows of the call. Two accumulators of 16 lanes alternate, and a fixed tree adds the
lanes. LLVM splits such a vector into the registers that a processor has, so the bits are the same on every processor,
except where vdpbf16ps is used, which rounds differently.

    kind          inputs                                       product
    BF16          bfloat16 where the processor has vdpbf16ps   pairs of bfloat16
                  float32 elsewhere                            fused multiply-add of widened weights
    F16, F32      float32                                      fused multiply-add of widened weights
    INT4 to INT8  int8 with a scale per 32 inputs              exact integer sums (vpdpbusd where available)

Weights and inputs are passed by address: the weights stay in the tensors that torch reads for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

BF16, F16, F32, INT4, INT6, INT8 = range(6)
LOW_BITS = {4: INT4, 6: INT6, 8: INT8}

LANES = 16
BLOCK = 64  # columns: two groups, whose low bits are packed together
GROUP = 32  # inputs per scale; weights too, in four and six bits
AHEAD = 2048  # bytes of prefetching: with many rows of inputs a processor does not read weights ahead by itself

FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]  # instruction sets that Numba compiles for
PAIRS = "+avx512bf16" in FEATURES  # vdpbf16ps
BYTES = "+avx512vnni" in FEATURES  # vpdpbusd

I8, I16, I32, I64, FLOAT = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
WORDS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(FLOAT, LANES)
NUMBERS = {BF16: (I16, 2), F16: (I16, 2), F32: (FLOAT, 4)}  # type and bytes of a number of each kind


class BFloat(ir.Type):
    """Type ``bfloat`` of LLVM, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOATS = ir.VectorType(BFloat(), 2 * LANES)


class Value:
    """Number or vector of LLVM's IR with Python's operators; a Python number beside it is a constant of its type."""

    def __init__(self, builder: ir.IRBuilder, raw: ir.Value) -> None:
        self.builder, self.raw = builder, raw

    def constant(self, *numbers: float) -> Value:
        """Constant of this value's type; the lanes of a vector repeat ``numbers``."""
        lanes = getattr(self.raw.type, "count", 0)
        value = list(numbers) * (lanes // len(numbers)) if lanes else numbers[0]
        return Value(self.builder, ir.Constant(self.raw.type, value))

    def combine(self, operation: str, other: Value | float) -> Value:
        """Result of a builder's method; of its variant for floating point where the numbers are float32."""
        other = other if isinstance(other, Value) else self.constant(other)
        is_float = getattr(self.raw.type, "element", self.raw.type) == FLOAT
        return Value(self.builder, getattr(self.builder, "f" * is_float + operation)(self.raw, other.raw))

    __add__, __sub__, __mul__ = map(partial(partialmethod, combine), ("add", "sub", "mul"))
    __floordiv__, __and__, __or__ = map(partial(partialmethod, combine), ("sdiv", "and_", "or_"))
    __lshift__, __rshift__ = map(partial(partialmethod, combine), ("shl", "lshr"))

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
    """Loop of ``count`` turns, which yields its index; not unrolled, since that would take long to compile."""
    with cgutils.for_range(count.builder, count.raw) as loop:
        yield Value(count.builder, loop.index)
    module, (_, last) = count.builder.module, loop.index.incomings[1]
    not_unrolled = module.add_metadata(["llvm.loop.unroll.disable"])
    last.terminator.set_metadata("llvm.loop", module.add_metadata([not_unrolled]))


def pointer(address: Value, kind: ir.Type) -> Value:
    """Pointer of this type to an address."""
    return Value(address.builder, address.builder.inttoptr(address.raw, kind.as_pointer()))


def load(address: Value, kind: ir.Type, count: Value | None = None) -> Value:
    """Value of this type at an address, aligned or not; with ``count``, only its first lanes, the others 0."""
    place = pointer(address, kind)
    if count is None:
        return Value(place.builder, place.builder.load(place.raw, align=1))
    name = f"llvm.masked.load.v{kind.count}{'f32' if kind.element == FLOAT else 'i16'}.p0"
    return place.call(name, kind, ir.Constant(I32, 1), first_lanes(kind.count, count), ir.Constant(kind, None))


def store(address: Value, value: Value, count: Value | None = None) -> None:
    """Store a float32 number or vector at an address; with ``count``, only its first lanes."""
    place = pointer(address, value.raw.type)
    if count is None:
        place.builder.store(value.raw, place.raw, align=1)
    else:
        mask = first_lanes(LANES, count)
        value.call(f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), place, ir.Constant(I32, 1), mask)


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
    """Exact float32 of 16 weights, by integer operations, since not every processor converts float16."""
    if kind == F32:
        return values
    builder = values.builder
    bits = Value(builder, builder.zext(values.raw, WORDS))
    if kind == BF16:
        return (bits << 16).bitcast(FLOATS)
    magnitude, sign = (bits & 0x7FFF) << 13, (bits & 0x8000) << 16
    # The exponents' biases differ by 112; the largest exponent is that of infinity and NaN in both.
    number = (magnitude.bitcast(FLOATS) * 2.0**112).bitcast(WORDS)
    is_special = builder.icmp_unsigned(">=", magnitude.raw, magnitude.constant(0x0F800000).raw)
    found = builder.select(is_special, (magnitude | 0x7F800000).raw, number.raw)
    return (Value(builder, found) | sign).bitcast(FLOATS)


def fused_multiply_add(total: Value, a: Value, b: Value) -> Value:
    """Fused multiply-add, total + a · b, in 16 lanes of float32, rounded once."""
    return a.call(f"llvm.fma.v{LANES}f32", FLOATS, b, total)


def add_pairs(total: Value, a: Value, b: Value) -> Value:
    """Instruction vdpbf16ps: adds to each of 16 lanes the products of two neighbouring bfloat16 numbers of 32."""
    return total.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, a.bitcast(BFLOATS), b.bitcast(BFLOATS))


def add_bytes(total: Value, codes: Value, x: Value) -> Value:
    """Instruction vpdpbusd: adds to each of 16 int32 lanes the products of four unsigned codes and signed inputs."""
    if BYTES:
        codes, x = (each.bitcast(ir.VectorType(I8, 4 * LANES)) for each in (codes, x))
        return total.call("llvm.x86.avx512.vpdpbusd.512", WORDS, codes, x)
    for byte in range(4):
        total += ((codes >> 8 * byte) & 255) * (x << 24 - 8 * byte).combine("ashr", 24)
    return total


def multiply_floats(
    kind: int, w: Value, x_kind: int, rows: list[Value], columns: Value, ahead: Value | None = None
) -> list[Value]:
    """Dot products of ``columns`` weights at ``w`` with the inputs at each of ``rows``, as 16 partial sums each.

    Weights ``ahead`` bytes further on are prefetched.
    """
    pairs = kind == x_kind == BF16 and PAIRS
    lanes, multiply_add = (2 * LANES, add_pairs) if pairs else (LANES, fused_multiply_add)
    sums = [[Sum(w.builder) for _ in range(2)] for _ in rows]

    def read(row: Value, row_kind: int, column: Value, left: Value | None) -> Value:
        number, size = NUMBERS[row_kind]
        found = load(row + column * size, ir.VectorType(number, lanes), left)
        return found if pairs else widen(row_kind, found)

    def add_two(first: Value, *, partly: bool) -> None:
        for number in range(2):
            column = first + number * lanes
            left = columns - column if partly else None
            weights = read(w, kind, column, left)
            for row, accumulators in zip(rows, sums, strict=True):
                accumulators[number].add(multiply_add, weights, read(row, x_kind, column, left))

    whole, size = columns // (2 * lanes), NUMBERS[kind][1]
    with turns(whole) as turn:
        first = turn * (2 * lanes)
        for line in range(0, 2 * lanes * size, 64) if ahead else ():
            place = pointer(w + ahead + first * size + line, I8)
            place.call("llvm.prefetch.p0", ir.VoidType(), *(ir.Constant(I32, each) for each in (0, 3, 1)))  # to read
        add_two(first, partly=False)
    rest = whole * (2 * lanes)
    with w.builder.if_then(rest < columns):
        add_two(rest, partly=True)
    return [one.value + other.value for one, other in sums]


def multiply_codes(kind: int, w: Value, x: Value, columns: Value) -> Value:
    """Dot product of a packed row of low-bit weights with a row of int8 inputs, as 16 partial sums.

    ``columns`` are whole blocks. A row of weights (``model.fast.cpu.decoder.packed``) has unsigned codes first. Behind
    them are, in four and six bits, a scale and a zero per group in bfloat16, the zeros padded to whole vectors; in
    eight bits one float32 scale. For a row of inputs see ``model.fast.cpu.elements.round_to_int8``.
    """
    bits = next(bits for bits, each in LOW_BITS.items() if each == kind)
    groups = columns // GROUP
    scales, sums, input_scales = w + columns * bits // 8, x + columns, x + columns * 2
    total = Sum(w.builder)
    with turns(columns // BLOCK) as turn:
        at = turn * BLOCK
        codes, inputs = load_codes(kind, w, turn, columns), load(x + at, WORDS)
        # Codes of eight bits are stored plus 128: 128 times the sum of the inputs is subtracted.
        begin = load(sums + at, WORDS) if kind == INT8 else codes.constant(0)
        products = add_bytes(begin, codes, inputs)
        scale = load(input_scales + turn * 8, ir.VectorType(FLOAT, 2)).shuffle([0, 1] * (LANES // 2))
        if kind != INT8:
            both = broadcast(load(scales + turn * 4, I32))
            scale *= ((both << both.constant(16, 0)) & 0xFFFF0000).bitcast(FLOATS)  # bfloat16 of even and odd lanes
        total.add(fused_multiply_add, Value(w.builder, w.builder.sitofp(products.raw, FLOATS)), scale)
    if kind == INT8:
        return total.value * broadcast(load(scales, FLOAT))
    zeros, group_sums = scales + groups * 2, input_scales + groups * 4
    with turns((groups + (LANES - 1)) // LANES) as turn:
        zero = widen(BF16, load(zeros + turn * (2 * LANES), ir.VectorType(I16, LANES)))
        total.add(fused_multiply_add, zero, load(group_sums + turn * (4 * LANES), FLOATS))
    return total.value


def load_codes(kind: int, w: Value, block: Value, columns: Value) -> Value:
    """Codes of a block, 64 bytes in the order of the inputs: ``[16]`` int32."""
    if kind == INT8:
        return load(w + block * BLOCK, WORDS)

    def spread(plane: Value, bits: int, left: list[int]) -> Value:
        """Plane of ``bits`` bits per code, repeated to fill a vector, each repeat rotated by its number in ``left``."""
        lanes = LANES * bits // 8
        loaded = load(plane + block * (BLOCK * bits // 8), ir.VectorType(I32, lanes))
        whole = loaded.shuffle(list(range(lanes)) * (LANES // lanes))
        by = whole.constant(*(each for each in left for _ in range(lanes)))
        return whole.call(f"llvm.fshl.v{LANES}i32", WORDS, whole, by)

    low = spread(w, 4, [0, 28]) & 0x0F0F0F0F
    if kind == INT4:
        return low
    return low | spread(w + columns // 2, 2, [4, 2, 0, 30]) & 0x30303030


def dot_function(forms: dict[int, tuple[int, tuple[int, ...]]]) -> Callable[..., None]:
    """Function ``(kind, w, x, stride, rows, columns, out, out_stride)`` for Numba: products with a row of weights.

    It reads weights of that kind at ``w``, and ``rows`` rows of inputs at ``x``, ``stride`` bytes apart, in tiles that
    share one reading of the weights. It writes float32 numbers to ``out``, ``out_stride`` bytes apart. ``forms`` maps
    each kind of weights to the kind of inputs and the sizes of tiles. Each kind and size has separate loops, without
    the constants of the others. Loops take time to compile, so rare kinds have fewer sizes.
    """

    @intrinsic
    def dot(typing: Any, kind: Any, w: Any, x: Any, stride: Any, rows: Any, columns: Any, out: Any, out_stride: Any):
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
            kind, w, x, stride, count, columns, out, out_stride = (Value(builder, each) for each in arguments)
            many = builder.icmp_signed(">", count.raw, ir.Constant(I64, 4))
            ahead = Value(builder, builder.select(many, ir.Constant(I64, AHEAD), ir.Constant(I64, 0)))

            def tile(each: int, first: Value, size: int) -> None:
                numbers = [first + number for number in range(size)]
                rows = [x + stride * number for number in numbers]
                if each in LOW_BITS.values():
                    terms = [multiply_codes(each, w, rows[0], columns)]
                else:
                    terms = multiply_floats(each, w, forms[each][0], rows, columns, ahead if size > 2 else None)
                for number, values in zip(numbers, terms, strict=True):
                    store(out + out_stride * number, add_lanes(values))

            for each, (_, tiles) in forms.items():
                with builder.if_then(builder.icmp_signed("==", kind.raw, ir.Constant(I64, each))):
                    done = kind.constant(0)
                    for size in tiles:
                        whole = (count - done) // size
                        with turns(whole) as turn:
                            tile(each, done + turn * size, size)
                        done += whole * size
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return dot


dot_rows = dot_function(
    {
        BF16: (BF16 if PAIRS else F32, (4, 1)),
        F16: (F32, (2, 1)),
        F32: (F32, (2, 1)),
        **dict.fromkeys(LOW_BITS.values(), (INT8, (1,))),
    }
)
dot_keys = dot_function({BF16: (BF16, (4, 1)), F16: (F16, (1,)), F32: (F32, (1,))})  # a query with keys of the cache


@intrinsic
def sum_rows(typing: Any, kind: Any, rows: Any, stride: Any, weights: Any, count: Any, columns: Any, out: Any):
    """Weighted sum, in float32, of ``count`` rows of numbers of this kind, in order, by their float32 ``weights``.

    Rows have ``columns`` numbers and begin ``stride`` bytes apart. Four vectors of 16 columns are summed side by side.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        rows, stride, weights, count, columns, out = (Value(builder, each) for each in arguments[1:])

        def add_block(kind: int, first: Value, *, partly: bool) -> None:
            number, size = NUMBERS[kind]
            at = [first + start for start in range(0, BLOCK, LANES)]
            left = [columns - column if partly else None for column in at]
            totals = [Sum(builder) for _ in at]
            with turns(count) as turn:
                row, weight = rows + turn * stride, broadcast(load(weights + turn * 4, FLOAT))
                for column, total, rest in zip(at, totals, left, strict=True):
                    found = widen(kind, load(row + column * size, ir.VectorType(number, LANES), rest))
                    total.add(fused_multiply_add, found, weight)
            for column, total, rest in zip(at, totals, left, strict=True):
                store(out + column * 4, total.value, rest)

        whole = columns // BLOCK
        for each in (BF16, F16, F32):
            with builder.if_then(builder.icmp_signed("==", arguments[0], ir.Constant(I64, each))):
                with turns(whole) as turn:
                    add_block(each, turn * BLOCK, partly=False)
                with builder.if_then(whole * BLOCK < columns):
                    add_block(each, whole * BLOCK, partly=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate
