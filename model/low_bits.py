"""Blocks under a layer plan: a model's own, or copies with sublayers in low bits.

A copy shares the norms of its block, and writes to the same cache. It goes stale when the weights
that it rounds change in place: make a new ``PlannedBlocks`` then.
"""

import copy
from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from model.plan import FULL, LOW_BITS, LayerPlan
from model.quantise import quantise, round_inputs

Product = Callable[[Tensor], Tensor]  # ``[..., in]`` -> ``[..., out]``


class PlannedBlocks:
    """Blocks and head of a decoder under any plan.

    A low-bit copy is made when a plan first asks for it, and kept. Its products are references:
    they save neither time nor memory. ``FourBitBlocks`` of ``model.fast`` makes faster ones. Where
    no kernel of those takes a layer's weights, the copy is None and the model's own product serves.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies: dict[tuple[nn.Module, int], Product | None] = {}

    def blocks(self, plan: LayerPlan) -> Iterator[tuple[nn.Module, bool, bool]]:
        """Yield the block of each layer, with sublayers in the bits of the plan, and whether its
        attention and its MLP run.
        """
        for block, attention, mlp in zip(self.model.layers, plan.attention, plan.mlp, strict=True):
            copies = {
                name: self._copy(getattr(block, name), bits, self.new_sublayer)
                for name, bits in (("self_attn", attention), ("mlp", mlp))
                if bits in LOW_BITS
            }
            yield with_parts(block, copies) if copies else block, attention > 0, mlp > 0

    def head(self, bits: int) -> Product | None:
        """Return the head in ``bits`` bits, for normed states ``[..., hidden]``; None for the
        model's own.
        """
        if bits == FULL:
            return None
        return self._copy(self.model.lm_head or self.model.embed_tokens, bits, self.new_product)

    def new_product(self, product: nn.Linear | nn.Embedding, bits: int) -> Product | None:
        """Return a new low-bit product in place of a linear layer, or of an embedding as head: here
        of rounded weights and inputs, in the model's dtype. None where the model's own serves.
        """
        rounded = quantise(product.weight, bits, self.model.importance.get(product))
        weight = rounded.dequantised(self.model.dtype)
        bias = getattr(product, "bias", None)
        return lambda x: F.linear(round_inputs(x), weight, bias)

    def new_sublayer(self, sublayer: nn.Module, bits: int) -> nn.Module:
        """Return a new copy of a sublayer, whose linear layers are low-bit products."""
        products = {
            name: self.new_product(part, bits)
            for name, part in sublayer.named_children()
            if isinstance(part, nn.Linear)
        }
        return with_parts(sublayer, products)

    def _copy(
        self, module: nn.Module, bits: int, make: Callable[..., Product | None]
    ) -> Product | None:
        """Return the copy of a module, which ``make`` makes at the first call."""
        if (module, bits) not in self.copies:
            self.copies[module, bits] = make(module, bits)
        return self.copies[module, bits]


def with_parts(module: nn.Module, parts: dict[str, Product]) -> nn.Module:
    """Return a copy of a module that has these ``parts``, and shares all others.

    The parts are plain attributes, which Python finds before the submodules of these names.
    Submodules, parameters and hooks are shared: a later change of these is a change of both.
    """
    changed = copy.copy(module)
    vars(changed).update(parts)
    return changed
