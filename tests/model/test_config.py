"""config.json: defaults, variants, and refusals with their messages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import InputError, ModelConfig, parse_config
from model.config import FAMILIES, Rope

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QWEN2, QWEN3, MISTRAL, MINISTRAL = (
    LLAMA | {"model_type": family} for family in ("qwen2", "qwen3", "mistral", "ministral")
)
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 10}
GEMMA = LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 10}
FULL, SLIDING = "full_attention", "sliding_attention"


def test_absent_fields_have_the_published_values():
    config = parse_config(
        {key: value for key, value in GEMMA.items() if key not in ("head_dim", "sliding_window")}
    )
    assert (config.head_dim, config.attention_scale, config.tie_embeddings) == (
        256,
        256**-0.5,
        True,
    )
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert config.windows == (4096, None, 4096, None)
    config = parse_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.attention_scale) == (4, 4, 0.5)
    assert not (config.tie_embeddings or config.attention_bias or config.mlp_bias)
    assert (config.ropes, config.windows) == ((Rope(10000.0, "default", 64),) * 4, (None,) * 4)
    config = parse_config(QWEN3)
    assert (config.head_dim, config.attention_scale, config.head_norms) == (128, 128**-0.5, True)
    assert (config.attention_bias, parse_config(QWEN2).attention_bias) == ("", "qkv")
    config = parse_config(GEMMA3)
    assert (config.head_dim, config.tie_embeddings) == (256, True)
    assert (config.attention_soft_cap, config.final_soft_cap) == (None, None)


def test_absent_contexts_are_those_of_each_family():
    found = {}
    for family in FAMILIES:
        raw = LLAMA | {"model_type": family, "max_position_embeddings": None}
        found[family] = parse_config(raw).max_positions
    assert found == {
        "llama": 2048,
        "mistral": 131072,
        "ministral": 131072,
        "qwen2": 32768,
        "qwen3": 32768,
        "gemma2": 8192,
        "gemma3_text": 131072,
    }


def test_windows_are_in_the_layers_of_each_family():
    assert parse_config(MISTRAL).windows == (4096,) * 4
    assert parse_config(MISTRAL | {"sliding_window": None}).windows == (None,) * 4
    kinds = {"layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window": 10}
    assert parse_config(MISTRAL | kinds).windows == (10,) * 4
    assert parse_config(MINISTRAL | kinds).windows == (None, 10, 10, None)
    assert parse_config(MINISTRAL).windows == (4096,) * 4
    for raw in (QWEN2, QWEN3):
        raw = raw | {"sliding_window": 10, "max_window_layers": 1}
        assert parse_config(raw).windows == (None,) * 4
        raw = raw | {"use_sliding_window": True}
        assert parse_config(raw).windows == (None, 10, 10, 10)
        assert parse_config(raw | {"max_window_layers": 0}).windows == (10,) * 4
        assert parse_config(raw | kinds).windows == (None, 10, 10, None)
    assert parse_config(GEMMA3).windows == (10,) * 5 + (None, 10)
    every_second = {"sliding_window_pattern": 2}
    assert parse_config(GEMMA3 | every_second).windows == (10, None) * 3 + (10,)


def test_gemma_3_turns_layers_with_a_window_by_angles_of_their_own():
    local, scaled = Rope(1e4, "default", 64), Rope(1e6, "linear", 64, factor=8.0)
    old = GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8}}
    new = GEMMA3 | {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
        }
    }
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).ropes == (local,) * 5 + (scaled, local)
    bases = {"rope_theta": 5e5, "rope_local_base_freq": 1e3}
    assert {rope.theta for rope in parse_config(GEMMA3 | bases).ropes} == {5e5, 1e3}


def test_keys_that_a_family_does_not_read_change_nothing():
    for raw, ignored in [
        (MISTRAL, {"attention_bias": True, "mlp_bias": True, "query_pre_attn_scalar": 9}),
        (QWEN2, {"attention_bias": False, "attn_logit_softcapping": 9.0}),
        (LLAMA, {"sliding_window": 10, "final_logit_softcapping": 9.0}),
        (GEMMA3, {"attn_logit_softcapping": 50.0, "use_sliding_window": False}),
    ]:
        assert parse_config(raw | ignored) == parse_config(raw)


def test_layer_types_win_over_the_even_layers():
    assert parse_config(GEMMA | {"layer_types": [FULL, SLIDING, SLIDING, FULL]}).windows == (
        None,
        10,
        10,
        None,
    )
    assert parse_config(GEMMA | {"layer_types": None}).windows == (10, None, 10, None)


def test_a_window_and_soft_caps_that_are_null_are_off():
    absent = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"))
    config = parse_config(GEMMA | absent)
    assert (config.attention_soft_cap, config.final_soft_cap, config.windows) == (
        None,
        None,
        (None,) * 4,
    )


def test_the_rotary_base_is_read_from_either_layout():
    old = LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2}}
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).ropes[0] == Rope(500.0, "linear", 64, factor=2.0)
    assert parse_config(LLAMA | {"rope_theta": 500.0, "rope_scaling": None}).ropes[0] == Rope(
        500.0, "default", 64
    )


REFUSED = [
    ([], "must hold one JSON object"),
    (
        {"hidden_size": 3},
        "model_type None is not supported; this project runs 'llama', 'mistral', ",
    ),
    (LLAMA | {"model_type": "gemma3"}, "'gemma3' is not supported: it reads images"),
    (LLAMA | {"model_type": "phi3"}, "'phi3' is not supported: it stores q, k and v as one"),
    (LLAMA | {"model_type": "olmo2"}, "'olmo2' is not supported: it has norms over all heads"),
    (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not"),
    (QWEN2 | {"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
    (
        GEMMA3 | {"rope_parameters": {"rope_type": "default"}},
        "layer type of rope_parameters 'rope_type' is not supported",
    ),
    (GEMMA3 | {"rope_scaling": [8]}, "rope_scaling must be null or one object, found"),
    (
        LLAMA | {"quantization_config": {"quant_method": "gptq"}},
        "is quantised: use the original one",
    ),
    (
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope type 'yarn' is not supported",
    ),
    (
        GEMMA | {"rope_parameters": {FULL: {"rope_type": "default"}}},
        "must be one object for all layers",
    ),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    (LLAMA | {"hidden_act": "relu"}, "activation 'relu' is not supported; this"),
    (LLAMA | {"head_dim": 5}, "4 heads of size 5 with 4 key heads are not supported"),
    (LLAMA | {"num_key_value_heads": 3}, "4 heads of size 4 with 3 key heads are not"),
    (LLAMA | {"hidden_size": 16.0}, "hidden_size must be a whole number from 1"),
    (LLAMA | {"vocab_size": None}, "vocab_size must be a whole number .*, found None"),
    (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    (GEMMA | {"layer_types": [FULL]}, "must name the kind of each of 4 layers"),
    (GEMMA | {"layer_types": ["chunked"] * 4}, "layer type 'chunked' is not supported"),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_unsupported_config_is_refused_in_one_line_that_names_the_field(raw, message):
    with pytest.raises(InputError, match=message) as refusal:
        parse_config(raw)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


junk = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.just([1])
    | st.just({"a": {}})
)
FIELDS = {
    *GEMMA,
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
    "layer_types",
}
FIELDS |= {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "rope_local_base_freq",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
}


@pytest.mark.parametrize("good", [GEMMA | {"model_type": family} for family in FAMILIES])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(changes=st.dictionaries(st.sampled_from(sorted(FIELDS)), junk, min_size=1, max_size=3))
def test_any_field_may_hold_anything_without_a_traceback(good, changes):
    try:
        assert isinstance(parse_config(good | changes), ModelConfig)
    except InputError as error:
        assert "\n" not in str(error)
