"""Small configs of every family, for all tests that need a model."""

from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FAMILIES = {  # the class of each family in transformers
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
EXTRAS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 2},
    "ministral": {"sliding_window": 2},
    "qwen2": {"sliding_window": 2, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": 2, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"sliding_window": 2, "query_pre_attn_scalar": 6},
    "gemma3_text": {
        "sliding_window": 2,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 6,
        "rope_theta": 100.0,
    },
}


def small(
    family: str = "llama", *, hidden: int = 8, layers: int = 3, **changes: Any
) -> dict[str, Any]:
    """A config.json of the family: two query heads share a key head, of size 4, and windows are two
    tokens, in all layers of Mistral and some of the others, but of Llama.
    """
    raw = {
        "model_type": family,
        "architectures": [FAMILIES[family]],
        "vocab_size": 3,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    return raw | EXTRAS.get(family, {}) | changes
