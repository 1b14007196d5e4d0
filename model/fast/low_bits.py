"""Low-bit products by torch's own kernels: they read a quarter or half of the bytes of a bf16 product.

They pay for one or two rows, which is what drafting takes; verification has more and reads the checkpoint's weights.

For eight bits on a CPU there are two kernels. The one taken rounds its inputs to eight bits as well, each call by their
own range, since processors multiply bytes by bytes (VNNI): it reads a head several times as fast as the other.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from model.decoder import Decoder
from model.fast.parts import FastPart, PackedLinear
from model.quantise import GROUP, Quantised, quantise
from model.twins import Product

ROWS, COLUMNS = 16, 32  # of a weight: what the kernels take is a multiple
TOLERANCE = 0.03  # of the largest result: above rounding in bf16, below what another layout of the codes gives


def can_save(model: Decoder) -> bool:
    """Whether there can be kernels for this model's dtype and device."""
    return model.dtype == torch.bfloat16 and model.device.type in ("cpu", "cuda")


class LowBitLinear(FastPart, Product):
    """x Wᵀ + b by a kernel that reads codes: ``[..., in]`` bf16 -> ``[..., out]`` bf16."""

    def __init__(self, rounded: Quantised, bias: Tensor | None) -> None:
        self.bits, self.bias, codes = rounded.bits, bias, rounded.codes
        self.on_cpu, self.out = codes.device.type == "cpu", len(codes)
        self.scale = rounded.scale[:, 0].contiguous()
        if self.bits == 8:
            self.weight = bytes_by_bytes(codes, self.scale) if self.on_cpu else codes
            return
        self.scale = torch.stack((rounded.scale.T, rounded.zero.T), -1).contiguous()
        if self.on_cpu:
            self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().add_(8), 1)
        else:
            tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
            pairs = (codes[:, ::2] + 8 << 4 | codes[:, 1::2] + 8).to(torch.uint8)
            self.weight = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product, with ``residual`` of the result's shape added."""
        rows = x.reshape(-1, x.shape[-1])
        if self.bits == 8 and self.on_cpu:
            product = torch.ops.quantized.linear_dynamic(rows.float(), self.weight, False).to(x.dtype)
        elif self.bits == 8:
            product = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        elif self.on_cpu:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scale)
        else:
            product = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scale)
        if self.bias is not None:
            product += self.bias
        product = product.view(*x.shape[:-1], self.out)
        return product if residual is None else residual + product


def bytes_by_bytes(codes: Tensor, scale: Tensor) -> Any:
    """The codes as the kernel wants them that rounds its inputs to eight bits too.

    Raises RuntimeError where torch has no such kernel.
    """
    before = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that later versions of torch will pack otherwise
        try:
            torch.backends.quantized.engine = "fbgemm"
            zeros = torch.zeros(len(codes), dtype=torch.int64)
            weight = torch._make_per_channel_quantized_tensor(codes, scale.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(weight, None)
        finally:
            torch.backends.quantized.engine = before


def weight_of(product: PackedLinear | nn.Embedding) -> Tensor:
    """``[out, in]``, as it was loaded."""
    return product.dense() if isinstance(product, PackedLinear) else product.weight.detach()


@torch.no_grad()
def written_out(product: PackedLinear | nn.Embedding, bits: int) -> PackedLinear:
    """The product with its weight rounded and written out again: for many rows, for which the kernels are slow."""
    bias = getattr(product, "bias", None)
    return PackedLinear([quantise(weight_of(product), bits).dequantised()], None if bias is None else [bias])


class LowBits:
    """Makes the low-bit twins of a prepared model's products; ``trouble`` says why some are not what was asked for.

    What the kernels do not take is computed with the rounded weights in the model's dtype: a right draft, but no
    faster one.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.trusted: dict[int, bool] = {}  # by bits

    @torch.no_grad()
    def __call__(self, product: PackedLinear | nn.Embedding, bits: int) -> LowBitLinear | PackedLinear:
        rounded = quantise(weight_of(product), bits)
        if reason := self._refusal(rounded):
            self.trouble = self.trouble or f"drafts in {bits} bits are no faster here: {reason}"
            return written_out(product, bits)
        return LowBitLinear(rounded, getattr(product, "bias", None))

    def _refusal(self, rounded: Quantised) -> str | None:
        """Why the kernels cannot be used, None if they can."""
        dtype, device = rounded.scale.dtype, rounded.scale.device
        if dtype != torch.bfloat16 or device.type not in ("cpu", "cuda"):
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
    expected = x.float() @ rounded.dequantised().float().T
    try:
        found = LowBitLinear(rounded, None)(x)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((found.float() - expected).abs().max() <= TOLERANCE * expected.abs().max())
