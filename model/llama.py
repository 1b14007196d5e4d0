"""Llama (arXiv 2302.13971, 2407.21783): pre-norm blocks, rotary embedding, grouped queries, SwiGLU.

Runs every checkpoint that declares ``LlamaForCausalLM``: Llama 1 to 3.2, CodeLlama, TinyLlama,
SmolLM. Mistral, Qwen 2 and Qwen 3 have the same block: their windows, biases and norms of heads are
part of ``model.layers.Attention``.
"""

from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig
from model.layers import Attention, GatedMLP, Positions, RMSNorm


class LlamaBlock(nn.Module):
    """Block: x + attention(norm(x)), then x + mlp(norm(x)), unless the plan skips it."""

    norm = RMSNorm

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

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
            x = x + self.self_attn(self.input_layernorm(x), positions, cache)
        if mlp:
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x
