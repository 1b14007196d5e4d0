"""Gemma-2 (arXiv 2408.00118): four norms per block, GeGLU, soft caps, sliding windows.

The soft cap of attention scores and the sliding windows are part of ``model.layers``. The cap of
the logits and the scale of the embedding are part of ``model.decoder``. Gemma 3's text models
(arXiv 2503.19786) have the same block without caps. Their norms of heads are part of
``model.layers.Attention``.
"""

from functools import partial

from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig
from model.layers import Attention, GatedMLP, Positions, RMSNorm, normalise


class UnitOffsetRMSNorm(RMSNorm):
    """RMSNorm that scales by (1 + weight) in the wide dtype and rounds once, at the end."""

    neutral = 0.0

    def forward(self, x: Tensor) -> Tensor:
        normed = normalise(x, self.eps)
        return (normed * (1 + self.weight.to(normed.dtype))).to(x.dtype)


class Gemma2Block(nn.Module):
    """Block: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    The norm after a sublayer belongs to it: a skipped sublayer skips it too and adds nothing.
    """

    norm = UnitOffsetRMSNorm

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = partial(UnitOffsetRMSNorm, config.hidden_size, config.norm_eps)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, UnitOffsetRMSNorm)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config)
        self.post_feedforward_layernorm = norm()

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        cache: KVCache | None,
        *,
        attention: bool,
        mlp: bool,
    ) -> Tensor:
        if attention:
            x = x + self.post_attention_layernorm(
                self.self_attn(self.input_layernorm(x), positions, cache)
            )
        if mlp:
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x
