"""Twins: low-bit copies of a model's sublayers, which share its norms and its cache."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from model.plan import FULL, LOW_BITS
from model.quantise import round_inputs


class Twins:
    """Blocks of a decoder under any plan. A twin is made when a plan first asks for it, and kept.

    ``new_product`` makes the low-bit product that replaces a linear layer. By default it is
    ``RoundedLinear``, the reference, which saves neither time nor memory.
    """

    def __init__(
        self,
        model: nn.Module,
        new_product: Callable[[nn.Linear | nn.Embedding, int], Any] | None = None,
    ) -> None:
        self.model = model
        self.product = cache(new_product or partial(RoundedLinear, model))
        self.block = cache(self._block)

    def _block(self, layer: int, attention: int, mlp: int) -> nn.Module:
        """Block of a layer, with ``attention`` and ``mlp`` bits per weight; a sublayer of 0 bits
        must not be called.
        """
        block = self.model.layers[layer]
        sublayers = {}
        for name, bits in (("self_attn", attention), ("mlp", mlp)):
            if bits in LOW_BITS:
                sublayer = getattr(block, name)
                products = {
                    each: self.product(part, bits)
                    for each, part in sublayer.named_children()
                    if isinstance(part, nn.Linear)
                }
                sublayers[name] = with_parts(sublayer, products)
        return with_parts(block, sublayers) if sublayers else block

    def head(self, bits: int) -> Callable[[Tensor], Tensor] | None:
        """Head in ``bits`` bits, for normed hidden states ``[..., hidden]``; None for the
        checkpoint's weights.
        """
        if bits == FULL:
            return None
        return self.product(self.model.lm_head or self.model.embed_tokens, bits)


def with_parts(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """Copy of a module that has these ``parts``, and shares all others."""
    twin = copy.copy(module)
    twin._modules = module._modules | parts
    return twin


class RoundedLinear(nn.Module):
    """Reference of a low-bit product: rounded weights and inputs, multiplied in the dtype of the
    model.
    """

    def __init__(self, model: nn.Module, product: nn.Linear | nn.Embedding, bits: int) -> None:
        super().__init__()
        self.weight = model.rounded(product, bits).dequantised(model.dtype)
        self.bias = getattr(product, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(round_inputs(x), self.weight, self.bias)
