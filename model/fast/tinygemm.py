"""Four-bit products on a GPU by torch's tinygemm kernel, which reads a quarter of the bytes of a bf16 product.

It is faster for one row, as in a draft step. In six and eight bits, and for shapes that the kernel does not take, a
draft uses the checkpoint's weights: torch's eight-bit kernel on a GPU is many times slower than the bf16 product.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.quantise import GROUP, Quantised, rounded

ROWS, COLUMNS = 8, 32  # the shape of a weight must be a multiple of these


class Int4Linear(nn.Module):
    """x Wᵀ + b with W in four bits: ``[..., in]`` bf16 -> ``[..., out]`` bf16."""

    def __init__(self, weight: Quantised, bias: Tensor | None) -> None:
        super().__init__()
        codes = weight.codes
        tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles))
        middle = weight.zero + 8 * weight.scale  # the kernel's zero is the value of code 8
        self.register_buffer("scale", torch.stack((weight.scale.T, middle.T), -1).contiguous())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scale)
        return (product if self.bias is None else product + self.bias).view(*x.shape[:-1], -1)


@torch.no_grad()
def low_bits(product: nn.Linear | nn.Embedding, bits: int) -> Callable[[Tensor], Tensor]:
    """Low-bit twin of a product, or the product by the checkpoint's weights where there is no kernel for it."""
    weight = product.weight
    fits = weight.device.type == "cuda" and weight.dtype == torch.bfloat16 and bits == 4
    if fits and weight.shape[0] % ROWS == weight.shape[1] % COLUMNS == 0:
        return Int4Linear(rounded(product, bits), getattr(product, "bias", None))
    return product if isinstance(product, nn.Linear) else partial(F.linear, weight=weight)
