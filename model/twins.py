"""Twins: low-bit copies of a model's sublayers, which share its norms and its cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.plan import FULL
from model.quantise import round_inputs

if TYPE_CHECKING:
    from model.decoder import Decoder


class Twins:
    """Blocks of a model under any plan. A twin is made when a plan first asks for it, and kept.

    ``new_product`` makes the low-bit product that replaces a linear layer. By default it is
    ``RoundedLinear``, the reference, which saves neither time nor memory.
    """

    def __init__(
        self, model: Decoder, new_product: Callable[[Any, int], Any] | None = None
    ) -> None:
        self.model = model
        self.new_product = new_product or partial(RoundedLinear, model)
        self.blocks: dict[tuple[int, ...], Any] = {}
        self.products: dict[tuple[nn.Module, int], Any] = {}

    def block(self, layer: int, attention: int, mlp: int) -> Any:
        """Block of a layer, with ``attention`` and ``mlp`` bits per weight; a sublayer of 0 bits
        must not be called.
        """
        if {attention, mlp} <= {0, FULL}:
            return self.model.layers[layer]
        key = layer, attention, mlp
        if key not in self.blocks:
            block = self.blocks[key] = copy.copy(self.model.layers[layer])
            block._modules = dict(block._modules)
            for name, bits in (("self_attn", attention), ("mlp", mlp)):
                if bits not in (0, FULL):
                    block._modules[name] = sublayer = copy.copy(getattr(block, name))
                    sublayer._modules = {
                        each: self.product(part, bits) if isinstance(part, nn.Linear) else part
                        for each, part in sublayer.named_children()
                    }
        return self.blocks[key]

    def head(self, bits: int) -> Callable[[Tensor], Tensor] | None:
        """Head in ``bits`` bits, for normed hidden states ``[..., hidden]``; None for the
        checkpoint's weights.
        """
        return (
            None
            if bits == FULL
            else self.product(self.model.lm_head or self.model.embed_tokens, bits)
        )

    def product(self, product: nn.Linear | nn.Embedding, bits: int) -> Any:
        """Low-bit twin of a linear layer, or of an embedding that is the head."""
        key = product, bits
        if key not in self.products:
            self.products[key] = self.new_product(product, bits)
        return self.products[key]


class RoundedLinear(nn.Linear):
    """Reference of a low-bit product: rounded weights and inputs, multiplied in the dtype of the
    model.
    """

    @torch.no_grad()
    def __init__(self, model: Decoder, product: nn.Linear | nn.Embedding, bits: int) -> None:
        nn.Module.__init__(self)
        weight = model.rounded(product, bits).dequantised(model.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = product.bias if isinstance(product, nn.Linear) else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(round_inputs(x), self.weight, self.bias)
