"""Element-wise functions, norms and rounding of a step, as loops that vectorise.

Numbers are float32. Inputs of products and cache entries are rounded to the model's dtype by integer operations on
their bits, ties to even. NaN and infinity stay, so that non-finite numbers are still found. Nothing here is compiled
with fast-math, so the bits are the same on every processor.
"""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types, uint32
from numba.extending import intrinsic

from model.fast.cpu.dot import BF16, BLOCK, F16, F32, FLOAT, GROUP, I8, I32, INT4, LANES, PAIRS

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER = np.float32(1.5 * 2**23)  # float32 numbers of this size have no fraction: adding it rounds
LARGEST_EXPONENT = np.float32(88.0)
BYTES_OF = np.array([2, 2, 4])  # per number, by kind: BF16, F16, F32

# Division by zero gives infinity: Python's check for it would prevent vectorisation.
compiled = partial(njit, error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def bits_of(typing: Any, number: Any):
    """Bits of a float32, as uint32."""
    return uint32(types.float32), lambda context, builder, signature, given: builder.bitcast(given[0], I32)


@intrinsic
def number_of(typing: Any, bits: Any):
    """Float32 with these bits."""
    return types.float32(uint32), lambda context, builder, signature, given: builder.bitcast(given[0], FLOAT)


@intrinsic
def pointer_to(typing: Any, address: Any):
    """Pointer to an address, for ``carray``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, given: list[ir.Value]) -> ir.Value:
        return builder.inttoptr(given[0], I8.as_pointer())

    return types.voidptr(types.int64), generate


@compiled()
def floats_at(place: int, count: int) -> np.ndarray:
    """Array of the ``count`` float32 numbers at an address."""
    return carray(pointer_to(place), count, np.float32)


@compiled()
def halves_at(place: int, count: int) -> np.ndarray:
    """Array of the bits, uint16, of the ``count`` bfloat16 or float16 numbers at an address."""
    return carray(pointer_to(place), count, np.uint16)


@compiled()
def address(array: np.ndarray) -> int:
    """Address of an array's first number."""
    return array.ctypes.data


@compiled()
def bfloat16_bits(number: float) -> int:
    """Bits of ``number`` rounded to bfloat16, as uint32."""
    bits = bits_of(number)
    rounded = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    is_nan = (bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000)
    return (bits >> uint32(16)) | uint32(64) if is_nan else rounded


@compiled()
def float16_bits(number: float) -> int:
    """Bits of ``number`` rounded to float16, as uint32."""
    bits = bits_of(number)
    sign, magnitude = (bits >> uint32(16)) & uint32(0x8000), bits & uint32(0x7FFFFFFF)
    if magnitude < uint32(0x38800000):  # below 2⁻¹⁴ float16 has multiples of 2⁻²⁴, as float32 has from .5 to 1
        return sign | (bits_of(number_of(magnitude) + np.float32(0.5)) - uint32(0x3F000000))
    rounded = (magnitude + uint32(0xFFF) + ((magnitude >> uint32(13)) & uint32(1)) - uint32(0x38000000)) >> uint32(13)
    if magnitude > uint32(0x7F800000):
        return sign | uint32(0x7E00)
    return sign | (rounded if rounded < uint32(0x7C00) else uint32(0x7C00))


@compiled()
def from_float16(bits: int) -> float:
    """Float32 of the bits of a float16."""
    magnitude, sign = (bits & uint32(0x7FFF)) << uint32(13), (bits & uint32(0x8000)) << uint32(16)
    found = bits_of(number_of(magnitude) * np.float32(2.0**112))
    special = magnitude >= uint32(0x0F800000)
    return number_of((magnitude | uint32(0x7F800000) if special else found) | sign)


@compiled()
def exponential(x: float) -> float:
    """Exponential e^x to two units in the last place, with x limited to -87 ... 88: no overflow, no underflow."""
    x = LARGEST_EXPONENT if x > LARGEST_EXPONENT else x
    x = -np.float32(87) if x < -np.float32(87) else x
    shifted = x * LOG2_E + ROUNDER
    power = shifted - ROUNDER
    r = (x - power * LN2_HIGH) - power * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * number_of((bits_of(shifted) << uint32(23)) + uint32(0x3F800000))


@compiled()
def tangent(x: float) -> float:
    """Hyperbolic tangent, with an absolute error of 2⁻²³."""
    return np.float32(1) - np.float32(2) / (exponential(x + x) + np.float32(1))


@compiled()
def round_to(kind: int, number: float) -> float:
    """``number`` rounded to the dtype of this kind of weights, as float32."""
    if kind == BF16:
        return number_of(bfloat16_bits(number) << uint32(16))
    if kind == F16:
        return from_float16(float16_bits(number))
    return number


@compiled()
def store(kind: int, numbers: np.ndarray, place: int) -> None:
    """Store a query, key or value ``[D]`` of one head at an address, in the cache's dtype."""
    floats, halves = floats_at(place, len(numbers)), halves_at(place, len(numbers))
    for index in range(len(numbers)):
        if kind == F32:
            floats[index] = numbers[index]
        elif kind == BF16:
            halves[index] = bfloat16_bits(numbers[index])
        else:
            halves[index] = float16_bits(numbers[index])


@compiled()
def load(kind: int, place: int, scale: float, out: np.ndarray) -> None:
    """Weights of this kind at an address, times ``scale``, into ``out``."""
    floats, halves = floats_at(place, len(out)), halves_at(place, len(out))
    for index in range(len(out)):
        if kind == F32:
            number = floats[index]
        elif kind == BF16:
            number = number_of(uint32(halves[index]) << uint32(16))
        else:
            number = from_float16(uint32(halves[index]))
        out[index] = number * scale


@compiled()
def total(numbers: np.ndarray) -> float:
    """Sum of ``numbers`` in a fixed order: every 16th number first, then the 16 sums."""
    lanes, whole = np.zeros(LANES, np.float32), len(numbers) // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += numbers[first + lane]
    for index in range(whole, len(numbers)):
        lanes[index - whole] += numbers[index]
    found = np.float32(0)
    for lane in range(LANES):
        found += lanes[lane]
    return found


@compiled()
def softmax(scores: np.ndarray) -> float:
    """Sum of the exponentials of ``scores`` less the largest, which replace the scores: the divisor of a softmax."""
    largest = np.float32(-np.inf)
    for index in range(len(scores)):
        largest = scores[index] if scores[index] > largest else largest
    for index in range(len(scores)):
        scores[index] = exponential(scores[index] - largest)
    return total(scores)


@compiled()
def normalise(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """RMSNorm (arXiv 1910.07467) of each row ``[rows, size]``, scaled by ``weight`` ``[size]``."""
    size, squares = x.shape[1], np.empty(x.shape[1], np.float32)
    for row in range(len(x)):
        for column in range(size):
            squares[column] = x[row, column] * x[row, column]
        inverse = np.float32(1) / np.sqrt(total(squares) / np.float32(size) + eps)
        for column in range(size):
            out[row, column] = x[row, column] * inverse * weight[column]


@compiled()
def rotate(head: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotary embedding of a head ``[D]``, in place: ``model.layers.rotate``."""
    half = len(head) // 2
    for index in range(half):
        a, b = head[index], head[index + half]
        head[index] = a * cos[index] - b * sin[index]
        head[index + half] = b * cos[index] + a * sin[index]


@compiled()
def activate(gate_up: np.ndarray, is_gelu: bool, out: np.ndarray) -> None:
    """Product activation(gate) · up of rows ``[rows, 2 · size]``, SiLU or tanh GELU, into ``out`` ``[rows, size]``."""
    size = out.shape[1]
    for row in range(len(out)):
        gate, up, product = gate_up[row, :size], gate_up[row, size:], out[row]
        if is_gelu:
            for index in range(size):
                x = gate[index]
                inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
                product[index] = np.float32(0.5) * x * (np.float32(1) + tangent(inner)) * up[index]
        else:
            for index in range(size):
                product[index] = gate[index] / (np.float32(1) + exponential(-gate[index])) * up[index]


@compiled()
def soft_cap(numbers: np.ndarray, cap: float) -> None:
    """Soft cap of numbers: cap · tanh(x / cap), in place (Gemma 2, arXiv 2408.00118, section 2)."""
    for index in range(len(numbers)):
        numbers[index] = cap * tangent(numbers[index] / cap)


@compiled()
def in_blocks(columns: int) -> int:
    """Number of columns, rounded up to whole blocks."""
    return (columns + BLOCK - 1) // BLOCK * BLOCK


@compiled()
def prepare(kind: int, x: np.ndarray, inputs: np.ndarray) -> None:
    """Convert ``x`` ``[rows, columns]`` to operands of a product of this kind, ``inputs`` ``[rows, bytes]``."""
    columns = x.shape[1]
    for row in range(len(x)):
        if kind >= INT4:  # low bits
            round_to_int8(x[row], address(inputs[row]))
        elif kind == BF16 and PAIRS:
            halves = halves_at(address(inputs[row]), columns)
            for column in range(columns):
                halves[column] = bfloat16_bits(x[row, column])
        else:
            floats = floats_at(address(inputs[row]), columns)
            for column in range(columns):
                floats[column] = round_to(kind, x[row, column])


@compiled()
def round_to_int8(x: np.ndarray, place: int) -> None:
    """Round one row of inputs to int8 with a scale per group: an operand of ``dot.multiply_codes``, at an address.

    First come the codes, the words of four codes of two groups alternating; then -128 times the sum of each word,
    int32; the scales, float32; and the sum of each group times its scale, float32, padded to whole vectors.
    """
    columns = len(x)
    padded = in_blocks(columns)
    groups = padded // GROUP
    words = carray(pointer_to(place), padded // 4, np.int32)
    sums = carray(pointer_to(place + padded), padded // 4, np.int32)
    scales = floats_at(place + 2 * padded, groups)
    totals = floats_at(place + 2 * padded + 4 * groups, (groups + LANES - 1) // LANES * LANES)  # whole vectors
    numbers, codes = np.zeros(padded, np.float32), np.empty(GROUP, np.int8)
    group_words = carray(pointer_to(address(codes)), GROUP // 4, np.int32)
    numbers[:columns] = x
    totals[:] = 0
    for group in range(groups):
        first, largest = group * GROUP, uint32(0)
        for index in range(GROUP):  # as integers, of which NaN and infinity are the largest
            largest = max(largest, bits_of(numbers[first + index]) & uint32(0x7FFFFFFF))
        scale = number_of(largest) / np.float32(127)
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        for index in range(GROUP):
            codes[index] = np.int32(numbers[first + index] * inverse + ROUNDER - ROUNDER)
        total_code = 0
        for word in range(GROUP // 4):
            at, byte = group // 2 * (BLOCK // 4) + 2 * word + group % 2, 4 * word
            word_sum = codes[byte] + codes[byte + 1] + codes[byte + 2] + codes[byte + 3]
            words[at], sums[at] = group_words[word], -128 * word_sum
            total_code += word_sum
        scales[group] = scale
        totals[group] = scale * np.float32(total_code)


@compiled()
def input_bytes(columns: int) -> int:
    """Bytes that are enough for a row of operands of any kind."""
    return 4 * in_blocks(columns) + 4 * LANES
