"""Checks of the Triton product in Triton's interpreter: ``python -m tests.model.interpreted``.

The interpreter is asked for by ``TRITON_INTERPRET=1`` before Triton is imported, so it has a
process of its own.
"""

from itertools import product

import torch
from torch import nn

from model.fast.triton_product import TritonLinear
from model.quantise import quantise

DTYPES = torch.float16, torch.bfloat16, torch.float32
SHAPES = (8, 32), (40, 288), (33, 256), (16, 1024)


@torch.inference_mode()
def check(dtype: torch.dtype, size: int, columns: int) -> None:
    """The product is that of the rounded weights, and of each row alone."""
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, columns, generator=generator)
    rounded = quantise(weight, 4)
    x = torch.randn(2, 3, columns, generator=generator).to(dtype)
    bias = torch.randn(size, generator=generator).to(dtype)
    linear = TritonLinear(rounded, bias)
    found = linear(x)
    assert found.dtype == dtype and found.shape == (2, 3, size)
    expected = nn.functional.linear(x.double(), rounded.dequantised(torch.float64), bias.double())
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=30 * tolerance)
    assert torch.equal(linear(x[1:, 2:]), found[1:, 2:])


if __name__ == "__main__":
    for dtype, shape in product(DTYPES, SHAPES):
        check(dtype, *shape)
        print(dtype, *shape)
