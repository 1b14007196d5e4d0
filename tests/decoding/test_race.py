"""Random numbers of production, which the enumerator replaces in every other proof: the exponential
race, under which the seed determines the text under any draft, and uniform numbers.
"""

import math
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding import policies, race, sampling, verify
from decoding.proof import enumeration, loop_law, table_model
from decoding.proof.plain_law import Request
from decoding.randomness import KeyedRandomness, Place, Randomness, SeededRandomness, inverse_cdf
from decoding.rounds import Round
from tests.configs import FAMILIES
from tests.laws import (
    FALSE_ALARM,
    REAL_DRAFTERS,
    TABLE_DRAFTERS,
    chi_square_p_value,
    random_tables,
    scripted,
    tiny_model,
)


def no_three_alike(tokens: Sequence[int], vocab: int = 2) -> Tensor:
    """A constraint: never three equal tokens in a row."""
    twice = len(tokens) > 1 and tokens[-1] == tokens[-2]
    return torch.tensor([not (twice and tokens[-1] == token) for token in range(vocab)])


POLICIES = {
    "fixed": lambda: policies.FixedLength(2),
    "adaptive": lambda: policies.AdaptiveExit(0.55, 2, step=0.03),
    "gate": lambda: policies.ConfidenceGate(policies.FixedLength(2), 0.5),
}
REQUESTS = {
    "free": Request(max_new_tokens=4),
    "eos": Request(max_new_tokens=4, eos_ids=frozenset({1})),
    "stop": Request(max_new_tokens=4, stop_strings=("ba",)),
    "temperature": Request(params=sampling.SamplingParams(0.6, top_p=0.9), max_new_tokens=4),
    "penalty": Request(
        params=sampling.SamplingParams(1.0, 0, 1, 0, 1.5, 0.7, 0.4), max_new_tokens=4
    ),
    "constraint": Request(max_new_tokens=4, constraints=(no_three_alike,)),
    "banned": Request(max_new_tokens=3, banned=("ab",)),
    "banned, two words": Request(max_new_tokens=2, banned=("bb", "aaa")),
    "banned from the prompt": Request(prompt=(0, 1), max_new_tokens=2, banned=("ba", "bba")),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", TABLE_DRAFTERS)
@pytest.mark.parametrize("case", REQUESTS)
def test_the_loops_whole_law_is_plain_samplings(case: str, drafter: str, policy: str) -> None:
    """By enumeration: the draws on a path split the interval of the random number at each place."""
    model = random_tables(Random(f"{case} {drafter} {policy}").getrandbits(32), 5, 2)
    setup = loop_law.Setup(TABLE_DRAFTERS[drafter], POLICIES[policy])
    assert loop_law.bias(model, REQUESTS[case], setup, "race") < 1e-9


def test_after_a_retraction_every_place_has_fresh_exponentials() -> None:
    """Two equally likely tokens a, b, with "ab" banned: aa 1/4, ba 3/8, bb 3/8. With the old E:
    1/4, 1/4, 1/2.
    """
    fair = table_model.TableModel(torch.full((4, 2), 0.5, dtype=torch.float64))
    request = Request(prompt=(1,), max_new_tokens=2, banned=("ab",))

    def tokens(randomness: Randomness) -> tuple[int, ...]:
        return loop_law.run_loop(fair, request, loop_law.Setup(), randomness, rule="race")[0]

    assert enumeration.output_law(tokens, enumeration.RaceEnumerator) == {
        (0, 0): pytest.approx(0.25),
        (1, 0): pytest.approx(0.375),
        (1, 1): pytest.approx(0.375),
    }


# The exponentials of the race


def complements_of(randomness: KeyedRandomness, place: Place, vocab: int) -> Tensor:
    """1 - u of every id at a place, ``[vocab]``, in units of 2⁻⁵³."""
    key = race.signed(race.mix(randomness.key, *place))
    return race.complements(
        race.hash_in_place(torch.arange(vocab) * race.signed(race.GOLDEN) + key)
    )


def test_exponentials_are_independent_between_places_seeds_and_samples() -> None:
    count = 20000
    columns = [
        1 - complements_of(randomness, place, count).double() / 2**53
        for randomness in (KeyedRandomness(0), KeyedRandomness(1), KeyedRandomness(0, sample=1))
        for place in (Place(5), Place(6), Place(5, 1))
    ]
    for uniform in columns:
        counts = torch.histc(uniform, 100, 0, 1)
        assert uniform.min() > 0 and counts.sum() == count, "above 0 and up to 1"
        assert chi_square_p_value(counts, torch.full((100,), 0.01)) > FALSE_ALARM
    correlations = torch.corrcoef(torch.stack([*columns, columns[0].roll(1)])).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / math.sqrt(count)


def test_a_token_of_probability_one_in_a_billion_wins_as_often_as_it_should() -> None:
    """It wins where its E is below 1e-9 times the other's, so small E must not lie on a coarse
    grid.

    A small E is 1 - u. Of 30 million some 30 are below 1e-6, and all of them are different.
    """
    randomness = KeyedRandomness(3)
    columns = (complements_of(randomness, Place(place), 1_000_000) for place in range(30))
    tiny = torch.cat([column[column < 1e-6 * 2**53] for column in columns])
    assert 8 < len(tiny) < 65, "30 are expected: five standard deviations"
    assert len(tiny.unique()) == len(tiny)
    assert (tiny % 2**29).any(), "1 - u comes in steps of 2⁻²⁴"


def test_the_hash_is_splitmix64() -> None:
    """From state 0 it begins with these numbers (the published test vector)."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    found = race.hash_in_place(torch.arange(1, 4) * race.signed(race.GOLDEN))
    assert [number % 2**64 for number in found.tolist()] == expected


@pytest.mark.parametrize("others", [[0.5], [1 / race.FEW / 2] * race.FEW + [0.0, 0.5]], ids=len)
def test_no_impossible_token_wins(others: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where u = 1 throughout, so that every E is 0."""
    monkeypatch.setattr("decoding.race.hash_in_place", lambda counters: counters * 0 - 1)
    probs = torch.tensor([0.0, 0.5, *others])
    assert KeyedRandomness(0).draw(probs, Place(0)).item() == 1
    assert race.race_at(probs[None], torch.tensor([0])).item() == 1


def test_where_no_token_is_possible_none_is_accepted() -> None:
    """Not even the token that such a row draws."""
    zeros = torch.zeros(2, 4)
    drawn = KeyedRandomness(0).draw(zeros[0], Place(1))
    assert (
        verify.verify_by_race(zeros, zeros[1:], drawn[None], KeyedRandomness(0), Place(1))[0] == 0
    )


@pytest.mark.parametrize("kept", [1, 3, 60, race.FEW, race.FEW + 1, 49152])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0, 10.0])
def test_few_exponentials_name_the_winners_of_all(kept: int, spread: float) -> None:
    """Of likely tokens alone, or of likely and unlikely ones; in rows from flat to peaked. The rows
    of a draft race at once, each at its own place.
    """
    vocab = 49152 if kept > 3 else 40
    generator, randomness = torch.Generator().manual_seed(kept), KeyedRandomness(7)
    rows = (torch.randn(12, vocab, generator=generator) * spread).softmax(-1)
    for row in rows:
        row[torch.randperm(vocab, generator=generator)[kept:]] = 0
    winners = randomness.draw_each(rows, Place(5, 1))
    keys = torch.tensor([race.signed(race.mix(randomness.key, 5 + at, 1)) for at in range(12)])
    assert torch.equal(winners, race.race_at(rows, keys))
    unlikely = (rows.gather(1, winners[:, None]) < 1 / race.FEW).any()
    assert spread > 1 or kept <= race.FEW or unlikely, "no unlikely token has won"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    family=st.sampled_from([*FAMILIES]),
    model_seed=st.integers(0, 99),
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 3),
    kind=st.sampled_from([*REAL_DRAFTERS]),
    policy=st.sampled_from([*POLICIES]),
    params=st.builds(
        sampling.SamplingParams,
        st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
        st.sampled_from([0, 3]),
        st.sampled_from([1.0, 0.8]),
        st.sampled_from([0.0, 0.1]),
        st.sampled_from([1.0, 1.4]),
    ),
    stops=st.lists(st.sampled_from(["ba", "d", "cc"]), max_size=2),
    banned=st.lists(st.sampled_from(["aa", "bc", "d", "abd", "ca"]), max_size=3),
    eos=st.sets(st.integers(0, 5), max_size=1),
    constrained=st.booleans(),
)
def test_the_seed_determines_the_text_under_any_draft(
    family: str,
    model_seed: int,
    seed: int,
    sample: int,
    kind: str,
    policy: str,
    params: sampling.SamplingParams,
    stops: list[str],
    banned: list[str],
    eos: set[int],
    constrained: bool,
) -> None:
    """In float64, token for token plain decoding's, for any conditions, parameters and samples."""
    model = tiny_model(family, vocab=6, seed=model_seed)
    constraints = [partial(no_three_alike, vocab=6)] * constrained
    request = Request(16, frozenset(eos), stops, banned, constraints, (1, 2, 3), params)
    randomness = KeyedRandomness(seed, sample=sample)
    speculated, plain = (
        loop_law.run_loop(model, request, setup, randomness, rule="race")
        for setup in (
            loop_law.Setup(REAL_DRAFTERS[kind], POLICIES[policy]),
            loop_law.Setup(REAL_DRAFTERS["none"]),
        )
    )
    assert speculated == plain


def test_a_draft_is_kept_as_often_as_shared_exponentials_make_it() -> None:
    """With probability Σ_x 1 / Σ_y max(p_y/p_x, q_y/q_x); with other exponentials it would be Σ
    p·q.
    """
    model, request, runs, accepted = random_tables(5, 5, 2), Request(max_new_tokens=2), 1500, 0
    p, q = (table[1].exp().tolist() for table in model.tables.values())
    shared = sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(2)) for x in range(2))
    assert shared - sum(a * b for a, b in zip(p, q, strict=True)) > 0.1
    for seed in range(runs):
        rounds: list[Round] = []
        setup = loop_law.Setup(policy=lambda: policies.FixedLength(1))
        loop_law.run_loop(model, request, setup, KeyedRandomness(seed), "race", rounds.append)
        accepted += rounds[0].accepted
    assert abs(accepted / runs - shared) < 5 * math.sqrt(shared * (1 - shared) / runs)


@pytest.mark.parametrize("name", ["ratio", "race"])
def test_over_seeds_the_first_token_has_the_targets_law(name: str) -> None:
    """Of 49,152 tokens with long tails, in six groups, and with a draft that is mostly rejected."""
    vocab, shares = 49152, torch.tensor([[0.04, 0.36, 0.6], [0.66, 0.01, 0.33]])
    order = torch.randperm(vocab // 3, generator=torch.Generator().manual_seed(0))
    rows = shares[:, None] / (order[:, None] + 3)
    p, q = (rows / rows.sum((1, 2), keepdim=True)).flatten(1)
    counts, first = torch.zeros(vocab, dtype=torch.float64), Place(0)
    for seed in range(1500):
        rule = verify.Rule(name, seed)
        randomness = rule.randomness()
        drafted = randomness.draw(q, first)[None]
        accepted, token = rule.verify(p.expand(2, -1), q[None], drafted, randomness, first)
        counts[drafted if accepted else token] += 1
    found, expected = (each.unflatten(0, (-1, 6)).sum(0) for each in (counts, p.double()))
    assert chi_square_p_value(found, expected) > FALSE_ALARM


# Uniform numbers

JUST_BELOW_1 = math.nextafter(1.0, 0.0)


def test_seeds_that_agree_in_32_bits_and_samples_of_one_seed_draw_differently() -> None:
    """A generator on the CPU uses only 32 bits of its seed."""
    streams = [
        SeededRandomness(seed, sample=sample) for seed in (1, 1 + 2**32, 2**63) for sample in (0, 1)
    ]
    assert len({tuple(stream.uniform(3).tolist()) for stream in streams}) == len(streams)


def test_u_zero_accepts_nothing_impossible() -> None:
    """And u just below 1 accepts only the certain."""
    for u, probs, accepted in (
        (0.0, [0.0, 1e-30, 1.0], [False, True, True]),
        (JUST_BELOW_1, [1.0, 1.5, math.inf, 0.999], [True, True, True, False]),
    ):
        found = scripted(*[u] * len(probs)).accept(torch.tensor(probs, dtype=torch.float64))
        assert found.tolist() == accepted


@pytest.mark.parametrize(
    ("weights", "tokens"),
    [
        (
            [0.25, 0.0, 0.5, 0.25],
            {0.0: 0, 0.2499: 0, 0.25: 2, 0.7499: 2, 0.75: 3, JUST_BELOW_1: 3},
        ),
        ([3e-5, 0.0, 1e-5], {0.0: 0, 0.7: 0, 0.8: 2}),
    ],
    ids=["probabilities", "weights that do not sum to 1"],
)
def test_a_draw_inverts_the_cumulative_distribution(
    weights: list[float], tokens: dict[float, int]
) -> None:
    for u, token in tokens.items():
        assert scripted(u).draw(torch.tensor(weights, dtype=torch.float64), Place(0)) == token


SLIP = 2.0**-50  # possible error of a parallel prefix sum, relative to the total
weights = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.25, 1 / 3, 1.0, 1e-3, 1e-17])
slips = st.sampled_from([-SLIP, 0.0, 0.0, SLIP])


@given(
    rows=st.lists(
        st.lists(st.tuples(weights, slips), min_size=6, max_size=6).filter(
            lambda row: any(w for w, _ in row)
        ),
        min_size=1,
        max_size=3,
    ),
    edge=st.integers(0, 5),
    beside=st.sampled_from([-SLIP, -SLIP / 4, 0.0, SLIP / 4]),
)
# the sum rises at a zero, on u
@example(rows=[[(0.25, -SLIP), (0.0, SLIP), (0.75, 0.0)]], edge=0, beside=0.0)
# and at the end
@example(rows=[[(0.25, 0.0), (0.75, -SLIP), (0.0, 0.0)]], edge=1, beside=-SLIP / 4)
@example(rows=[[(0.0, SLIP), (1.0, 0.0), (0.0, 0.0)]], edge=0, beside=0.0)  # and at the beginning
def test_prefix_sums_that_are_not_monotone_never_give_a_token_of_probability_zero(
    rows: list[list[tuple[float, float]]], edge: int, beside: float
) -> None:
    """As on a GPU: u is placed on an edge between two tokens, where the error of the sum
    decides.
    """
    probs, slip = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    exact = probs.cumsum(-1)
    total = exact[:, -1]
    uniform = (exact[:, min(edge, exact.shape[1] - 1)] / total + beside).clamp(0, JUST_BELOW_1)
    with pytest.MonkeyPatch.context() as patch:
        sums = exact + slip * total[:, None]
        patch.setattr("decoding.randomness.running_sums", lambda probs: sums)
        tokens = inverse_cdf(probs, uniform)
    for row, token in enumerate(tokens.tolist()):
        point, reach = uniform[row] * total[row], 3 * SLIP * total[row]
        assert probs[row, token] > 0
        inside = exact[row, token] - probs[row, token] - reach <= point <= exact[row, token] + reach
        on_an_edge = ((exact[row] - point).abs() <= reach).any() or point <= reach
        assert inside or (on_an_edge and probs[row, token] == probs[row].max())


def test_tosses_are_independent_within_a_call_and_between_calls() -> None:
    """Every pattern of two calls with two events of probability 1/2 is equally likely: no number is
    used twice.
    """
    randomness = SeededRandomness(2)
    half = torch.tensor([0.5, 0.5])
    calls = [torch.cat((randomness.accept(half), randomness.accept(half))) for _ in range(4000)]
    patterns = (torch.stack(calls).long() * torch.tensor([8, 4, 2, 1])).sum(1)
    counts = torch.bincount(patterns, minlength=16)
    assert chi_square_p_value(counts, torch.full((16,), 1 / 16)) > FALSE_ALARM
