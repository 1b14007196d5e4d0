"""Drafts in four bits on a GPU: products by torch's kernel or by Triton's, and the blocks that use
them.

Torch's kernel (tinygemm) reads a third of the bytes of a bf16 product. It takes bfloat16 only, so
Triton's (``triton_product``) serves the other dtypes. In eight bits, and for shapes that no kernel
takes, drafts use the checkpoint's weights.
"""

from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoder import Decoder
from model.device import multiplies_bf16
from model.low_bits import PlannedBlocks, Product, with_parts
from model.quantise import GROUP, Quantised

JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # products of the same inputs


def gpu_bits(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of bits for which there is a kernel on a GPU: torch's for bfloat16 where
    the GPU multiplies it, Triton's for float16 and float32.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return ()
    if dtype == torch.bfloat16:
        return (4,) if multiplies_bf16(device) else ()
    has_triton = find_spec("triton") is not None
    return (4,) if has_triton and torch.cuda.get_device_capability(device) >= (7, 5) else ()


class Int4Linear(nn.Module):
    """x Wᵀ + b with W in four bits: ``[..., in]`` bf16 -> ``[..., out]`` bf16. It is fast for one
    row, as in drafts.
    """

    def __init__(self, weight: Quantised, bias: Tensor | None) -> None:
        super().__init__()
        codes = weight.codes
        tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack(pairs, tiles))
        middle = weight.zero + 8 * weight.scale  # the kernel's zero is the value of code 8
        self.register_buffer("scale", torch.stack((weight.scale.T, middle.T), -1).contiguous())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scale)
        return (product if self.bias is None else product + self.bias).view(*x.shape[:-1], -1)


class FourBitBlocks(PlannedBlocks):
    """Blocks under any plan, with four-bit products by a kernel.

    Products of the same inputs are one: four launches per layer in place of seven.
    """

    def new_product(self, product: nn.Linear | nn.Embedding, bits: int) -> Product:
        is_head = isinstance(product, nn.Embedding)
        plain = partial(F.linear, weight=product.weight) if is_head else product
        return self._kernel([product], bits) or plain

    def new_sublayer(self, sublayer: nn.Module, bits: int) -> nn.Module:
        names = next(names for names in JOINED if hasattr(sublayer, names[0]))
        parts = [getattr(sublayer, name) for name in names]
        joined = self._kernel(parts, bits)
        if joined is None:
            return sublayer
        # the joined product stands for these parts
        copy = super().new_sublayer(with_parts(sublayer, dict.fromkeys(names)), bits)
        sizes = [part.out_features for part in parts]
        copy.project = lambda x: joined(x).split(sizes, -1)
        return copy

    @torch.no_grad()
    def _kernel(self, products: list[nn.Module], bits: int) -> nn.Module | None:
        """Return the product by the weights of several, one after another, in few bits; None where
        no kernel takes them.
        """
        model: Decoder = self.model
        shapes = [product.weight.shape for product in products]
        fits = all(rows % 8 == 0 and columns % GROUP == 0 for rows, columns in shapes)
        if bits not in gpu_bits(model.device, model.dtype) or not fits:
            return None
        rounded = [model.rounded(product, bits) for product in products]
        weight = Quantised(*map(torch.cat, zip(*rounded, strict=True)))
        biases = [getattr(product, "bias", None) for product in products]
        bias = None if biases[0] is None else torch.cat(biases)
        if model.dtype == torch.bfloat16:
            return Int4Linear(weight, bias)
        from model.fast.triton_product import TritonLinear  # where Triton is installed

        return TritonLinear(weight, bias)
