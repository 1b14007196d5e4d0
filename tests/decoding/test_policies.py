"""Draft-length policies follow their formulas, and break-even follows its cost table."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.costs import CostTable, expected_tokens, predicted_speedup
from decoding.policies import AdaptiveExit, BreakEven, ConfidenceGate, FixedLength
from decoding.rounds import Round
from model import InputError

CHEAP = CostTable(0.0, (1.0, 1.0, 1.0, 1.1, 1.2))
DEAR = CostTable(0.9, (1.0, 1.3, 1.6, 1.9, 2.2))


def a_round(drafted: int, accepted: int, target_confidence: float | None = None) -> Round:
    return Round(5, [0] * drafted, accepted, [0] * (accepted + 1), target_confidence=target_confidence)


def test_fixed_length_drafts_the_same_every_round() -> None:
    policy = FixedLength(3)
    policy.observe(a_round(3, 0))
    assert policy.draft_length() == 3
    assert policy.keep_drafting(0.0)


def test_adaptive_exit_goes_on_exactly_while_confidence_reaches_the_threshold() -> None:
    policy = AdaptiveExit(0.6)
    assert [policy.keep_drafting(confidence) for confidence in (0.59, 0.6, 0.61)] == [False, True, True]


def test_adaptive_exit_follows_draft_and_verify_by_hand() -> None:
    """t' = t + ε while the smoothed rate m is below α; then t, or t - ε when the draft ended early."""
    policy = AdaptiveExit(0.8, 4, alpha=0.5, step=0.01, rate_memory=0.5, threshold_memory=0.9)
    policy.observe(a_round(4, 2))  # m = .25 < α: t' = .81
    assert policy.rate == pytest.approx(0.25)
    assert policy.threshold == pytest.approx(0.9 * 0.8 + 0.1 * 0.81)
    before = policy.threshold
    policy.observe(a_round(4, 4))  # m = .625, full draft: t' = t
    assert policy.rate == pytest.approx(0.625)
    assert policy.threshold == pytest.approx(before)
    policy.observe(a_round(2, 2))  # m = .8125, ended early: t' = t - ε
    assert policy.threshold == pytest.approx(before - 0.1 * 0.01)
    policy.observe(a_round(0, 0))  # a round without a draft teaches nothing
    assert policy.rate == pytest.approx(0.8125)
    assert policy.threshold == pytest.approx(before - 0.1 * 0.01)


def test_the_gate_closes_after_an_unsure_token_and_opens_after_a_sure_one() -> None:
    policy = ConfidenceGate(FixedLength(4), 0.5)
    assert policy.draft_length() == 4
    policy.observe(a_round(4, 1, target_confidence=0.49))
    assert policy.draft_length() == 0
    policy.observe(a_round(0, 0, target_confidence=0.5))
    assert policy.draft_length() == 4


def test_the_gate_passes_on_what_its_inner_policy_needs_and_learns() -> None:
    inner = AdaptiveExit(0.7)
    policy = ConfidenceGate(inner, 0.2)
    assert policy.reads_draft_confidence
    assert policy.reads_target_confidence
    assert not policy.keep_drafting(0.69)
    policy.observe(a_round(2, 1, target_confidence=0.9))
    assert inner.rate == 0.25


@given(alpha=st.floats(0, 0.999), length=st.integers(0, 12))
@settings(derandomize=True)
def test_expected_tokens_is_the_published_quotient(alpha: float, length: int) -> None:
    assert math.isclose(expected_tokens(alpha, length), (1 - alpha ** (length + 1)) / (1 - alpha), rel_tol=1e-9)
    assert expected_tokens(1.0, length) == length + 1


def test_predicted_speedup_is_tokens_over_cost() -> None:
    costs = CostTable(0.2, (1.0, 1.0, 1.5))
    assert predicted_speedup(0.5, 2, costs) == pytest.approx((1 + 0.5 + 0.25) / (2 * 0.2 + 1.5))
    assert predicted_speedup(0.5, 0, costs) == 1


def test_break_even_takes_the_length_with_the_largest_predicted_speedup() -> None:
    for costs in (CHEAP, DEAR):
        for accepted in range(5):
            policy = BreakEven(costs)
            for _ in range(30):
                policy.observe(a_round(4, accepted))
            speedups = [predicted_speedup(policy.acceptance, length, costs) for length in range(5)]
            assert speedups[policy.best_length()] == max(speedups)


def test_break_even_drafts_long_when_drafts_are_cheap_and_kept() -> None:
    policy = BreakEven(CHEAP)
    for _ in range(20):
        policy.observe(a_round(4, 4))
    assert policy.draft_length() == 4


def test_break_even_switches_off_a_losing_draft_and_probes_ever_more_rarely() -> None:
    policy = BreakEven(DEAR, first_pause=4, longest_pause=16)
    drafted = []
    for _ in range(400):
        length = policy.draft_length()
        drafted.append(length)
        policy.observe(a_round(length, 0))
    probes = [at for at, length in enumerate(drafted) if length]
    assert max(drafted[probes[1] :]) == 1, "a probe is one token"
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert gaps[-1] == 17, "the pause ends at its longest"
    assert sum(length > 0 for length in drafted) / len(drafted) < 0.1


def test_break_even_comes_back_when_drafts_become_good() -> None:
    costs = CostTable(0.1, (1.0, 1.05, 1.1, 1.15, 1.2))
    policy = BreakEven(costs, first_pause=4, longest_pause=16)
    for _ in range(200):
        policy.observe(a_round(policy.draft_length(), 0))
    assert policy.best_length() == 0
    rounds = 0
    while policy.best_length() == 0 and rounds < 200:
        length = policy.draft_length()
        policy.observe(a_round(length, length))
        rounds += 1
    assert rounds < 60


def test_break_even_loses_next_to_nothing_on_a_hopeless_draft() -> None:
    """Cost in plain steps a token over 1000 tokens, every draft rejected: the law behind --draft auto."""
    policy = BreakEven(DEAR)
    cost = 0.0
    for _ in range(1000):
        length = policy.draft_length()
        cost += length * DEAR.draft + DEAR.verify[length]
        policy.observe(a_round(length, 0))
    assert cost / 1000 < 1.03


def test_break_even_never_drafts_longer_than_was_measured() -> None:
    assert BreakEven(CostTable(0.0, (1.0, 1.0, 1.0)), longest=8).gamma == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedLength(-1),
        lambda: AdaptiveExit(1.1),
        lambda: AdaptiveExit(math.nan),
        lambda: ConfidenceGate(FixedLength(1), -0.1),
        lambda: ConfidenceGate(FixedLength(1), math.nan),
    ],
)
def test_a_policy_value_outside_its_range_is_refused(make: object) -> None:
    with pytest.raises(InputError):
        make()
