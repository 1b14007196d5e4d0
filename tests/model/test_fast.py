"""The speed room changes how fast a model runs, and its numbers by rounding only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import Decoder, LayerPlan, build, layers, parse_config
from model.fast import accelerate
from model.fast.parts import PackedLinear, can_pack
from tests.configs import small
from tests.laws import plans, tiny_model
from tests.oracle import randomise

FAMILIES = ["llama", "gemma2"]
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


def biased_model() -> Decoder:
    """A Llama with every bias and an untied head."""
    raw = {
        "model_type": "llama",
        "vocab_size": 19,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "max_position_embeddings": 64,
    }
    model = build(parse_config(raw)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return model.requires_grad_(False).eval()


MODELS = {
    "llama": lambda: tiny_model("llama", vocab=19),
    "gemma2": lambda: tiny_model("gemma2", vocab=19),
    "biased llama": biased_model,
}


@pytest.mark.parametrize("dtype", list(RELATIVE), ids=str)
@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=15, derandomize=True, deadline=None)
@given(plan=plans(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
@torch.inference_mode()
def test_a_prepared_model_gives_the_readable_models_logits(
    name: str, dtype: torch.dtype, plan: LayerPlan, lengths: list[int], seed: int
) -> None:
    """Any plan, any chunks through the cache, biases, tied and untied heads."""
    readable = MODELS[name]().to(dtype)
    fast = accelerate(copy.deepcopy(readable))
    text = torch.randint(19, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    caches = readable.new_cache(64), fast.new_cache(64)
    start = 0
    for length in lengths:
        chunk = text[:, start : start + length]
        expected, got = readable(chunk, caches[0], start, plan), fast(chunk, caches[1], start, plan)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=RELATIVE[dtype] * expected.abs().max().item())
        start += length


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(length=st.integers(18, 63), chunk=st.sampled_from([18, 25, 40, 63]), rows=st.sampled_from([3, 16, 128]))
@torch.inference_mode()
def test_a_long_prompt_leaves_the_entries_of_one_pass_however_it_is_divided(
    family: str, length: int, chunk: int, rows: int
) -> None:
    """In chunks, prepared or not, however many tokens attend at a time; the chunks of 18 and more need no mask."""
    readable = tiny_model(family, vocab=19)
    fast = accelerate(copy.deepcopy(readable))
    text = torch.randint(19, (2, length), generator=torch.Generator().manual_seed(length))
    expected = readable.new_cache(64, 2)
    readable(text, expected)
    with patch("model.decoder.PREFILL_CHUNK", chunk), patch.object(layers.sight, "__defaults__", (rows,)):
        for model in (readable, fast):
            cache = model.new_cache(64, 2)
            model.prefill(text, cache)
            for found, right in zip([*cache.keys, *cache.values], [*expected.keys, *expected.values], strict=True):
                torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operator makes."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        made = function(*given, **(named or {}))
        sizes = [each.numel() for each in (made if isinstance(made, tuple) else (made,)) if isinstance(each, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return made


@pytest.mark.parametrize("prepare", [lambda model: model, accelerate], ids=["readable", "prepared"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_prompt_makes_no_tensor_of_all_its_scores(family: str, prepare: Callable[[Decoder], Decoder]) -> None:
    """Neither a mask nor scores of every token by every key: a few rows of them at a time."""
    count = 1024
    raw = small(family, max_position_embeddings=count, vocab_size=19)
    model = build(parse_config(raw)).requires_grad_(False).eval()
    randomise(model, 0)
    model = prepare(model)
    cache = model.new_cache(count)
    with Largest() as largest:
        model.prefill(torch.zeros(1, count, dtype=torch.int64), cache)
    assert largest.numbers <= 2 * layers.QUERIES * count  # two query heads share a key head


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_prepared_model_runs_batches(family: str) -> None:
    readable = tiny_model(family, vocab=19).float()
    fast = accelerate(copy.deepcopy(readable))
    text = torch.randint(19, (3, 7), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fast(text), readable(text), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_packed_is_multiplied_as_it_is() -> None:
    """float64 has no oneDNN kernel: the product is F.linear's, to the last bit."""
    weight, x = torch.randn(6, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    layer = PackedLinear([weight[:2], weight[2:]])
    assert not can_pack(weight.device, weight.dtype)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("family", FAMILIES)
def test_preparing_keeps_no_second_copy_of_the_weights_but_the_tied_embedding(family: str) -> None:
    model = tiny_model(family, vocab=19).float()
    embedding = model.embed_tokens.weight.nbytes
    before = sum(parameter.nbytes for parameter in model.parameters())
    accelerate(model)
    parts = [part for block in model.layers for part in (block.self_attn, block.mlp)] + [model]
    packed = [each.weight.nbytes for part in parts for each in vars(part).values() if isinstance(each, PackedLinear)]
    assert len(packed) == 4 * model.num_layers + 1
    kept = sum(parameter.nbytes for parameter in model.parameters())
    assert kept + sum(packed) <= before + embedding
