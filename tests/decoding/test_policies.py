"""Draft-length policies follow their formulas, and break-even follows its cost table."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Offer, Past
from decoding.rounds import Round
from decoding.run.break_even import BreakEven
from decoding.run.costs import CostTable, expected_tokens, predicted_speedup

CHEAP = CostTable(0.0, (1.0, 1.0, 1.0, 1.1, 1.2))
DEAR = CostTable(0.9, (1.0, 1.3, 1.6, 1.9, 2.2))


def a_round(drafted: int, accepted: int, target_confidence: float | None = None) -> Round:
    return Round(5, [0] * drafted, accepted, [0] * (accepted + 1), target_confidence=target_confidence)


def test_adaptive_exit_goes_on_exactly_while_confidence_reaches_the_threshold() -> None:
    policy = AdaptiveExit(0.6)
    assert [policy.keep_drafting(confidence) for confidence in (0.59, 0.6, 0.61)] == [False, True, True]


def test_adaptive_exit_follows_draft_and_verify_by_hand() -> None:
    """t' = t + ε while the smoothed rate m is below α; then t, or t - ε when the draft ended early."""
    policy = AdaptiveExit(0.8, 4)
    policy.ALPHA = 0.5
    policy.observe(a_round(4, 2))  # m = .25 < α: t' = .81
    assert policy.rate == pytest.approx(0.25)
    assert policy.threshold == pytest.approx(0.9 * 0.8 + 0.1 * 0.81)
    before = policy.threshold
    policy.observe(a_round(4, 4))  # m = .625, full draft: t' = t
    assert policy.rate == pytest.approx(0.625)
    assert policy.threshold == pytest.approx(before)
    policy.observe(a_round(2, 2))  # m = .8125, ended early: t' = t - ε
    assert policy.threshold == pytest.approx(before - 0.1 * 0.01)
    policy.observe(a_round(0, 0))  # a round without a draft changes nothing
    assert policy.rate == pytest.approx(0.8125)
    assert policy.threshold == pytest.approx(before - 0.1 * 0.01)


def test_the_gate_closes_after_a_token_of_low_confidence_and_opens_after_one_of_high_confidence() -> None:
    policy = ConfidenceGate(FixedLength(4), 0.5)
    assert policy.draft_length() == 4
    policy.observe(a_round(4, 1, target_confidence=0.49))
    assert policy.draft_length() == 0
    policy.observe(a_round(0, 0, target_confidence=0.5))
    assert policy.draft_length() == 4


def test_the_gate_passes_confidences_and_rounds_to_its_inner_policy() -> None:
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
    assert predicted_speedup(0.5, 2, replace(costs, per_extra_token=0.1)) == pytest.approx(1.75 / (1.9 + 0.1 * 0.75))
    assert predicted_speedup(0.5, 0, costs) == 1


MODEL = Offer("model", "model")


def run(policy: BreakEven, costs: CostTable, accepted: Iterable[int]) -> tuple[list[int], float]:
    """Rounds with one offer, where the target accepts up to ``accepted`` tokens: drafted lengths, and their cost."""
    drafted, spent = [], 0.0
    for most in accepted:
        _, length = policy.choose([MODEL])
        spent += length * costs.draft + costs.verify[length]
        drafted.append(length)
        policy.observe(a_round(length, min(length, most)))
    return drafted, spent


TABLES = st.builds(
    lambda draft, steps: CostTable(draft, tuple(1 + sum(steps[:n]) for n in range(len(steps) + 1))),
    st.floats(0, 2),
    st.lists(st.floats(0, 0.5), min_size=1, max_size=8),
)


@given(costs=TABLES, accepted=st.lists(st.integers(0, 8), max_size=300))
@settings(derandomize=True, deadline=None)
def test_break_even_never_costs_noticeably_more_than_plain_decoding(costs: CostTable, accepted: list[int]) -> None:
    """For any costs, and any change of acceptance along the text."""
    drafted, spent = run(BreakEven({"model": costs}), costs, accepted)
    tokens = sum(min(length, most) + 1 for length, most in zip(drafted, accepted, strict=True))
    assert spent <= (1 + BreakEven.CREDIT_PER_TOKEN) * tokens + BreakEven.START_CREDIT + 1e-9


@given(costs=st.tuples(TABLES, TABLES), rounds=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=200))
@settings(derandomize=True, deadline=None)
def test_nor_does_it_with_several_offers(costs: tuple[CostTable, CostTable], rounds: list[tuple[int, int]]) -> None:
    tables = {"model": costs[0], "lookup": replace(costs[1], draft=0.0)}
    policy, spent, tokens = BreakEven(tables), 0.0, 0
    for most, found in rounds:
        taken, length = policy.choose([Offer("model", "model"), Offer("lookup", "lookup 2", [7] * found)])
        if taken:
            spent += length * tables[taken.name].draft + tables[taken.name].verify[length]
        else:
            spent += 1
        round = a_round(length, min(length, most))
        tokens += len(round.emitted)
        policy.observe(round)
    assert spent <= (1 + BreakEven.CREDIT_PER_TOKEN) * tokens + BreakEven.START_CREDIT + 1e-9


def test_break_even_follows_the_five_rounds_of_its_docstring() -> None:
    policy, offers, rows = BreakEven({"model": (costs := CostTable(0.5, (1.0, 1.1)))}, pause=2), [MODEL], []
    for number, accepted in enumerate([0, 0, 0, 1, 0], 1):
        rate, waiting = policy.acceptance("model"), policy.past.waiting
        _, drafted = policy.choose(offers)
        policy.observe(a_round(drafted, accepted))
        cost = drafted * costs.draft + costs.verify[drafted]
        rows.append(f"| {number} | {rate:.2f} | {predicted_speedup(rate, 1, costs):.3f} | {waiting} | {drafted} ")
        rows[-1] += f"| {accepted} | {cost} | {policy.credit:.2f} |"
    assert "\n    ".join(rows) in BreakEven.__doc__


def test_break_even_takes_the_length_with_the_largest_predicted_speedup() -> None:
    for costs in (CHEAP, DEAR):
        for accepted in range(5):
            policy = BreakEven({"model": costs})
            run(policy, costs, [accepted] * 60)
            policy.credit, policy.past.waiting = math.inf, 1
            speedups = [predicted_speedup(policy.acceptance("model"), length, costs) for length in range(5)]
            assert speedups[policy.choose([MODEL])[1]] == max(speedups)


def test_break_even_switches_off_a_losing_draft_and_tries_again_one_token_long() -> None:
    drafted, _ = run(BreakEven({"model": DEAR}), DEAR, [0] * 400)
    tries = [at for at, length in enumerate(drafted) if length]
    assert max(drafted[tries[1] :]) == 1
    assert min(later - earlier for earlier, later in pairwise(tries[1:])) > 16


def test_break_even_comes_back_when_drafts_become_good() -> None:
    costs = CostTable(0.1, (1.0, 1.05, 1.1, 1.15, 1.2))
    drafted, _ = run(BreakEven({"model": costs}), costs, [0] * 200 + [4] * 100)
    assert max(drafted[150:200]) <= 1 and drafted[-1] == 4


SHARED = CostTable(0.5, (1.0, 1.1, 1.2), (0.8, 0.9, 1.1, 2.0, 5.0, 9.0, 17.0), (0.4, 0.8, 2.0))


@given(texts=st.integers(1, 40))
def test_shared_costs_are_those_of_all_texts_in_plain_rounds_of_all(texts: int) -> None:
    table = SHARED.shared_by(texts)
    assert table.verify[0] == pytest.approx(1) and list(table.verify) == sorted(table.verify)
    if texts == 4:  # beside its call, a round costs .2 per text, and a draft step .1
        plain = 1.1 + 4 * 0.2
        assert table.draft == pytest.approx((0.8 + 4 * 0.1) / plain)
    if texts == 32:  # 64 rows and more are taken to cost in proportion
        plain = 9.0 + 32 * 0.2
        assert table.draft == pytest.approx((2.0 * 32 / 16 + 32 * 0.1) / plain)
        assert table.verify[1:] == pytest.approx([(17 + 6.4) / plain, (17 * 96 / 64 + 6.4) / plain])
    assert SHARED.shared_by(1) is SHARED
    assert CHEAP.shared_by(texts) is CHEAP, "steps that are not shared cost the same for every text"


def test_break_even_stops_drafting_where_many_texts_share_a_step() -> None:
    costs = CostTable(0.3, (1.0, 1.05, 1.1), (0.9, 0.95, 1.1, 2.0, 4.0, 8.0, 16.0), (0.3, 0.6, 2.4))
    policy = BreakEven({"model": costs})
    assert policy.choose([MODEL])[1] == 2
    policy.share(lambda: 16, Past(waiting=1))
    assert policy.choose([MODEL])[1] == 0
    gains = BreakEven({"model": CostTable(0.5, (1.0, 1.05))})  # 1.10: enough for one text, too little for two
    assert gains.choose([MODEL])[1] == 1
    assert (gains.share(lambda: 2, Past(waiting=1)), gains.choose([MODEL])[1]) == (None, 0)


def test_texts_that_share_steps_share_their_past_and_one_probes_for_all() -> None:
    past, losing = Past(), CostTable(1.0, (1.0, 1.5))
    one, other = policies = [BreakEven({"model": losing}, pause=3) for _ in range(2)]
    for policy in policies:
        policy.share(lambda: 2, past)
    drafted = []
    for _ in range(8):
        for policy in policies:
            drafted.append(policy.choose([MODEL])[1])
            policy.observe(a_round(drafted[-1], 0))
    assert drafted == [1, 0, 0, 0, 0, 0, 0] * 2 + [1, 0]
    assert one.acceptance("model") == other.acceptance("model") < BreakEven({"model": losing}).acceptance("model")


def test_break_even_learns_of_a_lookup_that_was_not_taken() -> None:
    """Its tokens are compared with the text afterwards."""
    policy = BreakEven({"lookup": CostTable(0.0, (1.0, 1.3, 1.4, 1.5, 1.6))}, priors={"lookup 1": 0.0})
    offer = Offer("lookup", "lookup 1", [5, 6, 7, 8])
    for _ in range(30):
        taken, length = policy.choose([offer])
        if length:
            break
        policy.observe(Round(0, [], 0, [5]))
    assert taken is offer and policy.acceptance("lookup 1") > 0.3
    before = policy.acceptance("lookup 1")
    policy.choose([Offer("lookup", "lookup 1", [])])
    policy.observe(Round(0, [], 0, [5]))
    assert policy.acceptance("lookup 1") == before, "nothing was judged"
    wrong = Offer("lookup", "lookup 3", [1, 1, 1, 1])
    for _ in range(30):
        policy.choose([wrong])
        policy.observe(Round(0, [], 0, [5]))
    assert policy.acceptance("lookup 3") < 0.1 and policy.choose([wrong])[1] == 0


def test_the_offer_of_the_largest_predicted_speedup_is_taken() -> None:
    policy = BreakEven({"plan": CHEAP, "low bits": CHEAP}, priors={"plan": 0.3, "low bits": 0.9})
    offers = [Offer("plan", "plan"), Offer("low bits", "low bits")]
    taken, length = policy.choose(offers)
    assert taken is offers[1]
    for _ in range(40):
        policy.observe(a_round(length, 0))
        policy.credit = math.inf
        taken, length = policy.choose(offers)
        if taken is offers[0]:
            return
    pytest.fail("the past acceptance of the other speaks for this one")


def test_break_even_never_drafts_longer_than_was_measured() -> None:
    assert BreakEven({"model": CostTable(0.0, (1.0, 1.0, 1.0))}, longest=8).gamma == 2
