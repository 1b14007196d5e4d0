"""Draft-length policies follow their formulas, and break-even the times of its rounds."""

import math
from collections.abc import Iterable
from itertools import count, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.policies import (
    AdaptiveExit,
    BreakEven,
    ConfidenceGate,
    FixedLength,
    Offer,
    Past,
    Slope,
    slope_of,
)
from decoding.rounds import Round


def a_round(drafted: int, accepted: int, target_confidence: float | None = None) -> Round:
    return Round(
        5, [0] * drafted, accepted, [0] * (accepted + 1), target_confidence=target_confidence
    )


def test_adaptive_exit_goes_on_exactly_while_confidence_reaches_the_threshold() -> None:
    policy = AdaptiveExit(0.6)
    assert [policy.keep_drafting(confidence) for confidence in (0.59, 0.6, 0.61)] == [
        False,
        True,
        True,
    ]


def test_adaptive_exit_follows_draft_and_verify_by_hand() -> None:
    """t' = t + ε while the smoothed rate m is below α; then t, or t - ε when the draft ended
    early.
    """
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


def test_the_gate_closes_after_an_unsure_token_and_opens_after_a_sure_one() -> None:
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


MODEL = Offer("model", "model")
LOOKUP = Offer("lookup", "lookup 2", [0] * 4)


def run(policy: BreakEven, slope: float, accepted: Iterable[int]) -> tuple[list[int], float]:
    """Rounds with one offer, where the target accepts up to ``accepted`` tokens: drafted lengths,
    and their cost.
    """
    drafted = []
    spent = 0.0
    for most in accepted:
        _, length = policy.choose([MODEL])
        spent += 1 + length * slope
        drafted.append(length)
        policy.observe(a_round(length, min(length, most)))
    return drafted, spent


@given(slope=st.floats(0.02, 2), accepted=st.lists(st.integers(0, 8), max_size=300))
@settings(derandomize=True, deadline=None)
def test_break_even_never_costs_noticeably_more_than_plain_decoding(
    slope: float, accepted: list[int]
) -> None:
    """For any slope, and any change of acceptance along the text."""
    drafted, spent = run(BreakEven({"model": slope}), slope, accepted)
    tokens = sum(min(length, most) + 1 for length, most in zip(drafted, accepted, strict=True))
    assert spent <= (1 + BreakEven.CREDIT_PER_TOKEN) * tokens + BreakEven.START_CREDIT + 1e-9


@given(
    slopes=st.tuples(st.floats(0.02, 2), st.floats(0.02, 0.5)),
    rounds=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=200),
)
@settings(derandomize=True, deadline=None)
def test_break_even_among_several_offers_never_costs_noticeably_more_than_plain(
    slopes: tuple[float, float], rounds: list[tuple[int, int]]
) -> None:
    by_name = dict(zip(("model", "known"), slopes, strict=True))
    policy = BreakEven(by_name)
    spent = 0.0
    tokens = 0
    for most, found in rounds:
        taken, length = policy.choose([MODEL, Offer("lookup", "lookup 2", [7] * found)])
        spent += 1 + length * by_name[slope_of(taken)]
        round = a_round(length, min(length, most))
        tokens += len(round.emitted)
        policy.observe(round)
    assert spent <= (1 + BreakEven.CREDIT_PER_TOKEN) * tokens + BreakEven.START_CREDIT + 1e-9


def test_break_even_follows_the_five_rounds_of_its_docstring() -> None:
    policy = BreakEven({"model": 0.6}, pause=2)
    rows = []
    for number, accepted in enumerate([0, 0, 0, 1, 0], 1):
        rate = policy.acceptance("model")
        waiting = policy.waiting
        _, drafted = policy.choose([MODEL])
        policy.observe(a_round(drafted, accepted))
        rows.append(
            f"| {number} | {rate:.2f} | {(1 + rate) / 1.6:.3f} | {waiting} | {drafted} "
            f"| {accepted} | {1 + drafted * 0.6} | {policy.credit:.2f} |"
        )
    assert "\n    ".join(rows) in BreakEven.__doc__


@pytest.mark.parametrize("slope", [0.05, 0.3, 0.9])
def test_break_even_takes_the_length_with_the_largest_expected_speedup(slope: float) -> None:
    for accepted in range(5):
        policy = BreakEven({"model": slope}, 4)
        run(policy, slope, [accepted] * 60)
        policy.credit = math.inf
        policy.waiting = 1
        rate = policy.acceptance("model")
        speedups = [
            sum(rate**kept for kept in range(length + 1)) / (1 + length * slope)
            for length in range(5)
        ]
        assert speedups[policy.choose([MODEL])[1]] == max(speedups)


def test_break_even_switches_off_a_losing_draft_and_tries_again_one_token_long() -> None:
    drafted, _ = run(BreakEven({"model": 1.2}), 1.2, [0] * 400)
    tries = [at for at, length in enumerate(drafted) if length]
    assert max(drafted[tries[1] :]) == 1
    assert min(later - earlier for earlier, later in pairwise(tries[1:])) > 16


def test_break_even_comes_back_when_drafts_become_good() -> None:
    drafted, _ = run(BreakEven({"model": 0.15}, 4), 0.15, [0] * 200 + [4] * 100)
    assert max(drafted[150:200]) <= 1
    assert drafted[-1] == 4


def test_break_even_learns_of_a_lookup_that_was_not_taken() -> None:
    """Its tokens are compared with the text afterwards."""
    policy = BreakEven({"known": 0.25}, priors={"lookup 1": 0.0})
    offer = Offer("lookup", "lookup 1", [5, 6, 7, 8])
    for _ in range(30):
        taken, length = policy.choose([offer])
        if length:
            break
        policy.observe(Round(0, [], 0, [5]))
    assert taken is offer and policy.acceptance("lookup 1") > 0.25
    before = policy.acceptance("lookup 1")
    policy.choose([Offer("lookup", "lookup 1", [])])
    policy.observe(Round(0, [], 0, [5]))
    assert policy.acceptance("lookup 1") == before, "nothing was judged"
    wrong = Offer("lookup", "lookup 3", [1, 1, 1, 1])
    for _ in range(30):
        policy.choose([wrong])
        policy.observe(Round(0, [], 0, [5]))
    assert policy.acceptance("lookup 3") < 0.1 and policy.choose([wrong])[1] == 0


def test_the_offer_of_the_largest_expected_speedup_is_taken() -> None:
    policy = BreakEven(
        {"plan": 0.1, "low bits": 0.1}, priors={"plan": 0.3, "low bits": 0.9}, memory=0.9
    )
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


# Break-even with a clock


class Machine:
    """Fake clock of a machine: a plain round takes ``plain`` seconds, and each drafted token
    ``draft`` seconds more, by the name of its offer.
    """

    def __init__(self, plain: float, draft: dict[str, float], accepts: int = 8) -> None:
        self.plain = plain
        self.draft = draft
        self.accepts = accepts
        self.shared = False

    def write(self, policy: BreakEven, rounds: int, offers: list[Offer]) -> list[tuple[str, int]]:
        """Rounds with their times: the name of the offer taken, and the number of its tokens."""
        found = []
        for _ in range(rounds):
            taken, length = offers[0], 0
            if policy.draft_length():
                taken, length = policy.choose(offers)
            policy.observe(a_round(length, min(length, self.accepts)))
            policy.observe_time(self.plain + length * self.draft[taken.name])
            found.append((taken.name, length))
        return found

    def grant(self, policy: BreakEven, past: Past | None = None) -> BreakEven:
        policy.grant_clock(past or Past(), lambda: self.shared)
        return policy


def test_slopes_become_those_of_the_machine() -> None:
    """However far off the first values are, and in whatever unit the clock counts."""
    for plain in (1e-3, 1.0, 50.0):
        machine = Machine(plain, {"model": 0.4 * plain})
        policy = machine.grant(BreakEven({"model": 0.1}))
        machine.write(policy, 40, [MODEL])
        assert policy.slope("model").value == pytest.approx(0.4)


def test_a_draft_that_becomes_slow_in_the_middle_of_a_text_is_given_up_and_tried_again() -> None:
    machine = Machine(1.0, {"model": 0.2})
    policy = machine.grant(BreakEven({"model": 0.2}))
    before = [length for _, length in machine.write(policy, 80, [MODEL])]
    assert before.count(0) <= 6, "plain rounds only to measure, in twos"
    machine.draft["model"] = 3.0
    slow = [length for _, length in machine.write(policy, 80, [MODEL])]
    assert sum(slow[20:]) <= 8, "given up, but for probes"
    assert any(slow[20:])
    machine.draft["model"] = 0.2
    fast = [length for _, length in machine.write(policy, 300, [MODEL])]
    assert fast[-1] > 1


def test_a_machine_that_becomes_slower_as_a_whole_changes_nothing_for_long() -> None:
    machine = Machine(1.0, {"model": 0.2})
    policy = machine.grant(BreakEven({"model": 0.2}))
    machine.write(policy, 40, [MODEL])
    machine.plain = 3.0
    machine.draft["model"] = 0.6
    machine.write(policy, 250, [MODEL])
    assert policy.slope("model").value == pytest.approx(0.2, abs=0.05)


def test_one_disturbed_round_decides_nothing() -> None:
    """Not even the first measurement of a plain round."""
    for disturbed in range(1, 12):
        machine = Machine(1.0, {"model": 0.2})
        policy = machine.grant(BreakEven({"model": 0.2}))
        machine.write(policy, disturbed, [MODEL])
        machine.plain = 30.0
        machine.write(policy, 1, [MODEL])
        machine.plain = 1.0
        machine.write(policy, 30, [MODEL])
        assert policy.slope("model").value == pytest.approx(0.2, abs=0.05)


def test_a_round_whose_model_drafted_nothing_is_no_plain_round() -> None:
    policy = BreakEven({"model": 0.2})
    policy.grant_clock(Past(), lambda: False)
    for _ in range(20):
        policy.choose([MODEL])
        policy.observe(a_round(0, 0))
        policy.observe_time(5.0 if policy.taken else 1.0)
    assert set(policy.plain_times) == {1.0}


def test_a_slope_that_is_not_measured_returns_to_its_first_value() -> None:
    slope = Slope(0.5)
    for _ in range(9):
        slope.learn(3.0)
    assert slope.value == 3.0
    for _ in range(200):
        slope.fade()
    assert slope.value == pytest.approx(0.5, abs=0.01)
    for _ in range(9):
        slope.learn(-1.0)
    assert slope.value == Slope.FLOOR


def test_a_text_begins_with_the_past_of_the_text_before_where_it_has_a_clock() -> None:
    past = Past()
    machine = Machine(1.0, {"model": 0.9}, accepts=0)
    machine.write(machine.grant(BreakEven({"model": 0.2}), past), 60, [MODEL])
    later = machine.grant(BreakEven({"model": 0.2}), past)
    assert later.acceptance("model") < 0.5 and later.slope("model").value > 0.5
    alone = BreakEven({"model": 0.2})
    assert alone.acceptance("model") == 0.7 and alone.slope("model").value == 0.2


def test_break_even_drafts_nothing_where_texts_share_steps() -> None:
    machine = Machine(1.0, {"model": 0.1, "lookup": 0.1})
    policy = machine.grant(BreakEven({"model": 0.1, "known": 0.1}))
    machine.write(policy, 4, [MODEL])
    assert policy.choose([MODEL, LOOKUP])[1] > 0
    machine.shared = True
    assert policy.choose([MODEL, LOOKUP])[1] == 0


def test_without_a_clock_lengths_follow_from_the_text_alone() -> None:
    """Times that are observed all the same would change them."""
    machine = Machine(1.0, {"model": 0.1})
    timeless = BreakEven({"model": 0.3})
    drafted, _ = run(timeless, 0.3, [2] * 60)
    assert timeless.slope("model").value == 0.3
    timed = machine.grant(BreakEven({"model": 0.3}))
    machine.accepts = 2
    assert [length for _, length in machine.write(timed, 60, [MODEL])] != drafted


# Whole texts under a fake clock

TOKENS = 96
TEXTS = 40


def written(
    policy: BreakEven, acceptance: float, slope: float, random: Random
) -> tuple[int, float]:
    """Rounds and plain rounds' time of a text whose drafts are accepted at a rate."""
    machine = Machine(1.0, {"model": slope})
    machine.grant(policy)
    rounds = 0
    spent = 0.0
    tokens = 0
    while tokens < TOKENS:
        machine.accepts = next(n for n in count() if n == 8 or random.random() >= acceptance)
        [(_, length)] = machine.write(policy, 1, [MODEL])
        rounds += 1
        spent += 1 + length * slope
        tokens += 1 + min(length, machine.accepts)
    return rounds, spent


@pytest.mark.parametrize("slope", [0.3, 0.45, 0.6])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_a_text_takes_hardly_longer_than_at_the_best_fixed_length(
    acceptance: float, slope: float
) -> None:
    """That it first has to find, with a first slope of .45."""
    best = max(
        sum(acceptance**kept for kept in range(length + 1)) / (1 + length * slope)
        for length in range(9)
    )
    random = Random(1)
    found = [
        written(BreakEven({"model": 0.45}), acceptance, slope, random)[1] for _ in range(TEXTS)
    ]
    assert sum(found) / TEXTS < 1.08 * TOKENS / best


FREE = 3
FORCED = 6


def structured(policy: BreakEven | None, length: int, acceptance: float, random: Random) -> int:
    """Rounds of a text in which FORCED forced tokens follow FREE free ones: by a policy, or by a
    model that drafts ``length`` tokens a round, forced ones included.
    """
    rounds = 0
    at = 0
    while at < TOKENS:
        cycle = [place % (FREE + FORCED) >= FREE for place in range(at, at + 16)]
        leading = cycle.index(False)
        steps = length
        if policy:
            known = Offer("forced", "forced 0", [0] * leading, leading)
            taken, chosen = policy.choose([Offer("model", "model", forced=leading), known])
            length = BreakEven.LONGEST_WITH_FORCED if taken is not known else chosen
            steps = chosen - leading
        free = [place for place in range(length) if not cycle[place]]
        drafted = free[steps] if steps < len(free) else length
        rejected = next((place for place in free if random.random() >= acceptance), drafted)
        accepted = min(rejected, drafted)
        round = Round(at, [0] * drafted, accepted, [0] * (accepted + 1), forced=cycle)
        if policy:
            policy.observe(round)
            guessed = round.guessed[0]
            policy.observe_time(1 + 0.42 * guessed + 0.03 * drafted)
        rounds += 1
        at += accepted + 1
    return rounds


def test_structured_text_takes_fewer_rounds_than_the_model_or_the_forced_tokens_alone() -> None:
    """A model drafts behind forced tokens, and those behind its own come on top."""
    random = Random(2)

    def mean(length: int, by_policy: bool, acceptance: float) -> float:
        total = 0
        for _ in range(TEXTS):
            policy = BreakEven({"model": 0.45, "known": 0.07}) if by_policy else None
            if policy:
                policy.grant_clock(Past(), lambda: False)
            total += structured(policy, length, acceptance, random)
        return total / TEXTS

    alone = mean(5, False, 0.9)
    assert mean(0, True, 0.9) < alone
    assert mean(0, True, 0.0) < 1.2 * TOKENS * FREE / (FREE + FORCED), "hardly more than forced"


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
    assert taken.name == ("model" if drafts else "forced")
    assert (length > forced) is drafts


def asked(policy: BreakEven, slope: float, accepts: int, rounds: int) -> list[bool]:
    """Per round, whether the drafters are asked for offers."""
    machine = Machine(1.0, {"model": slope}, accepts)
    machine.grant(policy)
    found = []
    for _ in range(rounds):
        found.append(policy.draft_length() > 0)
        machine.write(policy, 1, [MODEL])
    return found


def test_nothing_is_learned_of_offers_from_a_round_whose_drafters_were_not_asked() -> None:
    """A closed gate asks no drafter: the round before must not be judged by the new tokens."""
    policy = BreakEven({"known": 0.05})
    copied = Offer("lookup", "lookup 2", [0, 0])
    policy.choose([copied])
    policy.observe(a_round(2, 2))
    learned = dict(policy.past.seen)
    policy.observe(a_round(0, 0))
    assert learned and policy.past.seen == learned


def test_drafting_rests_longer_and_longer_where_drafts_save_nothing() -> None:
    idle = asked(BreakEven({"model": 0.9}, priors={"model": 1.0}), 1.2, 1, 200)
    assert sum(idle[40:]) < 0.2 * len(idle[40:])
    assert any(idle[40:]), "it looks again now and then"
    assert all(asked(BreakEven({"model": 0.3}), 0.3, 8, 200)), "good drafts need no rest"


def test_drafting_does_not_rest_in_a_text_with_forced_tokens() -> None:
    policy = BreakEven({"model": 0.9, "known": 0.05}, priors={"model": 1.0})
    forced = Round(0, [0], 1, [0, 0], forced=[True, False])
    for _ in range(30):
        assert policy.draft_length()
        policy.choose([Offer("forced", "forced 0", [0], 1), MODEL])
        policy.observe(forced)
        policy.choose([MODEL])
        policy.observe(a_round(2, 0))


def test_t_is_not_that_of_a_plain_round_behind_a_draft() -> None:
    """Behind a draft a plain round takes twice as long; a draft that pays only then is given up."""
    policy = BreakEven({"model": 0.4})
    policy.grant_clock(Past(), lambda: False)
    lengths = []
    for _ in range(60):
        _, length = policy.choose([MODEL])
        behind_a_draft = bool(lengths and lengths[-1])
        lengths.append(length)
        policy.observe(a_round(length, length))
        policy.observe_time(1 + 1.1 * length if length else 1 + behind_a_draft)
    assert lengths[:2] == [0, 0]
    assert sum(map(bool, lengths[10:])) <= 6
