"""The one factory of small configs: what every test that needs a model begins with."""

from typing import Any

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}


def small(family: str = "llama", *, hidden: int = 8, layers: int = 3, **changes: Any) -> dict[str, Any]:
    """A config.json of the family: two query heads share a key head, of size 4, and Gemma-2's window is two tokens."""
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
    if family == "gemma2":
        raw |= {"sliding_window": 2, "query_pre_attn_scalar": 6}
    return raw | changes
