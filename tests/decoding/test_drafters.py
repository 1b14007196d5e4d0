"""Drafters draw from the distributions that they return, at the right positions, after any accepted
tokens.
"""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.drafters import CATCH_UP, ModelDrafter, PromptLookup
from decoding.policies import AdaptiveExit, FixedLength
from decoding.randomness import SeededRandomness
from decoding.sampling import SamplingParams, distribution
from decoding.text import Conditions
from model.decoder import Decoder
from model.plan import LayerPlan
from tests.configs import FAMILIES
from tests.laws import plans, prefilled, text_of, tiny_model

VOCAB = 7
PARAMS = SamplingParams(temperature=1.3)


def self_draft_rows(
    model: Decoder, plan: LayerPlan, tokens: list[int], drafted: list[int]
) -> Tensor:
    """Distributions of a self-draft: from a new target cache of the text, then under the plan,
    token by token.
    """
    cache = prefilled(model, tokens)
    text = torch.tensor(tokens + drafted)
    rows = [
        distribution(model(text[None, at : at + 1], cache, at, plan)[0], text[: at + 1], PARAMS)
        for at in range(len(tokens) - 1, len(text) - 1)
    ]
    return torch.cat(rows)


def draft_model_rows(model: Decoder, tokens: list[int], drafted: list[int]) -> Tensor:
    """Distributions of a draft model: from one pass over the whole text without a cache."""
    logits = model(torch.tensor([tokens + drafted]))[0, len(tokens) - 1 : -1]
    return distribution(logits, torch.tensor((tokens + drafted)[:-1]), PARAMS)


rounds_of_the_loop = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, VOCAB - 1), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


def check_drafts(
    drafter: ModelDrafter,
    tokens: list[int],
    rounds: list[tuple[int, int, int, int]],
    rows: Callable[[list[int], list[int]], Tensor],
    verify: Callable[[list[int], list[int]], object] = lambda tokens, drafted: None,
) -> None:
    """A draft of every round has the distributions ``rows(tokens, drafted)``. Then the target
    verifies it, accepts a part, adds a token, and the loop retracts some.
    """
    prompt, randomness = len(tokens), SeededRandomness(0)
    for limit, accepted, target_token, retracted in rounds:
        text = text_of(tokens, vocab=VOCAB)
        draft = drafter.propose(text, limit, PARAMS, FixedLength(4), randomness)
        drafted = draft.tokens.tolist()
        assert len(drafted) == limit
        if limit:
            torch.testing.assert_close(draft.probs, rows(tokens, drafted), rtol=0, atol=1e-12)
        verify(tokens, drafted)
        tokens = [*tokens, *drafted[:accepted], target_token]
        tokens = tokens[: max(prompt, len(tokens) - retracted)]
        drafter.rollback(len(tokens))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, derandomize=True, deadline=None)
@given(plan=plans(), rounds=rounds_of_the_loop)
@torch.inference_mode()
def test_a_self_draft_reads_the_targets_entries_at_the_right_positions(
    family: str, plan: LayerPlan, rounds: list[tuple[int, int, int, int]]
) -> None:
    """Under any plan, even without the first layer or any attention, and after any accepted or
    retracted tokens.
    """
    model, tokens = tiny_model(family, vocab=VOCAB), [1, 2, 3]
    cache = prefilled(model, tokens)

    def verify(tokens: list[int], drafted: list[int]) -> None:
        model(torch.tensor([[tokens[-1], *drafted]]), cache, len(tokens) - 1)

    rows = partial(self_draft_rows, model, plan)
    check_drafts(ModelDrafter(model, cache, plan), tokens, rounds, rows, verify)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, derandomize=True, deadline=None)
@given(rounds=rounds_of_the_loop, prompt=st.integers(1, CATCH_UP + 4))
@torch.inference_mode()
def test_a_draft_models_cache_has_no_hole_after_any_round(
    family: str, rounds: list[tuple[int, int, int, int]], prompt: int
) -> None:
    """Also after drafts accepted whole, rounds without a draft, and retracted tokens."""
    model, tokens = tiny_model(family, vocab=VOCAB), [at % VOCAB for at in range(prompt)]
    drafter = ModelDrafter(model, model.new_cache(model.max_positions))
    check_drafts(drafter, tokens, rounds, partial(draft_model_rows, model))


@torch.inference_mode()
def test_confidence_is_the_raw_softmax_probability_and_the_token_below_the_threshold_stays() -> (
    None
):
    model = tiny_model("llama", vocab=VOCAB)
    drafter = ModelDrafter(model, model.new_cache(20))
    text, params = text_of([1, 2], vocab=VOCAB), SamplingParams(0.0, repetition_penalty=3.0)
    probs = distribution(model(torch.tensor([[1, 2]]))[0, -1:], torch.tensor([1, 2]), params)
    raw = model(torch.tensor([[1, 2]]))[0, -1].softmax(-1)[probs.argmax()].item()
    for threshold, stops in ((1.0, True), (raw + 1e-6, True), (raw - 1e-6, False), (0.0, False)):
        draft = drafter.propose(text, 3, params, AdaptiveExit(threshold, 3), SeededRandomness(0))
        assert (len(draft.tokens) == 1) == stops and len(draft.probs) == len(draft.tokens)
        drafter.rollback(2)


@torch.inference_mode()
def test_on_a_cpu_a_draft_ends_with_its_end_of_text_token() -> None:
    """What follows it would be discarded."""
    model = tiny_model("llama", vocab=VOCAB)
    text = text_of([1, 2], Conditions(100, eos_ids=frozenset(range(VOCAB))), vocab=VOCAB)
    draft = ModelDrafter(model, model.new_cache(20)).propose(
        text, 4, SamplingParams(), FixedLength(4), SeededRandomness(0)
    )
    assert len(draft.tokens) == 1


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 0xD800, 0xFEFF, 65536]), min_size=1, max_size=30),
    limit=st.integers(0, 5),
    longest=st.integers(1, 4),
)
def test_prompt_lookup_continues_the_latest_occurrence_of_the_longest_ngram(
    tokens: list[int], limit: int, longest: int
) -> None:
    found = [
        (size, at + size)
        for size in range(1, min(longest, len(tokens) - 1) + 1)
        for at in range(len(tokens) - size)
        if tokens[at : at + size] == tokens[-size:]
    ]
    expected = tokens[max(found)[1] :][:limit] if found else []
    text = text_of(tokens, vocab=65537)
    rest = SamplingParams(), FixedLength(5), SeededRandomness(0)
    with patch.object(PromptLookup, "LONGEST_NGRAM", longest):
        draft = PromptLookup().propose(text, limit, *rest)
    assert draft.tokens.tolist() == expected and draft.probs.shape == (len(expected), 65537)
    assert draft.probs.sum().item() == len(expected)


@pytest.mark.parametrize(("copied", "quality"), [(1, 1), (2, 2), (3, 3), (7, 4), (15, 8), (40, 16)])
def test_the_quality_of_a_lookup_is_its_ngrams_length_rounded_down(
    copied: int, quality: int
) -> None:
    """Of long ones to a power of two, so that few kinds of drafts are learned."""
    words = [*range(100, 100 + copied)]
    text = text_of([*words, 1, 2, *words], vocab=200)
    assert PromptLookup().find(text, 2) == (quality, [1, 2])
    assert quality in PromptLookup.RATES
    # more tokens than there are characters
    assert PromptLookup().find(text_of([2**21, 1, 2**21], vocab=2**24), 2) == (0, [])
