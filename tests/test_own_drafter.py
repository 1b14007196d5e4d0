"""The README's example: a drafter of your own, and the proof that it is lossless."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decoding.drafters import Draft
from decoding.enumeration import output_law, total_variation
from decoding.policies import FixedLength, Policy
from decoding.randomness import Randomness
from decoding.sampling import Sampler, SamplingParams
from tests.laws import Drafting, Request, TableModel, plain_law, run_loop


class PopularTokens:
    """Drafts tokens as often as the text has used them: a drafter in a few lines, and a bad one."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(
        self, tokens: Sequence[int], limit: int, sampler: Sampler, policy: Policy, randomness: Randomness
    ) -> Draft:
        counts = torch.bincount(torch.tensor(tokens), minlength=self.vocab_size).double()
        probs = (counts / counts.sum()).expand(limit, -1)
        drafted = [randomness.draw(row) for row in probs]
        return Draft(torch.stack(drafted) if drafted else torch.empty(0, dtype=torch.int64), self.claimed(probs))

    def claimed(self, probs: Tensor) -> Tensor:
        """What each token was drawn from. This is what verification must be told truly."""
        return probs

    def rollback(self, length: int) -> None:
        """Nothing is remembered between rounds."""


class Flatterer(PopularTokens):
    """The same, but it claims to have been sure of what it drew: a lie that biases the output."""

    def claimed(self, probs: Tensor) -> Tensor:
        return torch.ones_like(probs)


def bias(drafter: type[PopularTokens]) -> float:
    """Total variation between what the loop writes with this drafter and what plain sampling writes."""
    rows = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.0, 0.6, 0.4]], dtype=torch.float64)
    model = TableModel(rows)
    request = Request(prompt=(0, 1, 0), params=SamplingParams(temperature=0.8), max_new_tokens=3)
    drafting = Drafting(lambda target, cache: drafter(target.vocab_size), lambda: FixedLength(2))
    return total_variation(
        output_law(lambda randomness: run_loop(model, request, drafting, randomness)), plain_law(model, request)
    )


def test_an_honest_drafter_is_lossless_however_bad() -> None:
    assert bias(PopularTokens) < 1e-9


def test_a_drafter_that_misstates_its_distribution_is_caught() -> None:
    assert bias(Flatterer) > 0.01


@pytest.mark.parametrize(("law", "other", "distance"), [({"a": 1.0}, {"a": 1.0}, 0.0), ({"a": 1.0}, {"b": 1.0}, 1.0)])
def test_total_variation_is_zero_for_equal_laws_and_one_for_disjoint_ones(
    law: dict[str, float], other: dict[str, float], distance: float
) -> None:
    assert total_variation(law, other) == distance
