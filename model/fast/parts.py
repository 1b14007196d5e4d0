"""The parts of a model prepared for a GPU: fewer and larger kernels than the readable ones.

Three products over the same input are one over stacked rows, a residual is added with the product before it, and a norm
is one kernel. Results differ by rounding only.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.fast.shared_keys import SharedKeys
from model.layers import Attention, GatedMLP, Positions, RMSNorm, Sight, attend, rotate, wide_dtype
from model.llama import LlamaBlock
from model.quantise import round_inputs
from model.twins import Product


class FastPart:
    """A part of a prepared model that is no ``Module``: to look up a ``Module`` and to call it take microseconds."""


class StackedLinear(FastPart, Product):
    """x Wᵀ + b, where W stacks the rows of several linear layers over the same input."""

    @torch.no_grad()
    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None = None) -> None:
        """``weights``: ``[out_i, in]`` each; ``biases``: ``[out_i]`` each, or None."""
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
        self.bias = torch.cat(biases) if biases else None
        self.rounds_inputs = False  # stands in for a low-bit product

    @staticmethod
    def of(*layers: nn.Linear) -> StackedLinear:
        """One product in place of several."""
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return StackedLinear([layer.weight for layer in layers], biases)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[..., in]`` -> ``[..., out]``, with ``residual`` of the result's shape added."""
        product = F.linear(round_inputs(x) if self.rounds_inputs else x, self.weight, self.bias)
        return product if residual is None else residual + product


class FastNorm(FastPart):
    """Either family's RMSNorm by torch's fused kernel, scaled in the wide dtype and rounded once."""

    def __init__(self, norm: RMSNorm) -> None:
        weight = norm.weight.detach()
        self.scale = weight if norm.neutral == 1 else weight.to(wide_dtype(weight.dtype)) + 1
        self.norm = partial(F.rms_norm, normalized_shape=weight.shape, weight=self.scale, eps=norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.scale.dtype)).to(x.dtype)


class FusedAttention(FastPart):
    """``Attention`` whose queries, keys and values come from one product and are rotated in one go."""

    def __init__(self, attention: Attention) -> None:
        config = attention.config
        self.layer, self.window, self.head_dim = attention.layer, config.windows[attention.layer], config.head_dim
        self.queries, self.rotated = config.num_heads, config.num_heads + config.num_kv_heads
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.qkv_proj = StackedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = StackedLinear.of(attention.o_proj)

    def __call__(
        self, x: Tensor, positions: Positions, cache: KVCache | None, residual: Tensor | None = None
    ) -> Tensor:
        batch, count, _ = x.shape
        heads = self.qkv_proj(x).view(batch, count, -1, self.head_dim).transpose(1, 2)
        turned = rotate(heads[:, : self.rotated], positions.cos, positions.sin)
        q, k, v = turned[:, : self.queries], turned[:, self.queries :], heads[:, self.rotated :]
        if cache is not None:
            k, v = cache.write(self.layer, positions.start, k, v)
        out = self.attend(q, k, v, positions.sights[self.window])
        return self.o_proj(out.transpose(1, 2).reshape(batch, count, -1), residual)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Sight | SharedKeys) -> Tensor:
        """``model.layers.attend``, of a static step by ``SharedKeys``."""
        if isinstance(sees, SharedKeys):
            return sees.attend(q, k, v, scale=self.scale, soft_cap=self.soft_cap)
        return attend(q, k, v, sees, scale=self.scale, soft_cap=self.soft_cap)


class FusedMLP(FastPart):
    """``GatedMLP`` whose gate and up projections are one product."""

    def __init__(self, mlp: GatedMLP) -> None:
        self.activation = mlp.activation
        self.gate_up_proj = StackedLinear.of(mlp.gate_proj, mlp.up_proj)
        self.down_proj = StackedLinear.of(mlp.down_proj)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up, residual)


class FusedLlamaBlock(nn.Module):
    """``LlamaBlock`` whose residuals are added by the last product of each sublayer."""

    def __init__(self, block: LlamaBlock) -> None:
        super().__init__()
        for name, part in block.named_children():
            setattr(self, name, part)

    def forward(self, x: Tensor, positions: Positions, cache: KVCache | None, *, attention: bool, mlp: bool) -> Tensor:
        if attention:
            x = self.self_attn(self.input_layernorm(x), positions, cache, residual=x)
        if mlp:
            x = self.mlp(self.post_attention_layernorm(x), residual=x)
        return x
