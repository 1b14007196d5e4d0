"""config.json: defaults, variants, and refusals with their messages."""

import re

import pytest
import torch

from model.config import FAMILIES, ROPE_FACTORS, Rope, parse_config
from model.layers import inverse_frequencies
from tests.configs import LLAMA3_ROPE
from tests.refusal import refusal

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
MIXED = {"layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window": 10}
CONTEXTS = {
    "llama": 2048,
    "mistral": 131072,
    "ministral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "gemma2": 8192,
    "gemma3_text": 131072,
}
assert CONTEXTS.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    ("raw", "published"),
    [
        (
            LLAMA,
            {
                "num_kv_heads": 4,
                "head_dim": 4,
                "attention_scale": 0.5,
                "tie_embeddings": False,
                "attention_bias": "",
                "mlp_bias": False,
                "ropes": (Rope(10000.0, "default", 64),) * 4,
                "windows": (None,) * 4,
            },
        ),
        (QWEN2, {"attention_bias": "qkv"}),
        (
            QWEN3,
            {
                "head_dim": 128,
                "attention_scale": 128**-0.5,
                "attention_bias": "",
            },
        ),
        (
            LLAMA | {"model_type": "gemma2"},
            {
                "head_dim": 256,
                "attention_scale": 256**-0.5,
                "tie_embeddings": True,
                "attention_soft_cap": 50.0,
                "final_soft_cap": 30.0,
                "windows": (4096, None, 4096, None),
            },
        ),
        (
            GEMMA3,
            {
                "head_dim": 256,
                "tie_embeddings": True,
                "attention_soft_cap": None,
                "final_soft_cap": None,
                "ropes": (Rope(1e4, "default", 64),) * 5
                + (Rope(1e6, "default", 64), Rope(1e4, "default", 64)),
            },
        ),
        (
            GEMMA | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping")),
            {"attention_soft_cap": None, "final_soft_cap": None},
        ),
        (
            QWEN2 | {"is_causal": None, "rope_theta": None},
            {"ropes": (Rope(1e4, "default", 64),) * 4},
        ),
        *(
            (
                LLAMA
                | {"rope_theta": 5e5, "original_max_position_embeddings": 32}
                | {
                    key: LLAMA3_ROPE
                    | {"rope_theta": None, "original_max_position_embeddings": None}
                },
                {"ropes": (Rope(5e5, "llama3", 32, 8.0, 1.0, 4.0),) * 4},
            )
            for key in ("rope_scaling", "rope_parameters")
        ),
        *(
            (
                LLAMA | {"model_type": family, "max_position_embeddings": None},
                {"max_positions": size},
            )
            for family, size in CONTEXTS.items()
        ),
    ],
    ids=["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "null caps", "nulls"]
    + ["nulls in rope_scaling", "nulls in rope_parameters"]
    + [f"the context of {family}" for family in CONTEXTS],
)
def test_absent_fields_have_the_published_values(raw, published):
    config = parse_config(raw)
    assert {name: getattr(config, name) for name in published} == published


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL, (4096,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL | MIXED, (None, 10, 10, None)),
        (MINISTRAL, (4096,) * 4),
        (MINISTRAL | MIXED, (None, 10, 10, None)),
        *(
            (qwen | {"sliding_window": 10, "max_window_layers": 1} | more, windows)
            for qwen in (QWEN2, QWEN3)
            for more, windows in (
                ({}, (None,) * 4),
                ({"use_sliding_window": True}, (None, 10, 10, 10)),
                ({"use_sliding_window": True, "max_window_layers": 0}, (10,) * 4),
                ({"use_sliding_window": True} | MIXED, (None, 10, 10, None)),
            )
        ),
        (GEMMA | MIXED, (None, 10, 10, None)),
        (GEMMA | {"layer_types": None}, (10, None, 10, None)),
        (GEMMA | {"sliding_window": None}, (None,) * 4),
        (GEMMA3, (10,) * 5 + (None, 10)),
        (GEMMA3 | {"sliding_window_pattern": 2}, (10, None) * 3 + (10,)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_windows_are_in_the_layers_of_each_family(raw, windows):
    assert parse_config(raw).windows == windows


@pytest.mark.parametrize(
    ("raw", "more"),
    [
        (LLAMA, {"hidden_act": "swish"}),
        (GEMMA, {"hidden_activation": "gelu_new"}),
        (MISTRAL, {"attention_bias": True, "mlp_bias": True, "query_pre_attn_scalar": 9}),
        (QWEN2, {"attention_bias": False, "attn_logit_softcapping": 9.0}),
        (LLAMA, {"sliding_window": 10, "final_logit_softcapping": 9.0}),
        (GEMMA3, {"attn_logit_softcapping": 50.0, "use_sliding_window": False}),
    ],
    ids=str,
)
def test_keys_that_a_family_does_not_read_and_other_names_of_activations_change_nothing(raw, more):
    assert parse_config(raw | more) == parse_config(raw)


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("scaling", "attention_factor", "context"),
    [
        # DeepSeek-R1-0528-Qwen3-8B; attention_factor alone, and with a factor
        (YARN | {"factor": 4.0}, 1.1386, 128),
        (YARN | {"factor": 64.0, "attention_factor": 1.0}, 1.0, 2048),
        (YARN | {"factor": None}, 1.0693, 64),
        (YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1280),
        (YARN | {"factor": 4.0, "beta_fast": 8, "beta_slow": 2}, 1.1386, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 1.0, 64),
    ],
    ids=str,
)
def test_scaling_has_the_attention_factor_and_the_context_of_transformers(
    scaling, attention_factor, context
):
    """In the context that the trained one is extended to by yarn."""
    config = parse_config(LLAMA | {"rope_parameters": scaling | {"rope_theta": 100.0}})
    assert config.ropes[0].attention_factor == pytest.approx(attention_factor, abs=1e-4)
    assert config.max_positions == context


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_a_scaling_that_is_added_to_rope_parameters_keeps_their_theta(name):
    """It replaces their type, under its older name too."""
    ropes = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {name: "linear", "factor": 4.0},
    }
    found = parse_config(LLAMA | ropes).ropes[0]
    assert (found.theta, found.kind, found.factor) == (5e5, "linear", 4.0)


REFUSED = [
    ([], "must hold one JSON object"),
    (
        {"hidden_size": 3},
        "model_type None is not supported; this project runs 'llama', 'mistral', ",
    ),
    (LLAMA | {"model_type": "gemma3"}, "'gemma3' is not supported; .* 'gemma3_text'$"),
    (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not"),
    (QWEN2 | {"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
    (
        GEMMA3 | {"rope_parameters": {"rope_type": "default"}},
        "layer type of rope_parameters 'rope_type' is not supported",
    ),
    (GEMMA3 | {"rope_scaling": [8]}, "rope_scaling must be null or one object, found"),
    (GEMMA3 | {"rope_local_base_freq": 0}, "rope_local_base_freq must be a number above 0"),
    (GEMMA3 | {"rope_theta": 0}, "rope_theta must be a number above 0"),
    (
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
        "truncate False is not supported",
    ),
    (
        LLAMA | {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
        "high_freq_factor must be above low_freq_factor",
    ),
    (
        LLAMA | {"quantization_config": {"quant_method": "gptq"}},
        "is quantised: use the original one",
    ),
    (
        GEMMA | {"rope_parameters": {FULL: {"rope_type": "default"}}},
        "must be one object for all layers",
    ),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    (LLAMA | {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; this"),
    (LLAMA | {"hidden_act": "relu", "hidden_activation": "silu"}, "hidden_act 'relu' is not"),
    (LLAMA | {"is_causal": False}, "is_causal False is not supported"),
    (LLAMA | {"head_dim": 5}, "4 heads of size 5 with 4 key heads are not supported"),
    (LLAMA | {"num_key_value_heads": 3}, "4 heads of size 4 with 3 key heads are not"),
    (LLAMA | {"hidden_size": 16.0}, "hidden_size must be a whole number from 1"),
    (
        LLAMA | {"num_hidden_layers": 2000},
        "num_hidden_layers must be a whole number from 1 to",
    ),
    (LLAMA | {"vocab_size": None}, "vocab_size must be a whole number .*, found None"),
    (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    (GEMMA | {"layer_types": [FULL]}, "must name the kind of each of 4 layers"),
    (GEMMA | {"layer_types": []}, "layer_types must name the kind"),
    (GEMMA | {"layer_types": 0}, "layer_types must name the kind of"),
    (GEMMA | {"layer_types": ["chunked"] * 4}, "layer type 'chunked' is not supported"),
]


def test_each_kind_of_rope_has_frequencies_of_its_own_or_is_refused():
    given = 64, torch.float32, torch.device("cpu")
    for kind in ROPE_FACTORS:
        rope = Rope(1e4, kind, 64, 2.0, 1.0, 4.0, 32.0, 1.0)
        assert inverse_frequencies(rope, *given).shape == (32,)
    with pytest.raises(ValueError, match="'longrope' has no frequencies"):
        inverse_frequencies(Rope(1e4, "longrope", 64), *given)


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_unsupported_config_is_refused_in_one_line_that_names_the_field(raw, message):
    said = refusal(parse_config, raw)
    assert re.search(message, said) and len(said) < 300
