"""Twins: low-bit copies of a model's sublayers, which share its norms and its cache."""

import copy
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from model.plan import FULL, LOW_BITS
from model.quantise import round_inputs

Product = Callable[[Tensor], Tensor]  # ``[..., in]`` -> ``[..., out]``
NewProduct = Callable[[nn.Linear | nn.Embedding, int], Product]


class Twins:
    """Blocks of a decoder under any plan. A twin is made when a plan first asks for it, and kept.

    ``new_product`` makes the low-bit product that replaces a linear layer. By default it is
    ``RoundedLinear``, the reference, which saves neither time nor memory.
    """

    def __init__(self, model: nn.Module, new_product: NewProduct | None = None) -> None:
        self.model = model
        self.new_product = new_product or partial(RoundedLinear, model)
        self.made: dict[tuple[nn.Module, int], Product] = {}

    def block(self, layer: int, attention: int, mlp: int) -> nn.Module:
        """Block of a layer, with ``attention`` and ``mlp`` bits per weight; a sublayer of 0 bits
        must not be called.
        """
        block = self.model.layers[layer]
        twins = {}
        if attention in LOW_BITS:
            twins["self_attn"] = self._twin(block.self_attn, attention, self._new_sublayer)
        if mlp in LOW_BITS:
            twins["mlp"] = self._twin(block.mlp, mlp, self._new_sublayer)
        return with_parts(block, twins) if twins else block

    def head(self, bits: int) -> Product | None:
        """Head in ``bits`` bits, for normed states ``[..., hidden]``; None: full precision."""
        if bits == FULL:
            return None
        return self._twin(self.model.lm_head or self.model.embed_tokens, bits, self.new_product)

    def _twin(self, module: nn.Module, bits: int, make: Callable[..., Product]) -> Product:
        """Twin of a module, which ``make`` makes at the first call."""
        if (module, bits) not in self.made:
            self.made[module, bits] = make(module, bits)
        return self.made[module, bits]

    def _new_sublayer(self, sublayer: nn.Module, bits: int) -> nn.Module:
        """Sublayer whose linear layers are low-bit products."""
        products = {
            name: self.new_product(part, bits)
            for name, part in sublayer.named_children()
            if isinstance(part, nn.Linear)
        }
        return with_parts(sublayer, products)


def with_parts(module: nn.Module, parts: dict[str, Product]) -> nn.Module:
    """Copy of a module that has these ``parts``, and shares all others."""
    changed = copy.copy(module)
    changed._modules = module._modules | parts
    return changed


class RoundedLinear(nn.Module):
    """Reference of a low-bit product: rounded weights and inputs in the model's dtype."""

    def __init__(self, model: nn.Module, product: nn.Linear | nn.Embedding, bits: int) -> None:
        super().__init__()
        self.weight = model.rounded(product, bits).dequantised(model.dtype)
        self.bias = product.bias if isinstance(product, nn.Linear) else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(round_inputs(x), self.weight, self.bias)
