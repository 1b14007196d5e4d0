"""The Triton product by weights in four bits, in Triton's interpreter on a CPU."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from model.quantise import quantise

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from model.fast.four_bits import TritonLinear


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "columns"), [(8, 32), (40, 288), (33, 256), (16, 1024)])
@torch.inference_mode()
def test_the_product_is_that_of_the_rounded_weights_and_of_each_row_alone(
    dtype: torch.dtype, size: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, columns, generator=generator)
    rounded = quantise(weight, 4)
    x = torch.randn(2, 3, columns, generator=generator).to(dtype)
    bias = torch.randn(size, generator=generator).to(dtype)
    product = TritonLinear(rounded, bias)
    found = product(x)
    assert found.dtype == dtype and found.shape == (2, 3, size)
    expected = nn.functional.linear(x.double(), rounded.dequantised(torch.float64), bias.double())
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=30 * tolerance)
    assert torch.equal(product(x[1:, 2:]), found[1:, 2:])
