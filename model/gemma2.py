"""Gemma-2 (arXiv 2408.00118): four norms per block, GeGLU, soft caps, sliding windows.

The soft cap of attention scores and the sliding windows are part of ``model.layers``; the rest is
here. Gemma 3's text models (arXiv 2503.19786) have the same block without caps. Their norms of
heads are part of ``model.layers.Attention``.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from model.cache import LayerCache
from model.config import ModelConfig
from model.decoder import Decoder
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
        cache: LayerCache | None,
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


class Gemma2(Decoder):
    """Gemma-2 decoder: see ``Decoder``."""

    new_block = Gemma2Block
    new_norm = UnitOffsetRMSNorm

    @property
    def embedding_scale(self) -> float:
        """Factor √hidden, rounded to the model's dtype as in training: √3584 is 59.75 in bf16."""
        return torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype).item()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens) * self.embedding_scale

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        logits = super().logits(hidden, head)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)
