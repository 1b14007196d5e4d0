"""The parts of a prepared model: they read its weights as fast as the machine can.

Decoding reads every weight once per step, so a step should cost what that reading costs. Three things stand in
the way on a CPU and are fixed here, without the readable files knowing. ``F.linear`` reads a bf16 matrix at
a third of the memory's bandwidth, unless it lies in the blocked layout of oneDNN. Three products over the same
input cost three calls where one over stacked rows would do. And of the small operators between the products,
each of which costs some microseconds whatever its size, several can be spared: a residual is added by the
product before it, and a norm takes six operators instead of eight. Results differ by rounding only.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.fast.flash import attend_causally
from model.fast.pieces import LONGEST_STEP, Piece, attend_in_pieces
from model.fast.shared_keys import SharedKeys
from model.layers import Attention, GatedMLP, Positions, RMSNorm, Sight, attend, rotate, wide_dtype
from model.llama import LlamaBlock
from model.twins import Product

if torch.backends.mkldnn.is_available():  # else nothing is packed
    LINEAR = torch.ops.mkldnn._linear_pointwise.default
    LINEAR_ADD = torch.ops.mkldnn._linear_pointwise.binary


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has oneDNN kernels for packed products on this device in this dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


class FastPart:
    """A part of a prepared model that is no ``Module``: to look up a ``Module`` and to call it take microseconds."""


class PackedLinear(FastPart, Product):
    """x Wᵀ + b, where W stacks the rows of several linear layers, in oneDNN's layout where there is one."""

    @torch.no_grad()
    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None = None) -> None:
        """``weights``: ``[out_i, in]`` each; ``biases``: ``[out_i]`` each, or None."""
        weight = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
        self.bias = torch.cat(biases) if biases else None
        self.packed = can_pack(weight.device, weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight
        self.shape = weight.shape
        self.doubles = False  # computes two rows where one is asked, so that it gets the same bits as among others

    @staticmethod
    def stacking(*layers: nn.Linear) -> PackedLinear:
        """One product in place of several over the same input."""
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return PackedLinear([layer.weight for layer in layers], biases)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[..., in]`` -> ``[..., out]``, with ``residual`` of the result's shape added."""
        if not self.packed:
            product = F.linear(x, self.weight, self.bias)
            return product if residual is None else residual + product
        if self.doubles and x.shape[:-1].numel() == 1:
            two = (tensor if tensor is None else tensor.expand(1, 2, -1).contiguous() for tensor in (x, residual))
            return self.multiply(*two)[:, :1]
        return self.multiply(x, residual)

    def dense(self) -> Tensor:
        """The weight as it was given, ``[out, in]``."""
        return self.weight.to_dense() if self.packed else self.weight

    def multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The packed product of these rows, no more of them and no fewer."""
        if residual is None:
            return LINEAR(x, self.weight, self.bias, "none", [], "")
        return LINEAR_ADD(x, residual, self.weight, self.bias, "add")


class FastNorm(FastPart):
    """Either family's RMSNorm, scaled in the wide dtype and rounded once: on a GPU by torch's fused kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        wide = wide_dtype(norm.weight.dtype)
        self.scale = norm.weight.detach().to(wide) + (1.0 - norm.neutral)
        self.eps = torch.tensor(norm.eps, dtype=wide, device=norm.weight.device)
        self.fused, self.like = None, wide  # on a GPU torch's own kernel, and the dtype of what it takes
        if norm.weight.device.type != "cpu":
            weight = norm.weight.detach() if norm.neutral == 1 else self.scale
            self.fused = partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=norm.eps)
            self.like = weight.dtype
        self.share = 1 / norm.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused(x.to(self.like)).to(x.dtype)
        return (x * self.inverse(x) * self.scale).to(x.dtype)

    def inverse(self, x: Tensor) -> Tensor:
        """1 / sqrt(mean(x²) + eps), ``[..., 1]`` in the wide dtype."""
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.scale.dtype)
        return torch.rsqrt(torch.addcmul(self.eps, norm, norm, value=self.share))


class FusedAttention(FastPart):
    """``Attention`` whose queries, keys and values come from one product and are rotated in one go."""

    def __init__(self, attention: Attention) -> None:
        config = attention.config
        self.layer, self.window, self.head_dim = attention.layer, config.windows[attention.layer], config.head_dim
        self.queries, self.rotated = config.num_heads, config.num_heads + config.num_kv_heads
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.qkv_proj = PackedLinear.stacking(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = PackedLinear.stacking(attention.o_proj)

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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Sight | SharedKeys | tuple[Piece, ...]) -> Tensor:
        """``model.layers.attend``: a step in pieces, a prompt without a mask where the CPU's kernel can."""
        if isinstance(sees, SharedKeys):
            return sees.attend(q, k, v, scale=self.scale, soft_cap=self.soft_cap)
        if isinstance(sees, tuple):
            return attend_in_pieces(q, k, v, sees, scale=self.scale, soft_cap=self.soft_cap)
        if sees.whole and q.shape[2] > LONGEST_STEP and self.soft_cap is None and q.device.type == "cpu":
            return attend_causally(q, k, v, scale=self.scale)
        return attend(q, k, v, sees, scale=self.scale, soft_cap=self.soft_cap)


class FusedMLP(FastPart):
    """``GatedMLP`` whose gate and up projections are one product."""

    def __init__(self, mlp: GatedMLP) -> None:
        self.activation = mlp.activation
        self.gate_up_proj = PackedLinear.stacking(mlp.gate_proj, mlp.up_proj)
        self.down_proj = PackedLinear.stacking(mlp.down_proj)

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
