"""Element-wise functions, norms and rounding to int8 of a step, as loops that vectorise.

Numbers are float32. Nothing here is compiled with fast-math, so the bits are the same on every
processor.
"""

import numpy as np
from numba import uint32

from model.fast.cpu.dot import GROUP, add_numbers
from model.fast.cpu.kernels import address, array_at, compiled

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # the sum of both is log 2, the first without rounding
LN2_LOW = np.float32(-2.12194440e-4)
ROUNDER = np.float32(1.5 * 2**23)  # float32 numbers of this size have no fraction: adding it rounds
# negative infinity in an order of integers: negative numbers have all bits but the sign flipped
LOWEST = np.int32(-0x7F800001)
LARGEST_EXPONENT = np.float32(88.0)


@compiled()
def exponential(x: float) -> float:
    """Exponential e^x to two units in the last place, with x limited to -87 ... 88."""
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
    return p * np.uint32(
        (np.float32(shifted).view(np.uint32) << uint32(23)) + uint32(0x3F800000)
    ).view(np.float32)


@compiled()
def hyperbolic_tangent(x: float) -> float:
    """Hyperbolic tangent, with an absolute error of 2⁻²²."""
    return np.float32(1) - np.float32(2) / (exponential(x + x) + np.float32(1))


@compiled()
def exponentials(scores: np.ndarray) -> float:
    """Exponentials of ``scores`` less the largest, in place: a softmax but for its divisor, which
    is their total. Returns the largest, the smallest number if there are no scores.
    """
    bits = scores.view(np.int32)
    largest_bits = LOWEST
    for index in range(len(scores)):  # as integers of the same order: float maxima do not vectorise
        ordered = bits[index] ^ ((bits[index] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        largest_bits = max(largest_bits, ordered)
    largest_bits ^= (largest_bits >> np.int32(31)) & np.int32(0x7FFFFFFF)
    largest = np.int32(largest_bits).view(np.float32)
    for index in range(len(scores)):
        scores[index] = exponential(scores[index] - largest)
    return largest


@compiled()
def normalise(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm (arXiv 1910.07467) of each row ``[rows, size]``, scaled by ``weight`` ``[size]``."""
    size = x.shape[1]
    out = np.empty_like(x)
    for row in range(len(x)):
        squares = add_numbers(2, address(x[row]), size)
        inverse = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        for column in range(size):
            out[row, column] = x[row, column] * inverse * weight[column]
    return out


@compiled()
def rotate(head: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotary embedding of a head ``[D]``, in place: ``model.layers.rotate``."""
    half = len(head) // 2
    for index in range(half):
        a = head[index]
        b = head[index + half]
        head[index] = a * cos[index] - b * sin[index]
        head[index + half] = b * cos[index] + a * sin[index]


@compiled()
def activate(gate_up: np.ndarray, is_gelu: bool) -> np.ndarray:
    """activation(gate) · up, SiLU or tanh GELU: ``[rows, 2 · size]`` -> ``[rows, size]``."""
    size = gate_up.shape[1] // 2
    out = np.empty((len(gate_up), size), np.float32)
    for row in range(len(out)):
        gate = gate_up[row, :size]
        up = gate_up[row, size:]
        product = out[row]
        for index in range(size):
            x = gate[index]
            inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
            product[index] = up[index] * (
                np.float32(0.5) * x * (np.float32(1) + hyperbolic_tangent(inner))
                if is_gelu
                else x / (np.float32(1) + exponential(-x))
            )
    return out


@compiled()
def soft_cap(numbers: np.ndarray, cap: float) -> None:
    """Soft cap of numbers: cap · tanh(x / cap), in place (Gemma 2, arXiv 2408.00118, section 2)."""
    for index in range(len(numbers)):
        numbers[index] = cap * hyperbolic_tangent(numbers[index] / cap)


@compiled()
def round_to_int8(x: np.ndarray, place: int) -> None:
    """Round one row of inputs to int8, with three numbers per group, at an address, in the layout
    drawn in ``dot``.
    """
    columns = len(x)
    groups = (columns + GROUP - 1) // GROUP
    padded = groups * GROUP
    codes = array_at(place, padded, np.int8)
    scales = array_at(place + padded, groups, np.float32)
    totals = array_at(place + padded + 4 * groups, groups, np.float32)
    corrections = array_at(place + padded + 8 * groups, groups, np.int32)
    numbers = np.zeros(padded, np.float32)
    bits = numbers.view(np.uint32)
    numbers[:columns] = x
    for group in range(groups):
        first = group * GROUP
        largest = uint32(0)
        for index in range(GROUP):  # as integers, of which NaN and infinity are the largest
            largest = max(largest, bits[first + index] & uint32(0x7FFFFFFF))
        scale = np.uint32(largest).view(np.float32) / np.float32(127)
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        total_code = np.int32(0)
        for index in range(first, first + GROUP):
            code = np.int32(numbers[index] * inverse + ROUNDER - ROUNDER)
            codes[index] = code
            total_code += code
        scales[group] = scale
        totals[group] = scale * np.float32(total_code)
        corrections[group] = -128 * total_code
