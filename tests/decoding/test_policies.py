"""Draft-length policies follow their formulas, and break-even the times of its rounds."""

import math
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.break_even import BreakEven, Past, slope_of
from decoding.policies import AdaptiveExit, ConfidenceGate, Offer
from decoding.rounds import Round


def a_round(drafted: int, accepted: int, target_confidence: float | None = None) -> Round:
    return Round(
        5, [0] * drafted, accepted, [0] * (accepted + 1), target_confidence=target_confidence
    )


def test_adaptive_exit_goes_on_exactly_while_confidence_reaches_the_threshold() -> None:
    assert [*map(AdaptiveExit(0.6).keep_drafting, (0.59, 0.6, 0.61))] == [False, True, True]


def test_adaptive_exit_follows_draft_and_verify_by_hand() -> None:
    """t' = t + ε while the smoothed rate m is below α; then t, or t - ε when the draft ended
    early.
    """
    policy = AdaptiveExit(0.8, 4)
    policy.ALPHA = 0.5
    for drafted, accepted, rate, threshold in (
        (4, 2, 0.25, 0.9 * 0.8 + 0.1 * 0.81),  # m < α: t' = .81
        (4, 4, 0.625, 0.801),  # a full draft: t' = t
        (2, 2, 0.8125, 0.801 - 0.1 * 0.01),  # ended early: t' = t - ε
        (0, 0, 0.8125, 0.8),  # a round without a draft changes nothing
    ):
        policy.observe(a_round(drafted, accepted))
        assert (policy.rate, policy.threshold) == pytest.approx((rate, threshold))


def test_the_gate_closes_after_an_unsure_token_and_else_is_its_inner_policy() -> None:
    inner = AdaptiveExit(0.7, 4)
    policy = ConfidenceGate(inner, 0.5)
    assert policy.reads_draft_confidence and policy.reads_target_confidence
    assert not policy.keep_drafting(0.69)
    for confidence, length, rate in ((None, 4, 0.25), (0.49, 0, 0.375), (0.5, 4, 0.4375)):
        policy.observe(a_round(2, 1, target_confidence=confidence))
        assert (policy.draft_length(), inner.rate) == (length, rate)


MODEL = Offer("model", "model")
LOOKUP = Offer("lookup", "lookup 2", [0] * 4)


def length_of(policy: BreakEven, offers: Sequence[Offer] = (MODEL,), confidence: float = 1) -> int:
    """Length of the next draft; of a model whose tokens have this confidence."""
    taken, longest = policy.choose(offers)
    if not (taken.by_model and longest):
        return longest
    going_on = (n for n in range(taken.forced + 1, longest) if not policy.keep_drafting(confidence))
    return next(going_on, longest)


@pytest.mark.parametrize("offers", [1, 2], ids=["one offer", "two offers"])
@given(
    slopes=st.tuples(st.floats(0.02, 2), st.floats(0.02, 0.5)),
    rounds=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.floats(0, 1)), max_size=300),
)
@settings(derandomize=True, deadline=None)
def test_break_even_never_costs_noticeably_more_than_plain_decoding(
    offers: int, slopes: tuple[float, float], rounds: list[tuple[int, int, float]]
) -> None:
    """For any slopes, and any change of acceptance along the text."""
    by_name = dict(zip(("model", "known"), slopes, strict=True))
    policy = BreakEven(by_name)
    spent = tokens = 0.0
    for most, found, confidence in rounds:
        made = [MODEL, Offer("lookup", "lookup 2", [7] * found)][:offers]
        length = length_of(policy, made, confidence)
        spent += 1 + length * by_name[slope_of(policy.taken.offer)] if length else 1
        tokens += 1 + min(length, most)
        policy.observe(a_round(length, min(length, most)))
    assert spent <= (1 + BreakEven.SHARE) * tokens + Past.MOST_CREDIT + 1e-9


def test_break_even_follows_the_rounds_of_its_docstring() -> None:
    policy = BreakEven({"model": 0.65})
    rows = []
    for number, most in enumerate([1, 0, 0, 0], 1):
        rate = policy.rates_of(MODEL).mean()
        length = length_of(policy, confidence=0.75) if policy.draft_length() else 0
        policy.observe(a_round(length, min(length, most)))
        rows.append(
            f"| {number} | {rate:.2f} | {(1 + rate) / 1.65:.3f} | {length} | {min(length, most)} "
            f"| {1.05 + length * 0.65:.2f} | {policy.past.credit:.2f} |"
        )
    assert "\n    ".join(rows) in BreakEven.__doc__


def speedup(rate: float, slope: float, length: int) -> float:
    """Expected tokens of a round over its time, in plain rounds."""
    return sum(rate**kept for kept in range(length + 1)) / (1 + length * slope)


@pytest.mark.parametrize("slope", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
def test_break_even_takes_the_best_length_where_confidence_says_nothing(
    rate: float, slope: float
) -> None:
    """A draft ends where another token is expected to bring less than its time is worth."""
    speedups = [speedup(rate, slope, length) for length in range(9)]
    for by_confidence in (True, False):
        policy = BreakEven({"model": slope}, priors={"model": rate}, by_confidence=by_confidence)
        policy.past.credit = math.inf
        policy.rates_of(MODEL).PRIOR_WEIGHT = 1e9
        length = length_of(policy) if by_confidence else policy.choose([MODEL])[1]
        assert length == speedups.index(max(speedups))


def test_a_draft_goes_on_behind_sure_tokens_and_ends_behind_an_unsure_one() -> None:
    """Tokens of a confidence of .9 were accepted, and those of .3 rejected, twenty times."""
    policy = BreakEven({"model": 0.3})
    for confidence in (0.9, 0.3) * 20:
        policy.rates_of(MODEL).learn([confidence], int(confidence > 0.5), 1)
    assert length_of(policy, confidence=0.9) > 1 == length_of(policy, confidence=0.3)


def test_break_even_learns_of_a_lookup_that_was_not_taken() -> None:
    """Its tokens are compared with the text afterwards."""
    policy = BreakEven({"known": 0.25}, priors={"lookup 1": 0.0, "lookup 3": 0.0})

    def rate_of(offer: Offer) -> float:
        """Its acceptance rate after rounds that write the token 5."""
        for _ in range(30):
            policy.choose([offer])
            policy.observe(Round(0, [], 0, [5]))
        return policy.rates_of(offer).mean()

    right = Offer("lookup", "lookup 1", [5, 6, 7, 8])
    wrong = Offer("lookup", "lookup 3", [1, 1, 1, 1])
    learned = rate_of(right)
    assert learned > 0.25 and policy.choose([right])[1] > 0
    assert rate_of(wrong) < 0.2 and policy.choose([wrong])[1] == 0
    assert rate_of(Offer("lookup", "lookup 1", [])) == learned, "nothing was judged"


def test_the_offer_of_the_largest_expected_speedup_is_taken_and_the_other_one_tried_again() -> None:
    policy = BreakEven({"plan": 0.1, "low bits": 0.1}, priors={"plan": 0.8, "low bits": 0.9})
    names = []
    for _ in range(80):
        length = length_of(policy, [Offer("plan", "plan"), Offer("low bits", "low bits")])
        names.append(policy.taken.offer.name)
        policy.observe(a_round(length, 0 if len(names) < 5 else length))
        policy.past.credit = math.inf
    assert names[0] == "low bits"
    assert "plan" in names[:5], "it is tried where the other one fails"
    assert names[-1] == "low bits", "bad luck at the start is forgotten"


# Break-even with a clock


class Clock:
    """Clock that stands still but for the steps of a text."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def with_clock(slope: float, past: Past | None = None, **more: Any) -> BreakEven:
    """Break-even that begins at this slope of the model; a verified token costs 0.05."""
    policy = BreakEven({"model": slope, "known": 0.05}, **more)
    policy.grant_clock(past or Past(), lambda: 1, Clock())
    return policy


def write(
    policy: BreakEven, rounds: int, draft: float = 0.2, *, plain: float = 1.0, accepts: int = 8
) -> list[int]:
    """Lengths of the drafts of timed rounds: a plain one takes ``plain`` seconds, and each drafted
    token ``draft`` seconds more, of which a twentieth of a plain round is its verification.
    """
    clock = policy.clock
    keep_drafting = policy.keep_drafting

    def one_step(confidence: float) -> bool:
        clock.seconds += draft - 0.05 * plain
        return keep_drafting(confidence)

    policy.keep_drafting = one_step
    lengths = []
    for _ in range(rounds):
        length = 0
        if policy.draft_length():
            longest = policy.choose([MODEL])[1]
            while length < longest:
                length += 1
                if not policy.keep_drafting(1.0):
                    break
        clock.seconds += plain * (1 + 0.05 * length)
        policy.observe(a_round(length, min(length, accepts)))
        lengths.append(length)
    policy.keep_drafting = keep_drafting
    return lengths


@pytest.mark.parametrize("plain", [1e-3, 1.0, 50.0])
def test_slopes_become_those_of_the_machine(plain: float) -> None:
    """However far off the first values are, and in whatever unit the clock counts."""
    policy = with_clock(0.1)
    write(policy, 40, 0.4 * plain, plain=plain)
    assert policy.slope("model") == pytest.approx(0.4, rel=0.01)


def test_a_draft_that_becomes_slow_in_the_middle_of_a_text_is_given_up_and_tried_again() -> None:
    policy = with_clock(0.2)
    assert all(write(policy, 80))
    assert 0 < sum(write(policy, 80, 3.0)[20:]) <= 8, "given up, but for single tokens"
    assert write(policy, 300)[-1] > 1


def test_a_measurement_moves_a_slope_up_to_a_factor_and_never_below_the_least() -> None:
    """The first round of a draft reads its weights for the first time, and takes longer."""
    past = Past()
    past.learn_slope("model", 0.2, 50.0)
    assert past.slopes["model"] == pytest.approx(0.2 * 2**0.5)
    for _ in range(20):
        past.learn_slope("model", past.slopes["model"], -1.0)
    assert past.slopes["model"] == Past.LEAST_SLOPE


def test_a_text_begins_with_the_past_of_the_text_before_where_it_has_a_clock() -> None:
    past = Past()
    write(with_clock(0.2, past), 12, 0.9, accepts=0)
    assert with_clock(0.2, past).rates_of(MODEL).mean() < 0.5
    assert with_clock(0.2, past).slope("model") > 0.3
    assert BreakEven({"model": 0.2}).rates_of(MODEL).mean() == 0.7


def test_the_more_texts_share_steps_the_less_break_even_drafts() -> None:
    policy = with_clock(0.4)
    write(policy, 12, 0.4, accepts=4)
    lengths = []
    for texts in range(1, 17):
        policy.sharers = lambda texts=texts: texts
        lengths.append(length_of(policy))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 4 > lengths[7] and lengths[-1] == 0


def test_no_time_is_taken_while_several_texts_share_steps() -> None:
    """The steps of the others are in it."""
    policy = with_clock(0.4)
    policy.sharers = lambda: 2
    write(policy, 12, 0.2)
    assert not policy.past.slopes


def test_a_slope_that_was_measured_below_its_first_value_stays_and_a_larger_one_fades() -> None:
    past = Past(slopes={"fast": 0.2, "slow": 0.9})
    for _ in range(500):
        past.fade_slope("fast", 0.4)
        past.fade_slope("slow", 0.4)
    assert past.slopes["fast"] == 0.2 and past.slopes["slow"] == pytest.approx(0.4, rel=0.01)


def test_time_beyond_the_estimate_is_paid_from_the_credit() -> None:
    """Up to the factor to which a measurement counts."""
    credits = []
    for draft in (0.2, 0.3, 10.0):
        policy = with_clock(0.2)
        write(policy, 1, draft, accepts=0)
        credits.append(policy.past.credit)
    assert credits[0] > credits[1] > credits[2] >= 0


# Whole texts under a fake clock

TOKENS = 96
TEXTS = 40


def seconds_of_text(policy: BreakEven, acceptance: float, slope: float, random: Random) -> float:
    """Time of a text whose drafts are accepted at a rate."""
    seconds = tokens = 0.0
    while tokens < TOKENS:
        accepts = next(n for n in count() if n == 8 or random.random() >= acceptance)
        [length] = write(policy, 1, slope, accepts=accepts)
        seconds += 1 + length * slope
        tokens += 1 + min(length, accepts)
    return seconds


@pytest.mark.parametrize("slope", [0.3, 0.45, 0.6])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_a_text_takes_hardly_longer_than_at_the_best_fixed_length(
    acceptance: float, slope: float
) -> None:
    """That it first has to find, with a first slope of .45."""
    best = max(speedup(acceptance, slope, length) for length in range(9))
    random = Random(1)
    found = [seconds_of_text(with_clock(0.45), acceptance, slope, random) for _ in range(TEXTS)]
    assert sum(found) / TEXTS < 1.09 * TOKENS / best


@pytest.mark.parametrize(
    ("rate", "forced", "free_before", "drafts"),
    [
        (0.9, 1, 0, True),
        (0.3, 1, 0, False),
        (0.9, 8, 0, False),  # a form: the model would read eight forced tokens per token of its own
        (0.9, 4, 60, True),  # a text in which few tokens were forced
    ],
)
def test_a_model_drafts_where_few_tokens_are_forced(
    rate: float, forced: int, free_before: int, drafts: bool
) -> None:
    policy = BreakEven({"model": 0.45, "known": 0.07}, priors={"model": rate})
    for _ in range(free_before):
        policy.choose([Offer("forced", "forced 0", [])])
        policy.observe(a_round(0, 0))
    known = Offer("forced", "forced 0", [0] * forced, forced)
    taken, length = policy.choose([Offer("model", "model", forced=forced), known])
    assert taken.name == ("model" if drafts else "forced") and (length > forced) is drafts


def test_a_round_in_which_tokens_are_forced_is_never_plain() -> None:
    """Not even where T is to be measured."""
    forced = Offer("forced", "forced 0", [0] * 3, 3)
    for policy in (with_clock(0.2), with_clock(2.0)):
        assert policy.choose([Offer("model", "model", forced=3), forced])[1] >= 3


def asked(policy: BreakEven, slope: float, accepts: int) -> float:
    """Share of the rounds, after the first forty, in which drafters are asked for offers."""
    write(policy, 40, slope, accepts=accepts)
    found = 0
    for _ in range(160):
        found += policy.draft_length() > 0
        write(policy, 1, slope, accepts=accepts)
    return found / 160


def test_drafters_are_asked_rarely_where_drafts_save_nothing() -> None:
    idle = asked(with_clock(0.9, priors={"model": 1.0}), 1.2, 1)
    assert 0 < idle < 0.7, "it looks again now and then"
    assert asked(with_clock(0.3), 0.3, 8) == 1, "good drafts are asked for in every round"


def test_drafters_are_always_asked_in_a_text_with_forced_tokens() -> None:
    policy = BreakEven({"model": 0.9, "known": 0.05}, priors={"model": 1.0})
    forced = Round(0, [0], 1, [0, 0], forced=[True, False])
    for _ in range(30):
        assert policy.draft_length()
        policy.choose([Offer("forced", "forced 0", [0], 1), MODEL])
        policy.observe(forced)
        policy.choose([MODEL])
        policy.observe(a_round(2, 0))


@pytest.mark.parametrize(
    ("offer", "cost"),
    [
        # The model reads the two forced tokens as the target does, and drafts two.
        (Offer("model", "model", forced=2), 1 + 2 * 2 * 0.05 + 2 * 0.4),
        # All four tokens are known.
        (Offer("lookup", "lookup 2", [7, 7, 0, 1], 2), 1 + 2 * 0.05 + 2 * 0.05),
    ],
    ids=["model", "known"],
)
def test_forced_tokens_cost_the_slope_of_a_known_one_and_teach_nothing(
    offer: Offer, cost: float
) -> None:
    """Two tokens are forced and two guessed, of which one is accepted."""
    policy = with_clock(0.4)
    assert policy.choose([offer])[0] is offer
    policy.taken.confidences = [0.95, 0.25]
    policy.past.credit = 0.0
    policy.observe(
        Round(5, [7, 7, 0, 1], 3, [7, 7, 0, 9], forced=[True, True, False, False, False])
    )
    credit = 4 * (1 + BreakEven.SHARE) - cost - BreakEven.ASKING
    assert policy.past.credit == pytest.approx(credit)
    rates = policy.past.rates[offer.kind]
    counted = sum(rates.accepted), sum(rates.judged)
    assert counted == pytest.approx((1, 2))
    assert not policy.past.slopes
