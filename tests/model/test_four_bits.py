"""Products by weights in four bits, on a GPU, and by Triton's interpreter on a CPU.

The interpreter is asked for by ``TRITON_INTERPRET=1`` before Triton is imported, so it has a
process of its own: ``python -m tests.model.test_four_bits``.
"""

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model.fast import four_bits
from model.quantise import Quantised, quantise

DTYPES = torch.float16, torch.bfloat16, torch.float32
SHAPES = (8, 32), (40, 288), (33, 256), (16, 1024)


@torch.inference_mode()
def check(name: str, dtype: torch.dtype, size: int, columns: int, device: Any) -> None:
    """The product is that of the rounded weights, and a row's is that of the row alone."""
    kernel = import_module(f"model.fast.{name}")  # Triton is optional
    generator = torch.Generator().manual_seed(size)
    weight = quantise(torch.randn(size, columns, generator=generator), 4)
    x = torch.randn(2, 3, columns, generator=generator).to(device, dtype)
    bias = torch.randn(size, generator=generator).to(device, dtype)
    packed = kernel.pack(Quantised(*(each.to(device) for each in weight)))
    found = four_bits.linear(kernel.multiply, packed, bias, x)
    rounded = weight.dequantised(torch.float64).to(device)
    tolerance = 4 * torch.finfo(dtype).eps
    expected = F.linear(x.double(), rounded, bias.double()).to(dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=30 * tolerance)
    alone = four_bits.linear(kernel.multiply, packed, bias, x[1:, 2:])
    assert torch.equal(alone, found[1:, 2:])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is on PyPI for Linux only")
def test_tritons_product_is_that_of_the_rounded_weights_and_of_each_row_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.test_four_bits"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "checked\n" * len(DTYPES) * len(SHAPES), done.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_products_are_those_of_the_rounded_weights_and_of_each_row_alone() -> None:
    for dtype in DTYPES:
        if four_bits.gpu_bits(torch.device("cuda", 0), dtype):
            name = "four_bits" if dtype == torch.bfloat16 else "triton_product"
            check(name, dtype, 64, 1024, "cuda")


if __name__ == "__main__":
    for dtype, shape in product(DTYPES, SHAPES):
        check("triton_product", dtype, *shape, "cpu")
        print("checked")
