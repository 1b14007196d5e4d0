"""Model config: Hugging Face's ``config.json`` as one frozen dataclass for both families.

Reads the layout of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from model.errors import InputError

ACTIVATIONS = {"llama": "silu", "gemma2": "gelu_pytorch_tanh"}
ROPE_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
LARGEST = 2**24  # of any whole number: a damaged file must not ask for a billion layers


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and the scaling of its frequencies by the factors of its ``kind``."""

    theta: float
    kind: str
    original_max_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of the forward pass, for both families.

    ``attention_scale`` multiplies q·k. ``windows[layer]`` is the sliding window of a layer in tokens, or
    None for full attention. Soft caps are None where there are none. ``source`` is the parsed ``config.json``.
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
    attention_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_soft_cap: float | None
    final_soft_cap: float | None
    windows: tuple[int | None, ...]
    source: dict[str, Any] = field(compare=False, repr=False)


def parse_config(raw: Any) -> ModelConfig:
    """ModelConfig of the parsed ``config.json`` of a Llama or Gemma-2 checkpoint.

    Raises InputError with the name of the field for anything that this project cannot compute exactly.
    """
    if not isinstance(raw, dict):
        raise InputError("config.json must hold one JSON object")
    if raw.get("quantization_config"):
        raise InputError("config.json: the checkpoint is quantised: use the original one, in plain float weights")
    family = _one_of("model_type", raw.get("model_type"), ACTIVATIONS)
    activation, is_gemma = ACTIVATIONS[family], family == "gemma2"
    _one_of("activation", raw.get("hidden_activation") or raw.get("hidden_act") or activation, [activation])
    read = partial(_read, raw)
    hidden_size, heads, layers = (read(key, int) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = read("num_key_value_heads", int, heads)
    head_dim = read("head_dim", int, 256 if is_gemma else hidden_size // heads)
    if heads % kv_heads or head_dim % 2:
        raise InputError(
            f"config.json: {heads} heads of size {head_dim} with {kv_heads} key heads are not supported; "
            "num_attention_heads must be a multiple of num_key_value_heads, and head_dim even"
        )
    max_positions = read("max_position_embeddings", int, 8192 if is_gemma else 2048)
    return ModelConfig(
        family=family,
        vocab_size=read("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=read("intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=read("rms_norm_eps", float, 1e-6),
        rope=_rope(raw, max_positions),
        tie_embeddings=read("tie_word_embeddings", bool, is_gemma),
        attention_bias=read("attention_bias", bool, False),
        mlp_bias=read("mlp_bias", bool, False),
        attention_scale=(read("query_pre_attn_scalar", int, 256) if is_gemma else head_dim) ** -0.5,
        attention_soft_cap=read("attn_logit_softcapping", float, 50.0, optional=True) if is_gemma else None,
        final_soft_cap=read("final_logit_softcapping", float, 30.0, optional=True) if is_gemma else None,
        windows=_windows(raw, layers) if is_gemma else (None,) * layers,
        source=raw,
    )


def _windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each Gemma-2 layer: by ``layer_types`` if given, else every even layer has one."""
    windows = {"sliding_attention": _read(raw, "sliding_window", int, 4096, optional=True), "full_attention": None}
    kinds = raw.get("layer_types") or (list(windows) * num_layers)[:num_layers]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InputError(f"config.json: layer_types must name the kind of each of {num_layers} layers")
    return tuple(windows[_one_of("layer type", kind, windows)] for kind in kinds)


def _rope(raw: dict[str, Any], max_positions: int) -> Rope:
    """Rotary embedding of a model that reads up to ``max_positions`` tokens."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise InputError(f"config.json: rope_scaling must be null or one object for all layers, found {scaling!r:.80}")
    kind = _one_of("rope type", scaling.get("rope_type") or scaling.get("type") or "default", ROPE_FACTORS)
    read = partial(_read, raw | scaling)  # some fields occur in either
    _one_of("partial_rotary_factor", (raw | scaling).get("partial_rotary_factor"), [1, None])
    trained = read("original_max_position_embeddings", int, max_positions)
    factors = {name: read(name, float) for name in ROPE_FACTORS[kind]}
    return Rope(read("rope_theta", float, 10000.0), kind, trained, **factors)


def _one_of(name: str, value: Any, supported: Collection[Any]) -> Any:
    """``value``, if this project supports it."""
    if value not in list(supported):
        known = " and ".join(map(repr, supported))
        raise InputError(f"config.json: {name} {value!r:.80} is not supported; this project runs {known}")
    return value


def _read(raw: dict[str, Any], key: str, kind: type, default: Any = None, *, optional: bool = False) -> Any:
    """Field as an int of at least 1, a float above 0 or a bool; ``default`` where it is absent.

    Where it is null, it is None if it is ``optional``, else the default.
    """
    value = raw.get(key, default)
    if value is None and optional:
        return None
    value = default if value is None else value
    fits, wanted = {
        int: (type(value) is int and 1 <= value <= LARGEST, f"a whole number from 1 to {LARGEST}"),
        float: (type(value) in (int, float) and 0 < value < 1e30, "a number above 0"),
        bool: (type(value) is bool, "true or false"),
    }[kind]
    if not fits:
        raise InputError(f"config.json: {key} must be {wanted}, found {value!r:.80}")
    return kind(value)
