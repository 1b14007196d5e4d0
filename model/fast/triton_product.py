"""Product by weights in four bits on a GPU, in Triton, for inputs that torch's kernel refuses.

Torch's takes bfloat16 on compute capability 8.0 and later. This one takes any dtype, such as
float16 on a T4. It reads as few bytes: a byte per two weights, and scale and zero per group.
"""

import triton
import triton.language as tl
from torch import Tensor

from model.quantise import GROUP, Quantised

HALF = GROUP // 2
ROWS = 16  # of the matrix, per program


@triton.jit
def kernel(
    x,
    pairs,
    scale,
    zero,
    out,
    out_size,
    groups,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Store ``ROWS`` numbers of the product with one input row of ``groups`` groups.

    ``GROUPS`` of them are read at a time. A group's sum of (code · scale + zero) · x is the sum of
    code · x, times scale, plus the sum of x, times zero. Sums are in float32, and in the same order
    for every row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    half = tl.arange(0, HALF)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, groups, GROUPS):
        group = begin + tl.arange(0, GROUPS)
        in_row = (group < groups)[:, None]
        place = 2 * HALF * (token * groups + group[:, None]) + half
        first = tl.load(x + place, in_row, 0.0).to(tl.float32)
        second = tl.load(x + place + HALF, in_row, 0.0).to(tl.float32)
        at = row[:, None] * groups + group
        exists = (row[:, None] < out_size) & (group < groups)
        both = tl.load(pairs + at[:, :, None] * HALF + half, exists[:, :, None], 0)
        products = (both & 15).to(tl.float32) * first + (both >> 4).to(tl.float32) * second
        scales = tl.load(scale + at, exists, 0.0).to(tl.float32)
        zeros = tl.load(zero + at, exists, 0.0).to(tl.float32)
        sums = tl.sum(first + second, 1)
        total += tl.sum(tl.sum(products, 2) * scales + sums * zeros, 1)
    tl.store(out + token * out_size + row, total, row < out_size)


def pack(weight: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights as the kernel reads them, two a byte, with scales and zeros."""
    codes = weight.codes.unflatten(1, (-1, 2, HALF))
    # a byte holds the codes of places i and i + 16 of a group, so that inputs lie in a row
    pairs = (codes[:, :, 0] | codes[:, :, 1] << 4).contiguous()
    # float16, since GPUs before capability 8.0 only emulate bf16
    return pairs, weight.scale.half().contiguous(), weight.zero.half().contiguous()


def multiply(rows: Tensor, pairs: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the product of ``rows`` ``[rows, in]``, ``[rows, out]`` in their dtype."""
    size, groups = scale.shape
    product = rows.new_empty(len(rows), size)
    kernel[triton.cdiv(size, ROWS), len(rows)](
        rows.contiguous(), pairs, scale, zero, product, size, groups, HALF=HALF, ROWS=ROWS, GROUPS=8
    )
    return product
