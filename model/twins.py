"""The low-bit twins of a model's sublayers: they share norms and places in the cache with what they are twins of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.plan import FULL, LayerPlan
from model.quantise import Quantised, round_inputs

if TYPE_CHECKING:
    from model.decoder import Decoder

SUBLAYERS = ("self_attn", "mlp")  # what every block calls its two


class Twins:
    """The blocks of a model under any plan. A twin is made when a plan first asks for it, and kept.

    ``exchange`` makes the low-bit product that stands in for a linear layer; by default one that computes with the
    rounded weights in the model's dtype: the reference, which saves neither time nor memory. ``trouble`` is a line
    that says where a twin is not what it should be; None if all is well.
    """

    def __init__(self, model: Decoder, exchange: Callable[[Any, int], Any] | None = None) -> None:
        self.model, self.exchange = model, exchange or self.round
        self.blocks: dict[tuple[int, ...], Any] = {}
        self.sublayers: dict[tuple[int, str, int], Any] = {}
        self.heads: dict[int, Any] = {}

    @property
    def trouble(self) -> str | None:
        return getattr(self.exchange, "trouble", None)

    def round(self, product: nn.Linear | nn.Embedding, bits: int) -> RoundedLinear:
        """The reference of a low-bit product."""
        return RoundedLinear(product, self.model.rounded(product, bits))

    def prepare(self, plan: LayerPlan) -> None:
        """Make what the plan asks for now, layer by layer."""
        for layer, bits in enumerate(zip(plan.attention, plan.mlp, strict=True)):
            self.block(layer, *bits)
        self.head(plan.head)

    def clear(self) -> None:
        """Forget all copies."""
        for kept in (self.blocks, self.sublayers, self.heads):
            kept.clear()

    def block(self, layer: int, attention: int, mlp: int) -> Any:
        """The block of this layer, its sublayers in so many bits (one of 0 bits is not to be called)."""
        block = self.model.layers[layer]
        if {attention, mlp} <= {0, FULL}:
            return block
        key = (layer, attention, mlp)
        if key not in self.blocks:
            twin = shallow(block)
            for name, bits in zip(SUBLAYERS, (attention, mlp), strict=True):
                if bits not in (0, FULL):
                    setattr(twin, name, self._sublayer(layer, name, bits))
            self.blocks[key] = twin
        return self.blocks[key]

    def head(self, bits: int) -> Callable[[Tensor], Tensor] | None:
        """The head in so many bits, for normed hidden states ``[..., hidden]``; None: the model's own."""
        if bits == FULL:
            return None
        if bits not in self.heads:
            head = self.model.lm_head
            self.heads[bits] = self.exchange(self.model.embed_tokens if head is None else head, bits)
        return self.heads[bits]

    def _sublayer(self, layer: int, name: str, bits: int) -> Any:
        key = (layer, name, bits)
        if key not in self.sublayers:
            twin = shallow(getattr(self.model.layers[layer], name))
            for product_name, product in list(twin.named_children()):
                if isinstance(product, nn.Linear):
                    setattr(twin, product_name, self.exchange(product, bits))
            self.sublayers[key] = twin
        return self.sublayers[key]


def shallow(part: nn.Module) -> nn.Module:
    """A copy that shares everything with ``part``, but whose parts can be exchanged for others."""
    twin = copy.copy(part)
    twin._modules = dict(part._modules)
    return twin


class RoundedLinear(nn.Linear):
    """The reference of a low-bit product: weights and inputs rounded, computed in their own dtype."""

    @torch.no_grad()
    def __init__(self, product: nn.Linear | nn.Embedding, rounded: Quantised) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(rounded.dequantised(product.weight.dtype), requires_grad=False)
        self.bias = getattr(product, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(round_inputs(x), self.weight, self.bias)
