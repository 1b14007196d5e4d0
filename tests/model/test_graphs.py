"""The static step that CUDA graphs replay computes what the ordinary one does, and is given up where it does not."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.drafters import ModelDrafter
from decoding.policies import FixedLength
from decoding.randomness import SeededRandomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from model import Decoder, LayerPlan
from model.fast.graphs import GraphedDecoder, StaticStep
from tests.laws import plans, tiny_model

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAMILIES = ["llama", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    steps=st.lists(st.tuples(plans(), st.integers(1, 5)), min_size=1, max_size=6),
    prompt=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_static_steps_give_the_ordinary_logits_at_any_position_and_plan(
    family: str, steps: list[tuple[LayerPlan, int]], prompt: int, seed: int
) -> None:
    """Each step is taken twice, since the first of its kind is ordinary; rejected entries lie beyond the length."""
    ordinary = tiny_model(family, vocab=19)
    static = GraphedDecoder(ordinary)
    generator = torch.Generator().manual_seed(seed)
    caches = ordinary.new_cache(64), static.new_cache(64)
    text = torch.randint(19, (1, prompt), generator=generator)
    expected, got = ordinary(text, caches[0]), static(text, caches[1])
    for plan, count in steps:
        tokens = torch.randint(19, (1, count), generator=generator)
        for _ in range(2):
            expected, got = ordinary(tokens, caches[0], prompt, plan), static(tokens, caches[1], prompt, plan)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
            assert caches[0].lengths == caches[1].lengths
            for cache in caches:
                cache.truncate(prompt)
        full = torch.randint(19, (1, 1), generator=generator)  # every layer must have an entry to go on from
        ordinary(full, caches[0], prompt), static(full, caches[1], prompt)
        prompt += 1
    assert static.trouble is None and static.steps[caches[1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loop_writes_the_same_text_with_static_steps(family: str) -> None:
    """And really with them: plain steps, drafts and verifications, none of them given up."""
    ordinary = tiny_model(family, vocab=19)
    static, texts = GraphedDecoder(ordinary), []
    for model in (ordinary, static):
        cache = model.new_cache(64)
        with torch.inference_mode():
            model.prefill(torch.tensor([[1, 2, 3]]), cache)
        drafter = ModelDrafter(model, cache, LayerPlan.early_exit(model.num_layers, 1))
        params, randomness = SamplingParams(temperature=0.9), SeededRandomness(5, model.device)
        text = Text([1, 2, 3, 4], Rules(40), model)
        rounds = speculate(model, cache, text, drafter, FixedLength(3), params, randomness)
        texts.append([token for round in rounds for token in round.emitted])
    assert texts[0] == texts[1]
    assert static.trouble is None
    kinds = {(plan, count) for plan, count, _ in static.steps[cache]}
    assert {(drafter.plan, 1), (LayerPlan.full(ordinary.num_layers), 4)} <= kinds


def test_a_static_step_that_computes_something_else_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", vocab=19)
    compute = StaticStep.compute
    monkeypatch.setattr(StaticStep, "compute", lambda step: compute(step).flip(-1))
    check_gives_up(model, "away from the ordinary step's")


def test_a_static_step_that_gives_nan_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", vocab=19)
    compute = StaticStep.compute
    monkeypatch.setattr(StaticStep, "compute", lambda step: compute(step) * math.nan)
    check_gives_up(model, "away from the ordinary step's")


def test_a_static_step_that_wrote_to_wrong_places_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StaticStep.compute

    def misplaced(step: StaticStep) -> torch.Tensor:
        step.start -= 1
        return compute(step)

    model = tiny_model("llama", vocab=19)
    static, first = GraphedDecoder(model), torch.tensor([[3, 4, 5]])
    caches = model.new_cache(16), static.new_cache(16)
    with torch.inference_mode():
        model.prefill(first, caches[0]), static.prefill(first, caches[1])
        monkeypatch.setattr(StaticStep, "compute", misplaced)
        for start in range(3, 7):
            tokens = torch.tensor([[start]])
            assert torch.equal(static(tokens, caches[1], start), model(tokens, caches[0], start))
    assert static.trouble is not None


def test_where_capturing_fails_decoding_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: StaticStep) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StaticStep, "compute", fails)
    check_gives_up(tiny_model("llama", vocab=19), "not permitted")


@torch.inference_mode()
def check_gives_up(model: Decoder, reason: str) -> None:
    static = GraphedDecoder(model)
    caches = model.new_cache(16), static.new_cache(16)
    for start in range(3):
        tokens = torch.tensor([[start]])
        assert torch.equal(static(tokens, caches[1], start), model(tokens, caches[0], start))
    assert static.trouble is not None and reason in static.trouble


@torch.inference_mode()
def test_a_static_step_leaves_no_hole_and_does_not_outgrow_the_cache() -> None:
    static = GraphedDecoder(tiny_model("llama", vocab=19))
    cache, token = static.new_cache(8), torch.tensor([[1]])
    for start in range(3):
        static(token, cache, start)
    with pytest.raises(ValueError, match="leaves a hole"):
        static(token, cache, 5)
    with pytest.raises(ValueError, match="outside the cache"):
        static(torch.tensor([[1] * 6]), cache, 3)


@torch.inference_mode()
def test_static_steps_do_not_keep_a_cache_alive() -> None:
    static = GraphedDecoder(tiny_model("llama", vocab=19))
    cache = static.new_cache(8)
    for start in range(3):
        static(torch.tensor([[1]]), cache, start)
    assert len(static.steps) == 1
    del cache
    gc.collect()
    assert len(static.steps) == 0


@CUDA
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_captured_steps_give_the_ordinary_logits(family: str) -> None:
    ordinary = tiny_model(family, vocab=19).float().cuda()
    static = GraphedDecoder(ordinary)
    caches = ordinary.new_cache(64), static.new_cache(64)
    for start in range(40):
        tokens = torch.tensor([[start % 19]], device="cuda")
        expected, got = ordinary(tokens, caches[0], start), static(tokens, caches[1], start)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert static.trouble is None
