"""config.json: defaults, variants, refusals with their messages, and writing it back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import InputError, ModelConfig, parse_config
from model.config import Rope
from tests.oracle import FAMILIES, configs

both_families = pytest.mark.parametrize("family", FAMILIES)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GEMMA = LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 10}


@both_families
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_config_written_and_read_again_is_the_same(family, data):
    config = parse_config(data.draw(configs(family)))
    assert parse_config(json.loads(json.dumps(config_json(config)))) == config


def test_fields_absent_from_a_gemma2_config_have_the_published_values():
    config = parse_config({key: value for key, value in GEMMA.items() if key not in ("head_dim", "sliding_window")})
    assert (config.head_dim, config.attention_scale, config.tie_embeddings) == (256, 256**-0.5, True)
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert config.windows == (4096, None, 4096, None)


def test_fields_absent_from_a_llama_config_have_the_published_values():
    config = parse_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.attention_scale) == (4, 4, 0.5)
    assert not (config.tie_embeddings or config.attention_bias or config.mlp_bias)
    assert (config.rope, config.windows) == (Rope(10000.0), (None,) * 4)


def test_layer_types_win_over_the_even_layers():
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert parse_config(GEMMA | {"layer_types": kinds}).windows == (None, 10, 10, None)
    assert parse_config(GEMMA | {"layer_types": None}).windows == (10, None, 10, None)


def test_a_window_and_soft_caps_that_are_null_are_off():
    absent = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"))
    config = parse_config(GEMMA | absent)
    assert (config.attention_soft_cap, config.final_soft_cap, config.windows) == (None, None, (None,) * 4)


def test_the_rotary_base_is_read_from_either_layout():
    old = LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2}}
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).rope == Rope(500.0, "linear", factor=2.0)
    assert parse_config(LLAMA | {"rope_theta": 500.0, "rope_scaling": None}).rope == Rope(500.0)


def test_a_dynamic_rope_ends_the_context_where_its_angles_would_change():
    dynamic = {"type": "dynamic", "factor": 4.0}
    config = parse_config(LLAMA | {"rope_scaling": dynamic})
    assert (config.rope, config.max_positions) == (Rope(10000.0), 64)
    config = parse_config(LLAMA | {"rope_scaling": dynamic | {"original_max_position_embeddings": 16}})
    assert config.max_positions == 16


REFUSED = {
    "an array": ([], "must hold one JSON object"),
    "no model type": ({"hidden_size": 3}, "model_type None is not supported; this project runs 'llama' and 'gemma2'"),
    "mistral": (LLAMA | {"model_type": "mistral"}, "model_type 'mistral' is not supported"),
    "gptq": (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "is quantised: use the original one"),
    "yarn": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
    "a rope for each layer type": (
        GEMMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_scaling must be null or one object for all layers",
    ),
    "partial rotation": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    "crossed factors": (
        LLAMA | {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
        "high_freq_factor must be larger than low_freq_factor",
    ),
    "another activation": (LLAMA | {"hidden_act": "relu"}, "activation 'relu' is not supported; this"),
    "an odd head": (LLAMA | {"head_dim": 5}, "4 heads of size 5 with 4 key heads are not supported"),
    "groups that do not divide": (LLAMA | {"num_key_value_heads": 3}, "4 heads of size 4 with 3 key heads are not"),
    "a size that is a float": (LLAMA | {"hidden_size": 16.0}, "hidden_size must be a whole number from 1"),
    "no vocabulary": ({**LLAMA, "vocab_size": None}, "vocab_size must be a whole number .*, found None"),
    "tied to a string": (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    "too few layer types": (GEMMA | {"layer_types": ["full_attention"]}, "must name the kind of each of 4 layers"),
    "an unknown layer type": (GEMMA | {"layer_types": ["chunked"] * 4}, "layer type 'chunked' is not supported"),
}


@pytest.mark.parametrize(("raw", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_an_unsupported_config_is_refused_in_one_line_that_names_the_field(raw, message):
    with pytest.raises(InputError, match=message) as refusal:
        parse_config(raw)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([1]) | st.just({"a": {}})
FIELDS = sorted({*LLAMA, *GEMMA, *config_json(parse_config(LLAMA)), *config_json(parse_config(GEMMA))})


@both_families
@settings(max_examples=100, deadline=None, derandomize=True)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), junk, min_size=1, max_size=3))
def test_any_field_may_hold_anything_without_a_traceback(family, changes):
    raw = (LLAMA if family == "llama" else GEMMA) | changes
    try:
        assert isinstance(parse_config(raw), ModelConfig)
    except InputError as error:
        assert "\n" not in str(error)
