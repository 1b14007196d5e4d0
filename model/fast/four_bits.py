"""Drafts in four bits on a GPU: products by torch's kernel or by Triton's, and the blocks that use
them.

Torch's kernel (tinygemm) reads a third of the bytes of a bf16 product. It takes bfloat16 only, so
Triton's (``triton_product``) serves the other dtypes. In eight bits, and for shapes that no kernel
takes, drafts use the checkpoint's weights.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from model.device import multiplies_bf16
from model.low_bits import PlannedBlocks, Product, with_parts
from model.quantise import GROUP, Quantised, quantise

# the last product of a sublayer, and those before it, which have the same inputs
JOINED = {"o_proj": ("q_proj", "k_proj", "v_proj"), "down_proj": ("gate_proj", "up_proj")}


def gpu_bits(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of bits for which there is a kernel on a GPU: torch's for bfloat16 where
    the GPU multiplies it, Triton's for float16 and float32.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return ()
    for_triton = find_spec("triton") and torch.cuda.get_device_capability(device) >= (7, 5)
    has_kernel = multiplies_bf16(device) if dtype == torch.bfloat16 else for_triton
    return (4,) if has_kernel else ()


def pack(weight: Quantised) -> tuple[Tensor, Tensor]:
    """Return the weights as torch's kernel reads them, and their scales and zeros."""
    codes = weight.codes
    tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
    middle = weight.zero + 8 * weight.scale  # the kernel's zero is the value of code 8
    scales = torch.stack((weight.scale.T, middle.T), -1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs, tiles), scales


def multiply(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return the product of ``rows`` ``[rows, in]`` by torch's kernel, ``[rows, out]`` bf16."""
    return torch.ops.aten._weight_int4pack_mm(rows, weight, GROUP, scales)


def linear(
    kernel: Callable[..., Tensor], packed: Sequence[Tensor], bias: Tensor | None, x: Tensor
) -> Tensor:
    """Return x Wᵀ + b with W in four bits, ``packed`` for a kernel: ``[..., in]`` -> ``[..., out]``
    in the dtype of x. It is fast for one row, as in drafts.
    """
    product = kernel(x.reshape(-1, x.shape[-1]), *packed).view(*x.shape[:-1], -1)
    return product if bias is None else product + bias


class FourBitBlocks(PlannedBlocks):
    """Blocks under any plan, with four-bit products by a kernel.

    Products of the same inputs are one: four launches per layer in place of seven.
    """

    def new_product(self, product: nn.Linear | nn.Embedding, bits: int) -> Product | None:
        return self.joined([product], bits)

    def new_sublayer(self, sublayer: nn.Module, bits: int) -> nn.Module:
        last = next(name for name in JOINED if hasattr(sublayer, name))
        own = getattr(sublayer, last)
        before = [getattr(sublayer, name) for name in JOINED[last]]
        joined = self.joined(before, bits)
        if joined is None:
            return sublayer
        sizes = [product.out_features for product in before]
        parts = {
            # of model.layers.Attention or GatedMLP
            "project": lambda x: joined(x).split(sizes, -1),
            last: self.joined([own], bits) or own,
        }
        return with_parts(sublayer, parts)

    @torch.no_grad()
    def joined(self, products: list[nn.Module], bits: int) -> Product | None:
        """Return one product by the weights of several, one after another, in few bits; None where
        no kernel takes them.
        """
        model = self.model
        fits = all(
            each.weight.shape[0] % 8 == 0 and each.weight.shape[1] % GROUP == 0 for each in products
        )
        if bits not in gpu_bits(model.device, model.dtype) or not fits:
            return None
        rounded = [quantise(each.weight, bits, model.importance.get(each)) for each in products]
        weight = Quantised(*map(torch.cat, zip(*rounded, strict=True)))
        biases = [getattr(product, "bias", None) for product in products]
        bias = None if biases[0] is None else torch.cat(biases)
        if model.dtype == torch.bfloat16:
            return partial(linear, multiply, pack(weight), bias)
        from model.fast import triton_product  # where Triton is installed

        return partial(linear, triton_product.multiply, triton_product.pack(weight), bias)
