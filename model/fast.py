"""The speed room: a loaded model, prepared in place to read its weights as fast as the machine can.

Decoding reads every weight once per step, so a step should cost what that reading costs. Two things stand in
the way on a CPU and are mended here, without the readable files knowing: ``F.linear`` reads a bf16 matrix at
a third of the memory's bandwidth, unless it lies in the blocked layout of oneDNN; and three products over
the same input cost three calls where one over stacked rows would do. Results differ by rounding only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoder import Decoder
from model.layers import Attention, GatedMLP, Positions, rotate


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has oneDNN kernels for packed products on this device in this dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """x Wᵀ + b, where W stacks the rows of several linear layers, in oneDNN's layout where there is one."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None = None) -> None:
        """``weights``: ``[out_i, in]`` each; ``biases``: ``[out_i]`` each, or None."""
        super().__init__()
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.bias = torch.cat(biases) if biases else None
        self.packed = can_pack(weight.device, weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    @staticmethod
    def stacking(*layers: nn.Linear) -> PackedLinear:
        """One product in place of several over the same input."""
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return PackedLinear([layer.weight for layer in layers], biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class FusedAttention(Attention):
    """Attention whose queries, keys and values come from one product and are rotated in one go."""

    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        self.config, self.layer = attention.config, attention.layer
        self.qkv_proj = PackedLinear.stacking(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = PackedLinear.stacking(attention.o_proj)

    def project(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        batch, count, _ = x.shape
        queries, keys = self.config.num_heads, self.config.num_kv_heads
        heads = self.qkv_proj(x).view(batch, count, -1, self.config.head_dim).transpose(1, 2)
        turned = rotate(heads[:, : queries + keys], positions.cos, positions.sin)
        return turned[:, :queries], turned[:, queries:], heads[:, queries + keys :]


class FusedMLP(GatedMLP):
    """A gated MLP whose gate and up projections are one product."""

    def __init__(self, mlp: GatedMLP) -> None:
        nn.Module.__init__(self)
        self.activation = mlp.activation
        self.gate_up_proj = PackedLinear.stacking(mlp.gate_proj, mlp.up_proj)
        self.down_proj = PackedLinear.stacking(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)


def accelerate(model: Decoder) -> Decoder:
    """Replace the model's attentions, MLPs and head by fast ones, layer by layer, and return it.

    The weights are moved, not copied: memory peaks at one layer more. Only a tied embedding is held twice,
    once to be looked up and once packed as the head. The prepared model decodes but can no longer be trained
    or saved.
    """
    for block in model.layers:
        block.self_attn = FusedAttention(block.self_attn)
        block.mlp = FusedMLP(block.mlp)
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    if model.lm_head is not None or can_pack(head.weight.device, head.weight.dtype):
        model.lm_head = PackedLinear([head.weight])
    return model
