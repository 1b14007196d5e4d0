"""Quantisation of weights to four or eight bits.

A draft need not be right, only likely to be right, and most of a step's time goes into reading the
weights. So the draft reads the same weights, rounded: a matrix in four bits takes less than a third
of its size in bf16.

In four bits rounding is affine. A group of 32 neighbouring weights of a row shares a ``scale`` and
a ``zero``: weight ≈ code · scale + zero, with codes of 0 to 15. Groups are small, so that a single
large weight does not coarsen a whole row. In eight bits a row is one group, zero is 0, and codes
are -127 to 127.

Errors are weighted with the mean square of the input that the weight is multiplied by (the
importance matrix of llama.cpp). Scale and zero of a group are those with the least weighted error
of a few candidates: ranges with more or less cut off at both ends, each then fitted to its codes by
least squares.

A draft runs with *twins*: low-bit copies of a model's sublayers, which share its norms and its
cache.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.plan import FULL, LOW_BITS, LayerPlan

GROUP = 32  # weights that share scale and zero, in four bits
LEVELS = 15  # the largest code, in four bits
CUTS = (0.0, 1.0)  # steps cut off at each end of a group's range, per candidate
FITS = 2  # least-squares fits per candidate
CHUNK = 1 << 22  # weights rounded at a time, in float32

Product = Callable[[Tensor], Tensor]  # ``[..., in]`` -> ``[..., out]``
NewProduct = Callable[[nn.Linear | nn.Embedding, int], Product]


@dataclass(frozen=True)
class Quantised:
    """Rounded weights: ``codes`` ``[out, in]``, ``scale`` and ``zero`` ``[out, groups]``.

    Codes are uint8, scale and zero bfloat16; in eight bits codes are int8, scale and zero float32.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of these codes, ``[out, in]``."""
        scale = self.scale.float()
        zero = self.zero.float()
        if scale.shape[1] > 1:
            scale, zero = (
                each.repeat_interleave(GROUP, 1)[:, : self.codes.shape[1]] for each in (scale, zero)
            )
        return torch.addcmul(zero, self.codes, scale).to(dtype)


def weighted_sum(values: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum over the last dimension, from the first to the last number.

    The order is part of the definition: compiled rounding (``model.fast``) finds the same bits.
    """
    return reduce(torch.add, (values * shares).unbind(-1))


def codes_of(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return codes 0 to 15 of weights ``[..., 32]``, as floats; scale and zero are ``[...]``."""
    inverse = torch.where(scale > 0, 1 / scale, 0)  # if all weights are equal, every code is 0
    return ((weight - zero[..., None]) * inverse[..., None] + 0.5).floor_().clamp_(0, LEVELS)


def round_groups(weight: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes ``[rows, groups, 32]`` of weights of this shape, and scale and zero
    ``[rows, groups]``, of the least weighted error; ``shares`` ``[groups, 32]`` sum to 1 per group.
    """
    mean = weighted_sum(weight, shares)
    low, high = torch.aminmax(weight, dim=-1)
    found = []
    for cut in CUTS:
        scale = (high - low) * ((1 - 2 * cut / LEVELS) / LEVELS)
        zero = (low + high - LEVELS * scale) / 2
        for _ in range(FITS + 1):
            # Rounded first, so that the codes compensate for it.
            scale = scale.bfloat16().float()
            zero = zero.bfloat16().float()
            codes = codes_of(weight, scale, zero)
            error = (codes * scale[..., None] + zero[..., None] - weight).square_()
            found.append(torch.stack((weighted_sum(error, shares), scale, zero)))
            # A line through the points (code, weight): scale is its slope, zero its height at code
            # 0.
            mean_code = weighted_sum(codes, shares)
            spread = weighted_sum(codes.square(), shares) - mean_code.square()
            slope = (weighted_sum(codes * weight, shares) - mean_code * mean) / spread
            scale = torch.where(spread > 0, slope, scale)
            zero = mean - scale * mean_code
    errors, scales, zeros = torch.stack(found, 1)
    best = errors.argmin(0, keepdim=True)
    scale = scales.gather(0, best)[0]
    zero = zeros.gather(0, best)[0]
    return codes_of(weight, scale, zero).to(torch.uint8), scale, zero


def shares_of(importance: Tensor | None, columns: int, device: torch.device) -> Tensor:
    """Return the share of each column in the error of its group of 32, ``[groups, 32]`` float32, by
    the ``importance`` ``[columns]``: all alike without it. Columns beyond the last have none.
    """
    if importance is None:
        importance = torch.ones(columns)
    importance = importance.to(device).float()
    # With zero importance scale and zero would be undefined. A common factor changes nothing.
    importance = importance / importance.mean().clamp(min=1e-30) + 1e-4
    importance = F.pad(importance, (0, -columns % GROUP)).view(-1, GROUP)
    return importance / importance.sum(1, keepdim=True)


@torch.no_grad()
def quantise(weight: Tensor, bits: int, importance: Tensor | None = None) -> Quantised:
    """Return the rounded ``[out, in]`` weights, in codes of 4 or 8 bits.

    ``importance`` ``[in]`` is the mean square of each input, 1 by default. The weighted squared
    error of a group is at most that of half an even step per weight, from its least to its largest
    weight, plus the rounding of scale and zero to bfloat16. A last group of fewer than 32 columns
    has its own scale.
    """
    columns = weight.shape[1]
    if bits == 8:
        scale = torch.linalg.vector_norm(weight.float(), math.inf, 1, keepdim=True) / 127
        codes = torch.where(scale > 0, weight / scale, 0).round().clamp(-127, 127)
        return Quantised(codes.to(torch.int8), scale, torch.zeros_like(scale))
    shares = shares_of(importance, columns, weight.device)
    found = []
    for part in weight.split(max(1, CHUNK // columns)):
        part = F.pad(part.float(), (0, -columns % GROUP), mode="replicate")
        found.append(round_groups(part.unflatten(1, (-1, GROUP)), shares))
    codes, scale, zero = map(torch.cat, zip(*found, strict=True))
    codes = codes.flatten(1)[:, :columns].contiguous()
    return Quantised(codes, scale.bfloat16(), zero.bfloat16())


def round_inputs(x: Tensor) -> Tensor:
    """Return inputs ``[..., in]`` of a low-bit product in int8, with one scale per 32 of them.

    Processors multiply bytes by bytes. One scale per row would halve the acceptance rate.
    """
    columns = x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0).round_()
    return (codes * scale).flatten(-2)[..., :columns].to(x.dtype)


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
        """Return a block of a layer, with ``attention`` and ``mlp`` bits per weight; a sublayer of
        0 bits must not be called.
        """
        block = self.model.layers[layer]
        twins = {
            name: self._twin(getattr(block, name), bits, self._new_sublayer)
            for name, bits in (("self_attn", attention), ("mlp", mlp))
            if bits in LOW_BITS
        }
        return with_parts(block, twins) if twins else block

    def blocks(self, plan: LayerPlan) -> Iterator[Callable[..., Tensor]]:
        """Yield the block of each layer under a plan, to be called as ``block(x, positions,
        cache)``.
        """
        for layer, (attention, mlp) in enumerate(zip(plan.attention, plan.mlp, strict=True)):
            block = self.block(layer, attention, mlp)
            yield partial(block, attention=attention > 0, mlp=mlp > 0)

    def head(self, bits: int) -> Product | None:
        """Return the head in ``bits`` bits, for normed states ``[..., hidden]``; None: full
        precision.
        """
        if bits == FULL:
            return None
        return self._twin(self.model.lm_head or self.model.embed_tokens, bits, self.new_product)

    def _twin(self, module: nn.Module, bits: int, make: Callable[..., Product]) -> Product:
        """Return a twin of a module, which ``make`` makes at the first call."""
        if (module, bits) not in self.made:
            self.made[module, bits] = make(module, bits)
        return self.made[module, bits]

    def _new_sublayer(self, sublayer: nn.Module, bits: int) -> nn.Module:
        """Return a sublayer whose linear layers are low-bit products."""
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
