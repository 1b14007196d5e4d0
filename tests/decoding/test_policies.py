"""Draft-length policies follow their formulas, and auto the costs of its drafts."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoding.auto import MOST_DRAFTED, Auto, Costs, Estimates, measured_costs
from decoding.drafters import Draft, PromptLookup, draft_of
from decoding.policies import AdaptiveExit, ConfidenceGate, Policy
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.text import Text
from model.decoder import Decoder
from model.plan import LayerPlan
from tests.calls import recorded
from tests.laws import prefilled, text_of, tiny_model


def a_round(drafted: int, accepted: int, target_confidence: float | None = None) -> Round:
    return Round(
        5, [0] * drafted, accepted, [0] * (accepted + 1), target_confidence=target_confidence
    )


def test_adaptive_exit_follows_draft_and_verify_by_hand() -> None:
    """t' = t + ε while the smoothed rate m is below α; then t, or t - ε when the draft ended
    early; and t ← .9 t + .1 t'.
    """
    policy = AdaptiveExit(0.8, 4)
    policy.ALPHA = 0.5
    for drafted, accepted, rate, threshold in (
        (4, 2, 0.25, 0.9 * 0.8 + 0.1 * 0.81),  # m < α: t' = .81
        (4, 4, 0.625, 0.801),  # a full draft: t' = t
        (2, 2, 0.8125, 0.801 - 0.1 * 0.01),  # ended early: t' = t - ε
        (0, 0, 0.8125, 0.8),  # a round without a draft changes nothing
    ):
        below, at = policy.threshold - 0.01, policy.threshold
        assert [*map(policy.keep_drafting, (below, at))] == [False, True]
        policy.observe(a_round(drafted, accepted))
        assert (policy.rate, policy.threshold) == pytest.approx((rate, threshold))


def test_the_gate_closes_after_an_unsure_token_and_else_is_its_inner_policy() -> None:
    inner = AdaptiveExit(0.7, 4)
    policy = ConfidenceGate(inner, 0.5)
    assert policy.reads_draft_confidence and policy.reads_target_confidence
    for confidence, length, rate in ((None, 4, 0.25), (0.49, 0, 0.375), (0.5, 4, 0.4375)):
        assert not policy.keep_drafting(0.69)
        policy.observe(a_round(2, 1, target_confidence=confidence))
        assert (policy.draft_length(), inner.rate) == (length, rate)
    for name in {"gamma", *vars(Policy)} - vars(ConfidenceGate).keys():
        assert name.startswith("_") or getattr(policy, name) == getattr(inner, name), "forwarded"


# --draft auto


class Always:
    """A model that drafts zeros up to the limit, each of the confidence ``confidence``."""

    confidence = 0.75

    def propose(self, text: Text, limit: int, params: object, policy: Any, *_: object) -> Draft:
        drafted = [0]
        while len(drafted) < limit and policy.keep_drafting(self.confidence):
            drafted.append(0)
        return draft_of(text, drafted)


def auto(step: float, row: float = 0.05, credit: float = math.inf, **more: Any) -> Auto:
    """The choice between a model and a lookup, at these costs in plain steps."""
    costs = Costs({"model": step}, row)
    return Auto(
        {"model": Always(), "lookup": PromptLookup()},
        lambda length: costs,
        Estimates(credit=credit),
        **more,
    )


def round_of(policy: Auto, accepts: int, tokens: Sequence[int] = (1, 2, 3)) -> int:
    """Length of the draft of the next round of a text, with this number accepted at most."""
    draft = policy.propose(text_of([*tokens]), MOST_DRAFTED, SamplingParams(), policy, None)
    length = len(draft.tokens)
    policy.observe(a_round(length, min(length, accepts)))
    return length


confidences = st.floats(0, 1) | st.just(math.nan)  # of a draft's non-finite logits


@given(
    step=st.floats(0.02, 2),
    row=st.floats(0.01, 0.5),
    rounds=st.lists(st.tuples(st.integers(0, 8), confidences), max_size=300),
)
@example(step=0.45, row=0.03, rounds=[(0, 0.75)] * 64)
@settings(derandomize=True, deadline=None)
def test_auto_never_costs_noticeably_more_than_plain_decoding(
    step: float, row: float, rounds: list[tuple[int, float]]
) -> None:
    """For any costs, and any change of acceptance along the text: from 64 tokens on it has at
    least .97 of plain decoding's speed.
    """
    policy = auto(step, row, Estimates.credit)
    spent = tokens = 0.0
    for accepts, confidence in rounds:
        policy.drafters["model"].confidence = confidence
        length = round_of(policy, accepts)
        spent += 1 + length * (step + row)
        tokens += 1 + min(length, accepts)
    assert 0.97 * spent <= max(64, tokens)


@pytest.mark.parametrize("by_confidence", [True, False])
@pytest.mark.parametrize("cost", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
def test_auto_takes_the_best_length_where_confidence_says_nothing(
    rate: float, cost: float, by_confidence: bool
) -> None:
    """A draft ends where another token is expected to bring less than its cost is worth."""
    speedups = [
        sum(rate**kept for kept in range(length + 1)) / (1 + length * cost)
        for length in range(MOST_DRAFTED + 1)
    ]
    policy = auto(cost, 0.0, by_confidence=by_confidence, priors={"model": rate})
    policy.rates_of("model").PRIOR_WEIGHT = 1e9
    assert round_of(policy, 0) == speedups.index(max(speedups))


def test_drafts_stop_where_their_rounds_take_longer_than_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock, and though most drafts are accepted; in time they are tried again."""
    now = 0.0
    monkeypatch.setattr("decoding.auto.perf_counter", lambda: now)
    drafted = []
    for of_round in (0.0, 0.8):
        costs = Costs({"model": 0.3}, 0.05, timed=True, plain_seconds=deque([1.0]))
        policy = Auto({"model": Always()}, lambda length, costs=costs: costs)
        drafted.append(0)
        for number in range(100):
            policy.estimates.credit = math.inf
            draft = policy.propose(text_of([1, 2]), 1, SamplingParams(), policy, None)
            length = len(draft.tokens)
            now += 1 + length * (of_round + 0.35)
            policy.observe(a_round(length, length * (number % 4 > 0)))
            drafted[-1] += length
    assert drafted[0] == 100 and 1 < drafted[1] < 20


def test_a_round_that_costs_more_than_the_credit_is_not_made_where_its_rows_are_free() -> None:
    costs = Costs({}, 0.0, timed=True, overheads={"lookup": 0.75})
    policy = Auto({"lookup": PromptLookup()}, lambda length: costs, Estimates(credit=0.04))
    assert round_of(policy, 0, [1, 2, 3, 1, 2, 3]) == 0
    assert round_of(policy, 0, [1, 2, 3]) == 0, "nothing is offered"


def test_the_longest_draft_may_be_none() -> None:
    assert [auto(0.05, longest=longest).draft_length() for longest in (0, 3, None)] == [0, 3, 7]


def test_a_round_whose_draft_was_not_asked_for_is_not_timed() -> None:
    """As where several texts share steps."""
    costs = Costs({"model": 0.3}, 0.05, timed=True)
    policy = Auto({"model": Always()}, lambda length: costs, Estimates(credit=0.0))
    round_of(policy, 0)
    policy.observe(a_round(0, 0))
    assert len(costs.plain_seconds) == 1


def test_a_draft_goes_on_behind_sure_tokens_and_ends_behind_an_unsure_one() -> None:
    """Tokens of a confidence of .9 were accepted, and those of .3 rejected, twenty times."""
    lengths = []
    for sure in (0.9, 0.3):
        policy = auto(0.25)
        policy.drafters["model"].confidence = sure
        for confidence in (0.9, 0.3) * 20:
            policy.rates_of("model").learn([confidence], int(confidence > 0.5))
        lengths.append(round_of(policy, 0))
    assert lengths[0] > 1 == lengths[1]


def test_auto_learns_of_a_lookup_that_was_not_taken() -> None:
    """Its tokens are compared with the text afterwards."""
    policy = auto(5.0, 0.2, priors={"lookup 1": 0.1})
    for _ in range(30):
        policy.estimates.credit = 0.0
        assert round_of(policy, 0, [4, 0, 0, 0, 4]) == 0
    assert policy.rates_of("lookup 1").mean() > 0.5


def test_the_draft_of_the_largest_expected_speedup_is_taken_and_the_other_tried_again() -> None:
    costs = Costs({"plan": 0.1, "low bits": 0.1}, 0.05)
    priors = {"plan": 0.8, "low bits": 0.9}
    policy = Auto({"plan": Always(), "low bits": Always()}, lambda length: costs, priors=priors)
    names = []
    for number in range(80):
        policy.estimates.credit = math.inf
        length = len(policy.propose(text_of([1, 2]), 7, SamplingParams(), policy, None).tokens)
        names.append(policy.choice.taken.name)
        policy.observe(a_round(length, 0 if number < 5 else length))
    assert names[0] == "low bits"
    assert "plan" in names[:6], "it is tried where the other one fails"
    rate = policy.rates_of("low bits").mean()
    assert rate == pytest.approx(0.9, abs=0.02), "bad luck at the start is forgotten"


def test_a_round_that_another_drafter_drafted_teaches_nothing_and_counts_its_rows() -> None:
    """As where a grammar forces tokens."""
    policy = auto(0.2, 0.1, credit=1.0)
    policy.observe(a_round(4, 4))
    assert policy.estimates.rates_by_kind == {}
    assert policy.estimates.credit == pytest.approx(1 + 5 * 1.02 - 1.4)


@torch.inference_mode()
def test_measuring_costs_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each draft step follows one of the target, as in a round."""
    model = tiny_model("llama")
    asked = recorded(monkeypatch, Decoder, "forward", lambda *given: given[4])
    cache = prefilled(model, [1, 2, 3], 64)
    keys = [layer[:, :, :2].clone() for layer in cache.keys]
    plans = {f"exit {layer}": LayerPlan.early_exit(3, layer) for layer in (1, 2)}
    costs = measured_costs(model, cache, plans)
    assert cache.lengths == [2, 2, 2] and costs.row_cost >= 0 and min(costs.step_costs.values()) > 0
    assert not any(before and plan for before, plan in pairwise(asked))
    assert all(torch.equal(a, b[:, :, :2]) for a, b in zip(keys, cache.keys, strict=True))
