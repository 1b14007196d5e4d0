"""Distribution of the production randomness, which the enumerator replaces in every other proof."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from decoding.randomness import Place, SeededRandomness, inverse_cdf
from tests.laws import FALSE_ALARM, Scripted, chi_square_p_value

START = Place(0)
JUST_BELOW_1 = math.nextafter(1.0, 0.0)


def test_seeds_that_agree_in_32_bits_and_samples_of_one_seed_draw_differently() -> None:
    """A generator on the CPU uses only 32 bits of its seed."""
    streams = [
        SeededRandomness(seed, sample=sample) for seed in (1, 1 + 2**32, 2**63) for sample in (0, 1)
    ]
    assert len({tuple(stream.uniform(3).tolist()) for stream in streams}) == len(streams)


def test_u_zero_accepts_nothing_impossible() -> None:
    accepted = Scripted(0.0, 0.0, 0.0).accept(torch.tensor([0.0, 1e-30, 1.0]))
    assert accepted.tolist() == [False, True, True]


def test_u_just_below_one_accepts_only_the_certain() -> None:
    accepted = Scripted(*[JUST_BELOW_1] * 4).accept(
        torch.tensor([1.0, 1.5, math.inf, 0.999], dtype=torch.float64)
    )
    assert accepted.tolist() == [True, True, True, False]


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
        assert Scripted(u).draw(torch.tensor(weights, dtype=torch.float64), START) == token


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
