"""Laws of the production randomness, which the enumerator replaces in every other proof."""

from __future__ import annotations

import math

import pytest
import torch

from decoding.randomness import SeededRandomness
from tests.laws import Scripted

JUST_BELOW_1 = math.nextafter(1.0, 0.0)


def test_u_zero_accepts_nothing_impossible() -> None:
    accepted = Scripted(0.0, 0.0, 0.0).accept(torch.tensor([0.0, 1e-30, 1.0]))
    assert accepted.tolist() == [False, True, True]


def test_u_just_below_one_accepts_only_the_certain() -> None:
    accepted = Scripted(*[JUST_BELOW_1] * 4).accept(torch.tensor([1.0, 1.5, math.inf, 0.999], dtype=torch.float64))
    assert accepted.tolist() == [True, True, True, False]


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.25, 0.5, JUST_BELOW_1])
@pytest.mark.parametrize(
    "probs",
    [[0.0, 1.0, 0.0], [0.0, 0.25, 0.75, 0.0], [0.0, 0.0, 1e-12], [1 / 3, 1 / 3, 1 / 3, 0.0], [0.1] * 10 + [0.0]],
    ids=str,
)
def test_a_draw_never_gives_a_token_of_probability_zero(u: float, probs: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        token = Scripted(u).draw(torch.tensor(probs, dtype=dtype))
        assert probs[token] > 0


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25], dtype=torch.float64)
    drawn = [Scripted(u).draw(probs).item() for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, JUST_BELOW_1)]
    assert drawn == [0, 0, 2, 2, 3, 3]


def test_weights_need_not_sum_to_one() -> None:
    weights = torch.tensor([3e-5, 0.0, 1e-5])
    assert [Scripted(u).draw(weights).item() for u in (0.0, 0.7, 0.8)] == [0, 0, 2]


def test_draws_follow_their_distribution() -> None:
    """Chi-square over 20 000 draws; the bound is exceeded by chance once in 10⁶ seeds (5 degrees of freedom)."""
    probs = torch.tensor([0.05, 0.15, 0.3, 0.0, 0.25, 0.2, 0.05])
    randomness = SeededRandomness(1)
    counts = torch.bincount(torch.stack([randomness.draw(probs) for _ in range(20_000)]), minlength=7)
    expected = probs * 20_000
    assert counts[3] == 0
    assert ((counts - expected)[probs > 0] ** 2 / expected[probs > 0]).sum() < 35.9


def test_tosses_are_independent_within_a_call_and_between_calls() -> None:
    """Every pattern of two calls of two fair tosses is equally likely: no number is used twice."""
    randomness = SeededRandomness(2)
    half = torch.tensor([0.5, 0.5])
    calls = [torch.cat((randomness.accept(half), randomness.accept(half))) for _ in range(4000)]
    patterns = (torch.stack(calls).long() * torch.tensor([8, 4, 2, 1])).sum(1)
    counts = torch.bincount(patterns, minlength=16)
    assert ((counts - 250.0) ** 2 / 250).sum() < 55.2  # chance of more: 10⁻⁶ (15 degrees of freedom)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    first, again, other = SeededRandomness(5), SeededRandomness(5), SeededRandomness(6)
    numbers = first.uniform(8)
    assert torch.equal(numbers, again.uniform(8))
    assert not torch.equal(numbers, other.uniform(8))
    assert not torch.equal(numbers, first.uniform(8))
