"""``transformers`` as the oracle: the same random weights in both, and configs to compare them on.

transformers computes norms, rotary angles and softmax in float32 for any dtype of the model. Within
``lifted()`` those casts go to float64, so that a float64 model is exact to float64 rounding.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate, compress, repeat
from typing import Any
from unittest import mock

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import modeling_rope_utils

from model.config import parse_config
from model.decoder import Decoder
from model.families import build
from model.plan import LayerPlan
from tests.configs import FAMILIES
from tests.laws import randomise

transformers.logging.set_verbosity_error()

CONTEXT = 48  # max_position_embeddings of every generated config
VOCAB = 23
ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")
YARN: list[dict[str, Any]] = [
    {},
    {"attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 2.0},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
]


class _LiftedTorch:
    """The torch module in which float32 means float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def lifted() -> Iterator[None]:
    """Within, transformers' models cast to float64 where they would cast to float32."""
    classes = [getattr(transformers, name) for name in FAMILIES.values()]
    with ExitStack() as patches:
        for module in (modeling_rope_utils, *(sys.modules[each.__module__] for each in classes)):
            patches.enter_context(mock.patch.object(module, "torch", _LiftedTorch()))
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
        model = build(parse_config(oracle.raw))
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
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "pad_token_id": None,
    }
    raw |= draw(ropes(family))
    if family.startswith(("gemma", "qwen3", "ministral")) or draw(st.booleans()):
        raw["head_dim"] = draw(st.sampled_from([head_dim, 4, 10]))
    if family == "llama":
        return raw | {"mlp_bias": draw(st.booleans())}
    raw["sliding_window"] = draw(st.integers(1, 9))
    if family.startswith("qwen"):
        raw["use_sliding_window"] = draw(st.booleans())
        raw["max_window_layers"] = draw(st.integers(0, layers))
    if family.startswith("gemma"):
        raw["query_pre_attn_scalar"] = draw(st.sampled_from([raw["head_dim"], 1, 7, 144]))
        raw["attn_logit_softcapping"] = draw(st.sampled_from([None, 0.5, 5.0, 50.0]))
        raw["final_logit_softcapping"] = draw(st.sampled_from([None, 1.0, 30.0]))
    if family == "gemma3_text":
        raw["sliding_window_pattern"] = draw(st.integers(1, 3))
    # with layer_types a Mistral is a Ministral
    if family != "mistral" and raw.get("use_sliding_window", True) and draw(st.booleans()):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        raw["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    elif family == "mistral" and draw(st.booleans()):
        raw["sliding_window"] = None
    return raw


@st.composite
def ropes(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """The rotary part of a config.json: every type that is served, in both layouts."""
    theta = draw(st.sampled_from([100.0, 10000.0, 500000.0]))
    rope: dict[str, Any] = {"rope_type": draw(st.sampled_from(ROPE_KINDS))}
    if rope["rope_type"] != "default":
        rope["factor"] = draw(st.sampled_from([1.0, 2.0, 8.0]))
    if rope["rope_type"] == "llama3":
        low = draw(st.sampled_from([0.5, 1.0]))
        rope |= {
            "low_freq_factor": low,
            "high_freq_factor": low * draw(st.sampled_from([2.0, 4.0])),
        }
    if rope["rope_type"] == "yarn":
        rope |= draw(st.sampled_from(YARN))
    if rope["rope_type"] in ("llama3", "yarn"):
        # short: all three branches occur
        rope["original_max_position_embeddings"] = draw(st.sampled_from([8, 32]))
    layout = draw(st.sampled_from([4, 5]))
    local = draw(st.sampled_from([10.0, 10000.0]))  # of Gemma-3's layers with a window
    if layout == 5 and family == "gemma3_text":
        return {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
                "full_attention": {"rope_theta": theta, **rope},
            }
        }
    if layout == 5:
        return {"rope_parameters": {"rope_theta": theta, **rope}}
    fields = {"rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    return fields | ({"rope_local_base_freq": local} if family == "gemma3_text" else {})


def in_chunks(
    model: Decoder, tokens: Tensor, sizes: int | list[int], plan: LayerPlan | None = None
) -> Tensor:
    """Logits of the whole text, computed with a cache in chunks of these sizes."""
    cache = model.new_cache(tokens.shape[1], batch=tokens.shape[0])
    chunks = tokens.split(sizes, dim=1)
    starts = accumulate((chunk.shape[1] for chunk in chunks), initial=0)
    return torch.cat([model(*each, plan) for each in zip(chunks, repeat(cache), starts)], dim=1)
