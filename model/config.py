"""Hugging Face ``config.json`` -> one frozen dataclass for both families.

Reads the layout of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from model.errors import InputError

FAMILIES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
LARGEST_SIZE = 2**24
MOST_POSITIONS = 2**31
REFUSED_ROPES = {
    "yarn": "it also rescales the attention scores, which is not computed here",
    "longrope": "its angles change once a text outgrows the trained context, so cached keys would turn wrong",
}
MOST_LAYERS = 1000  # deeper than any published model; keeps a damaged file from asking for a billion


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base and how its frequencies are stretched.

    ``kind`` is "default", "linear" or "llama3"; the other fields are read by the kinds that name them.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass depends on, of either family.

    ``attention_scale`` multiplies q·k; ``windows[layer]`` is the sliding window of a layer in tokens, or
    None where attention is full; soft caps are None where the family has none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    attention_scale: float
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()


def parse_config(raw: Any) -> ModelConfig:
    """The parsed ``config.json`` of a Llama or Gemma-2 checkpoint -> ModelConfig.

    Raises InputError, naming the field, for anything this project cannot compute exactly.
    """
    if not isinstance(raw, dict):
        raise InputError("config.json must hold one JSON object")
    family = _family(raw)
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        method = method.get("quant_method", "unnamed") if isinstance(method, dict) else "unnamed"
        raise InputError(
            f"config.json: the checkpoint is quantised ({method!s:.80}); only plain float weights load: "
            "use the original checkpoint"
        )
    common = _common(raw, family)
    if family == "llama":
        _require_activation(raw, "hidden_act", "silu")
        return ModelConfig(
            **common,
            mlp_bias=_flag(raw, "mlp_bias", default=False),
            attention_scale=common["head_dim"] ** -0.5,
            windows=(None,) * common["num_layers"],
        )
    if raw.get("use_bidirectional_attention"):
        raise InputError("config.json: use_bidirectional_attention makes an encoder, which cannot decode text")
    name = "hidden_activation" if raw.get("hidden_activation") is not None else "hidden_act"
    _require_activation(raw, name, "gelu_pytorch_tanh")
    return ModelConfig(
        **common,
        attention_scale=_positive(raw, "query_pre_attn_scalar", default=256.0) ** -0.5,
        attention_soft_cap=_soft_cap(raw, "attn_logit_softcapping", default=50.0),
        final_soft_cap=_soft_cap(raw, "final_logit_softcapping", default=30.0),
        windows=_windows(raw, common["num_layers"]),
    )


def _common(raw: dict[str, Any], family: str) -> dict[str, Any]:
    """The fields of ModelConfig that both families read alike."""
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = _integer(raw, "num_key_value_heads", default=num_heads)
    hidden_size = _integer(raw, "hidden_size")
    num_layers = _integer(raw, "num_hidden_layers", largest=MOST_LAYERS)
    if num_heads % num_kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if family == "llama" and raw.get("head_dim") is None and hidden_size % num_heads:
        raise InputError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and head_dim is not given"
        )
    head_dim = _integer(raw, "head_dim", default=256 if family == "gemma2" else hidden_size // num_heads)
    if num_heads * head_dim > LARGEST_SIZE:
        raise InputError(f"config.json: {num_heads} heads of head_dim {head_dim} are not a real model's")
    if head_dim % 2:
        raise InputError(f"config.json: head_dim {head_dim} is odd; rotary embeddings turn pairs")
    context = 8192 if family == "gemma2" else 2048
    rope, max_positions = _rope(raw, _integer(raw, "max_position_embeddings", default=context, largest=MOST_POSITIONS))
    return {
        "family": family,
        "vocab_size": _integer(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _integer(raw, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_positions": max_positions,
        "norm_eps": _positive(raw, "rms_norm_eps", default=1e-6),
        "rope": rope,
        "tie_embeddings": _flag(raw, "tie_word_embeddings", default=family == "gemma2"),
        "attention_bias": _flag(raw, "attention_bias", default=False),
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` that ``parse_config`` reads as this config; transformers 4 and 5 read it too."""
    rope = config.rope
    scaling: dict[str, Any] | None = None if rope.kind == "default" else {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    raw = {
        "architectures": [FAMILIES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
    }
    if config.family == "llama":
        return raw | {"hidden_act": "silu", "mlp_bias": config.mlp_bias}
    window = next((window for window in config.windows if window), config.max_positions)
    return raw | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _whole(config.attention_scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
    }


def _family(raw: dict[str, Any]) -> str:
    declared = raw.get("model_type")
    architectures = raw.get("architectures")
    for family, architecture in FAMILIES.items():
        named = isinstance(architectures, list) and architecture in architectures
        if declared == family or (declared is None and named):
            return family
    supported = " and ".join(repr(family) for family in FAMILIES)
    raise InputError(f"config.json: model_type {declared!r:.80} is not supported; this project runs {supported}")


def _windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Gemma-2's sliding window of each layer: ``layer_types`` wins, else the even layers slide."""
    window = (
        None
        if "sliding_window" in raw and raw["sliding_window"] is None
        else _integer(raw, "sliding_window", default=4096)
    )
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(window if layer % 2 == 0 else None for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InputError(f"config.json: layer_types must list {num_layers} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise InputError(f"config.json: layer_types names {kind!r:.80}; known are {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _rope(raw: dict[str, Any], max_positions: int) -> tuple[Rope, int]:
    """The rotary embedding and the context it is exact for, in tokens.

    ``dynamic`` rescales its angles once a text outgrows the trained context, so a token's key would
    depend on the call that computed it and no cached decoding could be lossless: the context ends there.
    """
    own = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(own, dict):
        raise InputError(f"config.json: rope_scaling must be an object or null, found {own!r:.80}")
    if any(isinstance(value, dict) for value in own.values()):
        raise InputError("config.json: rope_parameters for each layer type are not supported; one for all layers is")
    kind = own.get("rope_type") or own.get("type") or "default"
    parameters = {**raw, **own}  # some fields may stand in either
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise InputError("config.json: partial_rotary_factor is not supported: whole heads are rotated here")
    theta = _positive(parameters, "rope_theta", default=10000.0)
    if kind == "default":
        return Rope(theta), max_positions
    trained = _integer(parameters, "original_max_position_embeddings", default=max_positions, largest=MOST_POSITIONS)
    if kind == "dynamic":
        return Rope(theta), min(max_positions, trained)
    if kind == "linear":
        return Rope(theta, "linear", factor=_positive(parameters, "factor")), max_positions
    if kind == "llama3":
        rope = Rope(
            theta,
            "llama3",
            factor=_positive(parameters, "factor"),
            low_freq_factor=_positive(parameters, "low_freq_factor"),
            high_freq_factor=_positive(parameters, "high_freq_factor"),
            original_max_positions=trained,
        )
        if rope.high_freq_factor <= rope.low_freq_factor:
            raise InputError("config.json: rope high_freq_factor must be larger than low_freq_factor")
        return rope, max_positions
    reason = REFUSED_ROPES.get(kind, "it is unknown here") if isinstance(kind, str) else "it is not a name"
    raise InputError(
        f"config.json: rope type {kind!r:.80} is not supported: {reason}; default, linear, llama3 and dynamic "
        "(up to its trained context) are"
    )


def _require_activation(raw: dict[str, Any], key: str, only: str) -> None:
    found = raw.get(key, only)
    if found != only:
        raise InputError(f"config.json: {key} {found!r:.80} is not supported for this family; {only!r} is")


def _integer(raw: dict[str, Any], key: str, *, default: int | None = None, largest: int = LARGEST_SIZE) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise InputError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise InputError(f"config.json: {key} must be a whole number from 1 to {largest}, found {value!r:.80}")
    return value


def _positive(raw: dict[str, Any], key: str, *, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise InputError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise InputError(f"config.json: {key} must be a number above 0, found {value!r:.80}")
    return float(value)


def _soft_cap(raw: dict[str, Any], key: str, *, default: float) -> float | None:
    """A missing soft cap has the family's default; one that is null is off."""
    return None if key in raw and raw[key] is None else _positive(raw, key, default=default)


def _flag(raw: dict[str, Any], key: str, *, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"config.json: {key} must be true or false, found {value!r:.80}")
    return value


def _whole(value: float) -> float:
    """The whole number that rounding has moved this value away from, if there is one."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value
