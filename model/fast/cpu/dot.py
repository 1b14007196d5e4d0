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
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BF16, F16, F32, INT4, INT6, INT8 = range(6)
LOW_BITS = {4: INT4, 6: INT6, 8: INT8}

LANES = 16
BLOCK = 64  # columns: two groups, whose low bits are packed together
GROUP = 32  # inputs per scale; weights too, in four and six bits
AHEAD = 2048  # bytes of prefetching: with many rows of inputs a processor does not read weights ahead by itself

I8, I16, I32, I64, FLOAT = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())


def compiled_features() -> frozenset[str]:
    """Instruction sets that Numba compiles for: its environment variables may select fewer than the host has."""
    if numba.config.CPU_FEATURES is not None:
        return frozenset(each[1:] for each in numba.config.CPU_FEATURES.split(",") if each.startswith("+"))
    if numba.config.CPU_NAME is not None:
        return frozenset()  # a processor is named: use no special instructions
    return frozenset(name for name, present in get_host_cpu_features().items() if present)


FEATURES = compiled_features()
PAIRS = "avx512bf16" in FEATURES  # vdpbf16ps
BYTES = "avx512vnni" in FEATURES  # vpdpbusd


class BFloat(ir.Type):
    """Type ``bfloat`` of LLVM, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def vector(kind: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """Type of a vector with this number of lanes."""
    return ir.VectorType(kind, lanes)


def constant(kind: ir.Type, value: float, lanes: int = LANES) -> ir.Constant:
    """Constant vector with the same number in every lane."""
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def scaled(builder: ir.IRBuilder, value: ir.Value, factor: int) -> ir.Value:
    """Product ``value · factor``, for offsets."""
    return builder.mul(value, ir.Constant(I64, factor))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call of an LLVM intrinsic."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


@contextmanager
def turns(builder: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    """Loop of ``count`` turns, which yields its index; not unrolled, since that would take long to compile."""
    before, head = builder.basic_block, builder.append_basic_block("turn")
    body, behind = builder.append_basic_block("body"), builder.append_basic_block("behind")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), body, behind)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, ir.Constant(I64, 1)), builder.basic_block)
    back = builder.branch(head)
    not_unrolled = builder.module.add_metadata(["llvm.loop.unroll.disable"])
    back.set_metadata("llvm.loop", builder.module.add_metadata([not_unrolled]))
    builder.position_at_end(behind)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Pointer of this type to an address."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Value of this type at an address, aligned or not."""
    return builder.load(pointer(builder, address, kind), align=1)


def load_first(builder: ir.IRBuilder, address: ir.Value, kind: ir.VectorType, count: ir.Value) -> ir.Value:
    """First ``count`` lanes of the vector at an address; the others are 0, and their memory is not read."""
    name = f"llvm.masked.load.v{kind.count}{'f32' if kind.element == FLOAT else 'i16'}.p0"
    mask = first_lanes(builder, kind.count, count)
    return call(
        builder, name, kind, pointer(builder, address, kind), ir.Constant(I32, 1), mask, ir.Constant(kind, None)
    )


def store_first(builder: ir.IRBuilder, address: ir.Value, values: ir.Value, count: ir.Value) -> None:
    """Store the first ``count`` of 16 float32 lanes at an address."""
    mask = first_lanes(builder, LANES, count)
    place = pointer(builder, address, values.type)
    call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), values, place, ir.Constant(I32, 1), mask)


def first_lanes(builder: ir.IRBuilder, lanes: int, count: ir.Value) -> ir.Value:
    """Boolean mask of the first ``count`` lanes."""
    numbers = ir.Constant(vector(I64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, broadcast(builder, count, lanes))


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at an address."""
    read, keep, data = (ir.Constant(I32, number) for number in (0, 3, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address, I8), read, keep, data)


def broadcast(builder: ir.IRBuilder, value: ir.Value, lanes: int = LANES) -> ir.Value:
    """Vector with ``value`` in every lane."""
    first = builder.insert_element(ir.Constant(vector(value.type, lanes), ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, constant(I32, 0, lanes))


def fused_multiply_add(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Fused multiply-add, total + a · b, in 16 lanes of float32, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", a.type, a, b, total)


def add_lanes(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """Sum of 16 lanes: one half is added to the other until a single lane remains."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (ir.Constant(vector(I32, lanes), list(range(at, at + lanes))) for at in (0, lanes))
        values = builder.fadd(*(builder.shuffle_vector(values, values, half) for half in (low, high)))
    return builder.extract_element(values, ir.Constant(I32, 0))


def widen(builder: ir.IRBuilder, kind: int, values: ir.Value) -> ir.Value:
    """Exact float32 of 16 weights, by integer operations, since not every processor converts float16."""
    if kind == F32:
        return values
    bits = builder.zext(values, vector(I32))
    if kind == BF16:
        return builder.bitcast(builder.shl(bits, constant(I32, 16)), vector(FLOAT))
    magnitude = builder.shl(builder.and_(bits, constant(I32, 0x7FFF)), constant(I32, 13))
    sign = builder.shl(builder.and_(bits, constant(I32, 0x8000)), constant(I32, 16))
    # The exponents' biases differ by 112; the largest exponent is that of infinity and NaN in both.
    number = builder.fmul(builder.bitcast(magnitude, vector(FLOAT)), constant(FLOAT, 2.0**112))
    is_special = builder.icmp_unsigned(">=", magnitude, constant(I32, 0x0F800000))
    special = builder.or_(magnitude, constant(I32, 0x7F800000))
    found = builder.select(is_special, special, builder.bitcast(number, vector(I32)))
    return builder.bitcast(builder.or_(found, sign), vector(FLOAT))


def add_pairs(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Instruction vdpbf16ps: adds to each of 16 lanes the products of two neighbouring bfloat16 numbers of 32."""
    a, b = (builder.bitcast(each, vector(BFloat(), 2 * LANES)) for each in (a, b))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, a, b)


def add_bytes(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Instruction vpdpbusd: adds to each of 16 int32 lanes the products of four unsigned codes and signed inputs."""
    if BYTES:
        codes, x = (builder.bitcast(each, vector(I8, 4 * LANES)) for each in (codes, x))
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, total, codes, x)
    for byte in range(4):
        code = builder.and_(builder.lshr(codes, constant(I32, 8 * byte)), constant(I32, 255))
        signed = builder.ashr(builder.shl(x, constant(I32, 24 - 8 * byte)), constant(I32, 24))
        total = builder.add(total, builder.mul(code, signed))
    return total


def multiply_floats(
    builder: ir.IRBuilder,
    kind: int,
    w: ir.Value,
    rows: list[ir.Value],
    columns: ir.Value,
    x_kind: int,
    ahead: ir.Value | None = None,
) -> list[ir.Value]:
    """Dot products of ``columns`` weights at ``w`` with the inputs at each of ``rows``, as 16 partial sums each.

    Weights ``ahead`` bytes further on are prefetched.
    """
    pairs = kind == x_kind == BF16 and PAIRS
    lanes = 2 * LANES if pairs else LANES  # numbers per accumulator and turn
    totals = [[cgutils.alloca_once_value(builder, constant(FLOAT, 0.0)) for _ in range(2)] for _ in rows]

    def read(row: ir.Value, row_kind: int, column: ir.Value, partly: bool) -> ir.Value:
        place = builder.add(row, scaled(builder, column, 4 if row_kind == F32 else 2))
        numbers = vector(FLOAT if row_kind == F32 else I16, lanes)
        found = (
            load_first(builder, place, numbers, builder.sub(columns, column))
            if partly
            else load(builder, place, numbers)
        )
        return found if pairs else widen(builder, row_kind, found)

    def add_two(first: ir.Value, *, partly: bool) -> None:
        for number in range(2):
            column = builder.add(first, ir.Constant(I64, number * lanes))
            weights = read(w, kind, column, partly)
            for row, accumulators in zip(rows, totals, strict=True):
                total, inputs = builder.load(accumulators[number]), read(row, x_kind, column, partly)
                total = (add_pairs if pairs else fused_multiply_add)(builder, total, weights, inputs)
                builder.store(total, accumulators[number])

    whole = builder.sdiv(columns, ir.Constant(I64, 2 * lanes))
    with turns(builder, whole) as turn:
        first, row_bytes = scaled(builder, turn, 2 * lanes), 4 if kind == F32 else 2
        for line in range(0, 2 * lanes * row_bytes, 64) if ahead else ():
            place = builder.add(builder.add(w, ahead), scaled(builder, first, row_bytes))
            prefetch(builder, builder.add(place, ir.Constant(I64, line)))
        add_two(first, partly=False)
    rest = scaled(builder, whole, 2 * lanes)
    with builder.if_then(builder.icmp_signed("<", rest, columns)):
        add_two(rest, partly=True)
    return [builder.fadd(*map(builder.load, accumulators)) for accumulators in totals]


def multiply_codes(builder: ir.IRBuilder, kind: int, w: ir.Value, x: ir.Value, columns: ir.Value) -> ir.Value:
    """Dot product of a packed row of low-bit weights with a row of int8 inputs, as 16 partial sums.

    ``columns`` are whole blocks. A row of weights (``model.fast.cpu.pack``) has unsigned codes first. Behind them are,
    in four and six bits, a scale and a zero per group in bfloat16, the zeros padded to whole vectors; in eight bits
    one float32 scale. For a row of inputs see ``model.fast.cpu.elements.round_to_int8``.
    """
    bits = next(bits for bits, each in LOW_BITS.items() if each == kind)
    groups = builder.sdiv(columns, ir.Constant(I64, GROUP))
    scales = builder.add(w, builder.sdiv(scaled(builder, columns, bits), ir.Constant(I64, 8)))
    sums, input_scales = builder.add(x, columns), builder.add(x, scaled(builder, columns, 2))
    total = cgutils.alloca_once_value(builder, constant(FLOAT, 0.0))
    with turns(builder, builder.sdiv(columns, ir.Constant(I64, BLOCK))) as turn:
        at = scaled(builder, turn, BLOCK)
        codes = load_codes(builder, kind, w, turn, columns)
        # Codes of eight bits are stored plus 128: 128 times the sum of the inputs is subtracted.
        begin = load(builder, builder.add(sums, at), vector(I32)) if kind == INT8 else constant(I32, 0)
        products = add_bytes(builder, begin, codes, load(builder, builder.add(x, at), vector(I32)))
        pair = load(builder, builder.add(input_scales, scaled(builder, turn, 8)), vector(FLOAT, 2))
        scale = builder.shuffle_vector(pair, pair, ir.Constant(vector(I32), [0, 1] * (LANES // 2)))
        if kind != INT8:
            both = broadcast(builder, load(builder, builder.add(scales, scaled(builder, turn, 4)), I32))
            even_lanes_up = builder.shl(both, ir.Constant(vector(I32), [16, 0] * (LANES // 2)))
            of_weights = builder.bitcast(builder.and_(even_lanes_up, constant(I32, 0xFFFF0000)), vector(FLOAT))
            scale = builder.fmul(scale, of_weights)
        floats = builder.sitofp(products, vector(FLOAT))
        builder.store(fused_multiply_add(builder, builder.load(total), floats, scale), total)
    if kind == INT8:
        return builder.fmul(builder.load(total), broadcast(builder, load(builder, scales, FLOAT)))
    zeros = builder.add(scales, scaled(builder, groups, 2))
    group_sums = builder.add(input_scales, scaled(builder, groups, 4))
    vectors = builder.sdiv(builder.add(groups, ir.Constant(I64, LANES - 1)), ir.Constant(I64, LANES))
    with turns(builder, vectors) as turn:
        zero = widen(builder, BF16, load(builder, builder.add(zeros, scaled(builder, turn, 2 * LANES)), vector(I16)))
        of_inputs = load(builder, builder.add(group_sums, scaled(builder, turn, 4 * LANES)), vector(FLOAT))
        builder.store(fused_multiply_add(builder, builder.load(total), zero, of_inputs), total)
    return builder.load(total)


def load_codes(builder: ir.IRBuilder, kind: int, w: ir.Value, block: ir.Value, columns: ir.Value) -> ir.Value:
    """Codes of a block, 64 bytes in the order of the inputs: ``[16]`` int32."""
    if kind == INT8:
        return load(builder, builder.add(w, scaled(builder, block, BLOCK)), vector(I32))

    def spread(plane: ir.Value, bits: int, left: list[int]) -> ir.Value:
        """Plane of ``bits`` bits per code, repeated to fill a vector, each repeat rotated by its number in ``left``."""
        lanes = LANES * bits // 8
        part = load(builder, builder.add(plane, scaled(builder, block, BLOCK * bits // 8)), vector(I32, lanes))
        whole = builder.shuffle_vector(part, part, ir.Constant(vector(I32), list(range(lanes)) * (LANES // lanes)))
        by = ir.Constant(vector(I32), [each for each in left for _ in range(lanes)])
        return call(builder, f"llvm.fshl.v{LANES}i32", whole.type, whole, whole, by)

    low = builder.and_(spread(w, 4, [0, 28]), constant(I32, 0x0F0F0F0F))
    if kind == INT4:
        return low
    high_plane = builder.add(w, builder.sdiv(columns, ir.Constant(I64, 2)))
    return builder.or_(low, builder.and_(spread(high_plane, 2, [4, 2, 0, 30]), constant(I32, 0x30303030)))


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
            kind, w, x, stride, count, columns, out, out_stride = arguments

            many = builder.icmp_signed(">", count, ir.Constant(I64, 4))
            ahead = builder.select(many, ir.Constant(I64, AHEAD), ir.Constant(I64, 0))

            def tile(each: int, first: ir.Value, size: int) -> None:
                numbers = [builder.add(first, ir.Constant(I64, number)) for number in range(size)]
                rows = [builder.add(x, builder.mul(stride, number)) for number in numbers]
                if each in LOW_BITS.values():
                    terms = [multiply_codes(builder, each, w, rows[0], columns)]
                else:
                    terms = multiply_floats(
                        builder, each, w, rows, columns, forms[each][0], ahead if size > 2 else None
                    )
                for number, value in zip(numbers, terms, strict=True):
                    place = builder.add(out, builder.mul(out_stride, number))
                    builder.store(add_lanes(builder, value), pointer(builder, place, FLOAT), align=1)

            for each, (_, tiles) in forms.items():
                with builder.if_then(builder.icmp_signed("==", kind, ir.Constant(I64, each))):
                    done = ir.Constant(I64, 0)
                    for size in tiles:
                        whole = builder.sdiv(builder.sub(count, done), ir.Constant(I64, size))
                        with turns(builder, whole) as turn:
                            tile(each, builder.add(done, scaled(builder, turn, size)), size)
                        done = builder.add(done, scaled(builder, whole, size))
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
        for each in (BF16, F16, F32):
            with builder.if_then(builder.icmp_signed("==", arguments[0], ir.Constant(I64, each))):
                add_rows(builder, each, *arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def add_rows(
    builder: ir.IRBuilder,
    kind: int,
    rows: ir.Value,
    stride: ir.Value,
    weights: ir.Value,
    count: ir.Value,
    columns: ir.Value,
    out: ir.Value,
) -> None:
    """``sum_rows`` of one kind."""
    values, number_bytes = vector(FLOAT if kind == F32 else I16), 4 if kind == F32 else 2

    def add_block(first: ir.Value, *, partly: bool) -> None:
        at = [builder.add(first, ir.Constant(I64, LANES * number)) for number in range(BLOCK // LANES)]
        totals = [cgutils.alloca_once(builder, vector(FLOAT)) for _ in at]
        for total in totals:
            builder.store(constant(FLOAT, 0.0), total)
        with turns(builder, count) as turn:
            row = builder.add(rows, builder.mul(turn, stride))
            weight = broadcast(builder, load(builder, builder.add(weights, scaled(builder, turn, 4)), FLOAT))
            for column, total in zip(at, totals, strict=True):
                place = builder.add(row, scaled(builder, column, number_bytes))
                left = builder.sub(columns, column)
                found = load_first(builder, place, values, left) if partly else load(builder, place, values)
                value = fused_multiply_add(builder, builder.load(total), widen(builder, kind, found), weight)
                builder.store(value, total)
        for column, total in zip(at, totals, strict=True):
            place = builder.add(out, scaled(builder, column, 4))
            if partly:
                store_first(builder, place, builder.load(total), builder.sub(columns, column))
            else:
                builder.store(builder.load(total), pointer(builder, place, vector(FLOAT)), align=1)

    whole = builder.sdiv(columns, ir.Constant(I64, BLOCK))
    with turns(builder, whole) as turn:
        add_block(scaled(builder, turn, BLOCK), partly=False)
    rest = scaled(builder, whole, BLOCK)
    with builder.if_then(builder.icmp_signed("<", rest, columns)):
        add_block(rest, partly=True)
