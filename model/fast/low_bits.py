"""Low-bit products by torch's own kernels: they read a quarter or half of the bytes of a bf16 product.

They pay for one or two rows, which is what drafting takes; verification has more and reads the checkpoint's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.decoder import Decoder
from model.fast.parts import FastPart, StackedLinear
from model.quantise import GROUP, Quantised, quantise
from model.twins import Product

ROWS, COLUMNS = 16, 32  # of a weight: what the kernels take is a multiple
TOLERANCE = 0.03  # of the largest result: above rounding in bf16, below what another layout of the codes gives


def can_save(model: Decoder) -> bool:
    """Whether there can be kernels for this model's dtype and device."""
    return model.dtype == torch.bfloat16 and model.device.type == "cuda"


class LowBitLinear(FastPart, Product):
    """x Wᵀ + b by a kernel that reads codes: ``[..., in]`` bf16 -> ``[..., out]`` bf16."""

    def __init__(self, rounded: Quantised, bias: Tensor | None) -> None:
        self.bits, self.bias, codes = rounded.bits, bias, rounded.codes
        self.out = len(codes)
        self.scale = rounded.scale[:, 0].contiguous()
        if self.bits == 8:
            self.weight = codes
            return
        self.scale = torch.stack((rounded.scale.T, rounded.zero.T), -1).contiguous()
        tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
        pairs = (codes[:, ::2] + 8 << 4 | codes[:, 1::2] + 8).to(torch.uint8)
        self.weight = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product, with ``residual`` of the result's shape added."""
        rows = x.reshape(-1, x.shape[-1])
        if self.bits == 8:
            product = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            product = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scale)
        if self.bias is not None:
            product += self.bias
        product = product.view(*x.shape[:-1], self.out)
        return product if residual is None else residual + product


@torch.no_grad()
def written_out(product: StackedLinear | nn.Embedding, bits: int) -> StackedLinear:
    """The product with its weight rounded and written out again: for many rows, for which the kernels are slow."""
    weight, bias = product.weight.detach(), getattr(product, "bias", None)
    product = StackedLinear([quantise(weight, bits).dequantised(weight.dtype)], None if bias is None else [bias])
    product.rounds_inputs = True
    return product


class LowBits:
    """Makes the low-bit twins of a prepared model's products; ``trouble`` says why some are not what was asked for.

    What the kernels do not take is computed with the rounded weights in the model's dtype: a right draft, but no
    faster one.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.trusted: dict[int, bool] = {}  # by bits

    @torch.no_grad()
    def __call__(self, product: StackedLinear | nn.Embedding, bits: int) -> LowBitLinear | StackedLinear:
        rounded = quantise(product.weight.detach(), bits)
        if reason := self._refusal(rounded):
            self.trouble = self.trouble or f"drafts in {bits} bits are no faster here: {reason}"
            return written_out(product, bits)
        return LowBitLinear(rounded, getattr(product, "bias", None))

    def _refusal(self, rounded: Quantised) -> str | None:
        """Why the kernels cannot be used, None if they can."""
        dtype, device = rounded.scale.dtype, rounded.scale.device
        if dtype != torch.bfloat16 or device.type != "cuda":
            return f"there are kernels for bfloat16 only, and this is {str(dtype).removeprefix('torch.')}"
        out, columns = rounded.codes.shape
        if out % ROWS or columns % COLUMNS:
            return f"the kernels do not take a {out}×{columns} product"
        if rounded.bits not in self.trusted:
            self.trusted[rounded.bits] = agrees(rounded)
        return None if self.trusted[rounded.bits] else "the kernels of this machine do not compute what they should"


def agrees(rounded: Quantised) -> bool:
    """Whether this machine's kernel gives what the rounded weights give, in their first rows."""
    parts = (each[: 4 * ROWS].contiguous() for each in (rounded.codes, rounded.scale, rounded.zero))
    rounded = Quantised(*parts, rounded.bits)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, rounded.codes.shape[1], generator=generator).to(rounded.scale)
    expected = x.float() @ rounded.dequantised(torch.float32).T
    try:
        found = LowBitLinear(rounded, None)(x)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((found.float() - expected).abs().max() <= TOLERANCE * expected.abs().max())
