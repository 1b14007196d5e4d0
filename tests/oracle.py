"""``transformers`` as the oracle: the same random weights in both, and configs to compare them on.

transformers computes norms, rotary angles and softmax in float32 for any dtype of the model. Within
``lifted()`` those casts go to float64, so that a float64 model is exact to float64 rounding.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, compress, repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import modeling_rope_utils

from model.config import parse_config
from model.decoder import Decoder
from model.plan import LayerPlan
from tests.configs import FAMILIES
from tests.laws import randomise

transformers.logging.set_verbosity_error()

VOCAB = 23
BOTH = True, False
FACTORS = 1.0, 2.0, 8.0
TRAINED = {"original_max_position_embeddings": (8, 32)}  # short: all branches occur
ROPES: list[dict[str, Sequence[Any]]] = [  # the values of the fields of each type
    {"rope_type": ["default"]},
    {"rope_type": ["dynamic"], "factor": FACTORS},
    {"rope_type": ["linear"], "factor": FACTORS},
    {
        "rope_type": ["llama3"],
        "factor": FACTORS,
        "low_freq_factor": [0.5, 1.0],
        "high_freq_factor": [2.0, 4.0],
        **TRAINED,
    },
    *(
        {"rope_type": ["yarn"], "factor": FACTORS, **TRAINED, **more}
        for more in (
            {},
            {"attention_factor": [1.5], "beta_fast": [4.0], "beta_slow": [2.0]},
            {"mscale": [1.0], "mscale_all_dim": [0.5]},
        )
    ),
]
WINDOW = {"sliding_window": range(1, 10)}
QWEN = {**WINDOW, "use_sliding_window": BOTH, "max_window_layers": range(4)}
GEMMA = {
    **WINDOW,
    "query_pre_attn_scalar": [1, 4, 7, 144],
    "attn_logit_softcapping": [None, 0.5, 5.0, 50.0],
    "final_logit_softcapping": [None, 1.0, 30.0],
}
VARIED: dict[str, dict[str, Sequence[Any]]] = {  # the fields of each family
    "llama": {"mlp_bias": BOTH},
    "mistral": {"sliding_window": [None, *range(1, 10)]},
    "ministral": WINDOW,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "sliding_window_pattern": [1, 2, 3]},
}


LIFTED_TORCH = SimpleNamespace(**vars(torch) | dict.fromkeys(("float", "float32"), torch.float64))


@contextmanager
def lifted() -> Iterator[None]:
    """Within, transformers' models cast to float64 where they would cast to float32."""
    classes = [getattr(transformers, name) for name in FAMILIES.values()]
    with ExitStack() as patches:
        for module in (modeling_rope_utils, *(sys.modules[each.__module__] for each in classes)):
            patches.enter_context(mock.patch.object(module, "torch", LIFTED_TORCH))
        patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def oracle_model(
    raw: dict[str, Any], dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Module:
    """transformers' model of a config.json, with random weights that all matter."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    oracle = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    )
    oracle.raw = raw
    randomise(oracle, seed)
    return oracle.requires_grad_(False).eval()


def our_model(oracle: nn.Module) -> Decoder:
    """This project's model of the oracle's config.json, with the oracle's tensors."""
    with torch.device("meta"):
        model = Decoder(parse_config(oracle.raw))
    state = {name.removeprefix("model."): tensor for name, tensor in oracle.state_dict().items()}
    if model.lm_head is None:
        del state["lm_head.weight"]
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def oracle_logits(oracle: nn.Module, tokens: Tensor) -> Tensor:
    """``[batch, T]`` ids -> ``[batch, T, vocab]``, in one pass without a cache."""
    return oracle(tokens, use_cache=False).logits


@contextmanager
def silenced(oracle: nn.Module, plan: LayerPlan) -> Iterator[None]:
    """Within, the sublayers that the plan skips add exactly zero to the oracle's residual stream.

    In Gemma-2 the norm after a sublayer is silenced, in Llama the sublayer itself.
    """
    with ExitStack() as hooks:
        for layer, *bits in zip(oracle.model.layers, plan.attention, plan.mlp, strict=True):
            last = [layer.self_attn.o_proj, layer.mlp]
            if hasattr(layer, "post_feedforward_layernorm"):
                last = [layer.post_attention_layernorm, layer.post_feedforward_layernorm]
            for module in compress(last, [not runs for runs in bits]):
                hooks.enter_context(
                    module.register_forward_hook(lambda _, inputs, output: 0 * output)
                )
        yield


def fields(values: dict[str, Sequence[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """One of the values of each field."""
    return st.fixed_dictionaries({name: st.sampled_from(each) for name, each in values.items()})


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A small config.json of the family, in the layout of transformers 4 or 5, over all that varies
    in it.
    """
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([4, 6, 8]))
    layers = draw(st.integers(1, 3))
    raw: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.integers(3, 20)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 48,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "pad_token_id": None,
        **draw(fields(VARIED[family])),
        **draw(ropes(family)),
    }
    if family.startswith(("gemma", "qwen3", "ministral")) or draw(st.booleans()):
        raw["head_dim"] = draw(st.sampled_from([head_dim, 4, 10]))
    # with layer_types a Mistral is a Ministral
    has_types = family not in ("llama", "mistral") and raw.get("use_sliding_window", True)
    if has_types and draw(st.booleans()):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        raw["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return raw


@st.composite
def ropes(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """The rotary part of a config.json: every type that is served, in both layouts."""
    theta = draw(st.sampled_from([100.0, 10000.0, 500000.0]))
    local = draw(st.sampled_from([10.0, 10000.0]))  # of Gemma-3's layers with a window
    rope = draw(st.one_of(*map(fields, ROPES)))
    if draw(st.booleans()):
        scaling = None if rope["rope_type"] == "default" else rope
        more = {"rope_local_base_freq": local} if family == "gemma3_text" else {}
        return {"rope_theta": theta, "rope_scaling": scaling, **more}
    whole = {"rope_theta": theta, **rope}
    if family == "gemma3_text":
        windowed = {"rope_type": "default", "rope_theta": local}
        whole = {"sliding_attention": windowed, "full_attention": whole}
    return {"rope_parameters": whole}


def in_chunks(
    model: Decoder, tokens: Tensor, sizes: int | list[int], plan: LayerPlan | None = None
) -> Tensor:
    """Logits of the whole text, computed with a cache in chunks of these sizes."""
    cache = model.new_cache(tokens.shape[1], batch=tokens.shape[0])
    chunks = tokens.split(sizes, dim=1)
    starts = accumulate((chunk.shape[1] for chunk in chunks), initial=0)
    return torch.cat([model(*each, plan) for each in zip(chunks, repeat(cache), starts)], dim=1)
