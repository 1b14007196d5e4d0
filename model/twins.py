"""Twins: low-bit copies of a model's sublayers, which share its norms and its cache."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from model.plan import FULL, LOW_BITS
from model.quantise import round_inputs

NewProduct = Callable[[nn.Linear | nn.Embedding, int], Any]


class Twins:
    """Blocks of a decoder under any plan. A twin is made when a plan first asks for it, and kept.

    ``new_product`` makes the low-bit product that replaces a linear layer. By default it is
    ``RoundedLinear``, the reference, which saves neither time nor memory.
    """

    def __init__(
        self,
        model: nn.Module,
        new_product: NewProduct | None = None,
    ) -> None:
        self.model = model
        self.new_product = new_product or partial(RoundedLinear, model)
        self.kept: dict[tuple[nn.Module, int], Any] = {}

    def block(self, layer: int, attention: int, mlp: int) -> nn.Module:
        """Block of a layer, with ``attention`` and ``mlp`` bits per weight; a sublayer of 0 bits
        must not be called.
        """
        block = self.model.layers[layer]
        sublayers = {
            name: self.twin(getattr(block, name), bits)
            for name, bits in (("self_attn", attention), ("mlp", mlp))
            if bits in LOW_BITS
        }
        return with_parts(block, sublayers) if sublayers else block

    def head(self, bits: int) -> Callable[[Tensor], Tensor] | None:
        """Head in ``bits`` bits, for normed hidden states ``[..., hidden]``; None for the
        checkpoint's weights.
        """
        if bits == FULL:
            return None
        return self.twin(self.model.lm_head or self.model.embed_tokens, bits)

    def twin(self, module: nn.Module, bits: int) -> Any:
        """Twin of a sublayer, of a linear layer, or of an embedding that is the head."""
        if (module, bits) not in self.kept:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                twin = self.new_product(module, bits)
            else:
                parts = {
                    name: self.twin(part, bits)
                    for name, part in module.named_children()
                    if isinstance(part, nn.Linear)
                }
                twin = with_parts(module, parts)
            self.kept[module, bits] = twin
        return self.kept[module, bits]


def with_parts(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """Copy of a module that has these ``parts``, and shares all others."""
    changed = copy.copy(module)
    changed._modules = module._modules | parts
    return changed


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
