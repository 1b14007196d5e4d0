"""Model config: Hugging Face's ``config.json`` as one frozen dataclass for all families.

Each family is a row of the table ``FAMILIES``: the block that computes it, and the keys that it
reads. Reads the layout of transformers 4 (``rope_theta``, ``rope_scaling``) and 5
(``rope_parameters``).

A field has the first of these values: the file's, the family's default (``keys``), the default that
is given to ``_read``. A null in the file, or in an object of it, is no value, except for
``NULLABLE`` keys. Keys of ``IF_UNREAD`` that a family does not name are ignored in the file.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from model.errors import InputError

# The activations of ``model.layers``: the key that names them, and the names that files have.
ACTIVATION_NAMES = {
    "silu": ("hidden_act", ["silu", "swish"]),
    "gelu_pytorch_tanh": ("hidden_activation", ["gelu_pytorch_tanh", "gelu_new"]),
}
# Factors that a kind of scaling has, and their defaults. A file must have those without one (None);
# for yarn's ``factor`` see ``_rope``. Dynamic scaling begins beyond the model's context, which no
# text here reaches.
ROPE_FACTORS: dict[str, dict[str, float | None]] = {
    "default": {},
    "dynamic": {},
    "linear": {"factor": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None},
    "yarn": {"factor": None, "beta_fast": 32.0, "beta_slow": 1.0},
}
# A damaged file must not ask for more than can be built.
LARGEST = 2**24  # of any whole number
MOST_LAYERS = 2**10
# kinds of layers
EVERYWHERE = "full_attention"
SLIDING = "sliding_attention"
LAYER_KINDS = (SLIDING, EVERYWHERE)


@dataclass(frozen=True)
class Family:
    """Row of the table of families.

    ``block`` is the readable file that computes it. ``keys`` are the family's defaults for keys
    that a file may lack.
    ``activation`` is that of the MLP. With ``scaled_embedding`` the embeddings are multiplied by
    √hidden. ``biased`` names the projections of q, k, v and o that have a bias in every checkpoint.
    With ``head_norms`` each head of q and k is normed before it is rotated. With ``two_ropes``
    layers with a window have a rotary embedding of their own. Activations stay in float16's range
    where the family ``fits_float16``.
    """

    block: str
    keys: Mapping[str, Any]
    activation: str = "silu"
    scaled_embedding: bool = False
    biased: str = ""
    head_norms: bool = False
    two_ropes: bool = False
    fits_float16: bool = True


# Keys that only some families read, with their values in all others.
IF_UNREAD = {
    "attention_bias": False,  # of all four projections
    "mlp_bias": False,
    "query_pre_attn_scalar": None,  # the square of 1 / attention scale; None: head_dim
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    # A layer has a window if layer_types says so. Without layer_types it has one from layer
    # max_window_layers on, but every sliding_window_pattern-th layer has none.
    "sliding_window": None,
    "use_sliding_window": True,
    "layer_types": None,
    "max_window_layers": 0,
    "sliding_window_pattern": None,
}
# Keys whose null is a value: there is no window, no cap and so on.
NULLABLE = {key for key, value in IF_UNREAD.items() if value is None} | {"mscale", "mscale_all_dim"}
# Keys that several families read.
WINDOWS = {"sliding_window": 4096, "layer_types": None}
QWEN = WINDOWS | {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
GEMMA = WINDOWS | {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
}
FAMILIES = {
    "llama": Family(
        "llama",
        {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family("llama", WINDOWS | {"max_position_embeddings": 131072}),
    "ministral": Family("llama", WINDOWS | {"max_position_embeddings": 131072}),
    "qwen2": Family("llama", QWEN, biased="qkv"),
    "qwen3": Family("llama", QWEN | {"attention_bias": False, "head_dim": 128}, head_norms=True),
    "gemma2": Family(
        "gemma2",
        GEMMA
        | {
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        fits_float16=False,
    ),
    "gemma3_text": Family(
        "gemma2",
        GEMMA | {"max_position_embeddings": 131072, "sliding_window_pattern": 6},
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        head_norms=True,
        two_ropes=True,
        fits_float16=False,
    ),
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and the factors of its ``kind`` of scaling.

    Only the factors that ``ROPE_FACTORS`` names for the kind mean anything. Cosines and sines are
    multiplied by ``attention_factor``.
    """

    theta: float
    kind: str
    original_max_positions: int
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    attention_factor: float = 1.0

    @property
    def extended_context(self) -> int:
        """Number of positions that yarn extends the trained context to; 0 for other kinds."""
        if self.kind != "yarn":
            return 0
        return int(min(LARGEST, self.factor * self.original_max_positions))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of the forward pass, for all families.

    ``attention_bias`` names the projections of q, k, v and o that have a bias.
    ``attention_scale`` multiplies q·k. ``windows[layer]`` is the sliding window of a layer in
    tokens, or None for full attention; ``ropes[layer]`` is its rotary embedding. Soft caps are None
    where there are none. ``source`` is the parsed ``config.json``.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    attention_bias: str
    mlp_bias: bool
    attention_scale: float
    attention_soft_cap: float | None
    final_soft_cap: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    source: dict[str, Any] = field(compare=False, repr=False)


def parse_config(source: Any) -> ModelConfig:
    """Return the ModelConfig of the parsed ``config.json`` of a checkpoint of one of the
    ``FAMILIES``.

    Raises InputError with the name of the field for anything that this project cannot compute
    exactly.
    """
    if not isinstance(source, dict):
        raise InputError("config.json must hold one JSON object")
    if source.get("quantization_config"):
        raise InputError(
            "config.json: the checkpoint is quantised: use the original one, in plain float weights"
        )
    family = FAMILIES[_one_of("model_type", source.get("model_type"), FAMILIES)]
    key, names = ACTIVATION_NAMES[family.activation]
    _one_of(key, source.get(key) or family.activation, names)
    _one_of("is_causal", source.get("is_causal"), [True, None])
    _one_of("use_bidirectional_attention", source.get("use_bidirectional_attention"), [False, None])
    raw = _fields(source, family)
    read = partial(_read, raw)
    hidden_size = read("hidden_size", int)
    heads = read("num_attention_heads", int)
    kv_heads = read("num_key_value_heads", int, heads)
    head_dim = read("head_dim", int, hidden_size // heads)
    if heads % kv_heads or head_dim % 2:
        raise InputError(
            f"config.json: {heads} heads of size {head_dim} with {kv_heads} key heads are not"
            " supported; num_attention_heads must be a multiple of num_key_value_heads, and"
            " head_dim even"
        )
    kinds = _layer_kinds(raw)
    window = read("sliding_window", int)
    windows = {SLIDING: window if read("use_sliding_window", bool) else None, EVERYWHERE: None}
    ropes = _ropes(raw, family.two_ropes)
    return ModelConfig(
        family=family,
        vocab_size=read("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=read("intermediate_size", int),
        num_layers=len(kinds),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max(
            read("max_position_embeddings", int),
            *(each.extended_context for each in ropes.values()),
        ),
        norm_eps=read("rms_norm_eps", float, 1e-6),
        tie_embeddings=read("tie_word_embeddings", bool, False),
        attention_bias="qkvo" if read("attention_bias", bool) else family.biased,
        mlp_bias=read("mlp_bias", bool),
        attention_scale=(read("query_pre_attn_scalar", int) or head_dim) ** -0.5,
        attention_soft_cap=read("attn_logit_softcapping", float),
        final_soft_cap=read("final_logit_softcapping", float),
        windows=tuple(windows[kind] for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        source=source,
    )


def _fields(source: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of ``config.json`` as the family reads them, with its defaults."""
    given = {
        key: value
        for key, value in _present(source).items()
        if key in family.keys or key not in IF_UNREAD
    }
    return IF_UNREAD | family.keys | given


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without nulls, but for those of ``NULLABLE`` keys."""
    return {key: value for key, value in fields.items() if value is not None or key in NULLABLE}


def _layer_kinds(raw: dict[str, Any]) -> list[str]:
    """Return the kind of each layer: the file's layer_types, or those that its other keys
    describe.
    """
    layers = _read(raw, "num_hidden_layers", int, largest=MOST_LAYERS)
    first = _read(raw, "max_window_layers", int, smallest=0)
    pattern = _read(raw, "sliding_window_pattern", int)
    kinds = raw["layer_types"]
    if kinds is None:
        kinds = [
            EVERYWHERE if layer < first or (pattern and (layer + 1) % pattern == 0) else SLIDING
            for layer in range(layers)
        ]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InputError(f"config.json: layer_types must name the kind of each of {layers} layers")
    return [_one_of("layer type", kind, LAYER_KINDS) for kind in kinds]


def _ropes(raw: dict[str, Any], two: bool) -> dict[str, Rope]:
    """Return the rotary embedding of each kind of layers.

    A file may hold rope_parameters, and a rope_scaling that a user adds to them. Where there are
    ``two``, this is the scaling of layers without a window, and rope_parameters hold an object for
    each kind.
    """
    scaling = _read(raw, "rope_scaling", dict, {})
    if "type" in scaling:  # an older name
        scaling = {"rope_type": scaling["type"]} | scaling
    parameters = _read(raw, "rope_parameters", dict, {})
    if not two:
        return dict.fromkeys(LAYER_KINDS, _rope(raw, parameters | scaling))
    for kind in parameters:
        _one_of("layer type of rope_parameters", kind, LAYER_KINDS)
    local = {"rope_theta": _read(raw, "rope_local_base_freq", float, 1e4)}
    full = {"rope_theta": _read(raw, "rope_theta", float, 1e6)}
    return {
        SLIDING: _rope(raw, local | _read(parameters, SLIDING, dict, {})),
        EVERYWHERE: _rope(raw, full | _read(parameters, EVERYWHERE, dict, {}) | scaling),
    }


def _rope(raw: dict[str, Any], scaling: dict[str, Any]) -> Rope:
    """Return the rotary embedding of ``scaling``; fields that it lacks may be in ``raw``."""
    if any(isinstance(value, dict) for value in scaling.values()):
        raise InputError(
            f"config.json: rope_parameters must be one object for all layers, found {scaling!r:.80}"
        )
    # an object of rope_parameters may have the older name too
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    _one_of("rope type", kind, ROPE_FACTORS)
    read = partial(_read, raw | scaling)
    _one_of("partial_rotary_factor", read("partial_rotary_factor", float, 1.0), [1])
    context = read("max_position_embeddings", int)
    original = read("original_max_position_embeddings", int, context)
    defaults = ROPE_FACTORS[kind]
    if kind == "yarn":  # its factor is that of the contexts, unless the file has another
        defaults = defaults | {"factor": context / original}
    factors = {name: read(name, float, default) for name, default in defaults.items()}
    if kind == "llama3" and factors["low_freq_factor"] >= factors["high_freq_factor"]:
        raise InputError("config.json: high_freq_factor must be above low_freq_factor")
    if kind == "yarn":
        _one_of("truncate", read("truncate", bool, True), [True])
        factors["attention_factor"] = _attention_factor_of_yarn(read, factors["factor"])
    return Rope(read("rope_theta", float, 1e4), kind, original, **factors)


def _attention_factor_of_yarn(read: Callable[..., Any], factor: float) -> float:
    """Return the factor of cosines and sines (YaRN, arXiv 2309.00071, section 3.4), which a file
    may give; or it may give two strengths, whose factors are divided.
    """
    strengths = [read(name, float) for name in ("mscale", "mscale_all_dim")]
    above, below = strengths if all(strengths) else (1.0, 0.0)
    growth = 0.1 * math.log(max(1, factor))
    return read("attention_factor", float, (above * growth + 1) / (below * growth + 1))


def _one_of(name: str, value: Any, supported: Collection[Any]) -> Any:
    """Return ``value``, if this project supports it."""
    if value not in list(supported):
        known = ", ".join(map(repr, supported))
        raise InputError(
            f"config.json: {name} {value!r:.80} is not supported; this project runs {known}"
        )
    return value


def _read(
    raw: Mapping[str, Any],
    key: str,
    kind: type,
    default: Any = None,
    *,
    smallest: int = 1,
    largest: int = LARGEST,
) -> Any:
    """Return a field as an int from ``smallest`` to ``largest``, a float above 0, a bool or an
    object without its nulls; ``default`` where it is absent. Only ``NULLABLE`` keys can be None.
    """
    value = raw.get(key, default)
    if value is None and key in NULLABLE:
        return None
    fits, wanted = {
        int: (
            type(value) is int and smallest <= value <= largest,
            f"a whole number from {smallest} to {largest}",
        ),
        float: (type(value) in (int, float) and 0 < value < 1e30, "a number above 0"),
        bool: (type(value) is bool, "true or false"),
        dict: (type(value) is dict, "null or one object"),
    }[kind]
    if not fits:
        raise InputError(f"config.json: {key} must be {wanted}, found {value!r:.80}")
    return _present(value) if kind is dict else kind(value)
