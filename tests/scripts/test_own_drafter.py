"""The README's example: a drafter of your own, and the proof that it is lossless."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters import Draft
from decoding.proof.enumeration import output_law, total_variation
from tests.laws import Drafting, Request, plain_law, run_loop

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the README's example defines, after it has run: with its own assertion."""
    code = re.search(r"```python\n(.*?)```", README[README.index("## Adding your own drafter") :], re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names


def bias(example: dict[str, Any], drafter: type) -> float:
    """Total variation between what the loop writes with this drafter and what plain sampling writes."""
    model, request = example["model"], example["request"]
    assert isinstance(request, Request)
    drafting = Drafting(lambda target, cache: drafter(target.vocab_size), example["drafting"].policy)
    law = output_law(lambda randomness: run_loop(model, request, drafting, randomness))
    return total_variation(law, plain_law(model, request))


def test_the_readmes_drafter_is_lossless_however_bad(example: dict[str, Any]) -> None:
    assert bias(example, example["PopularTokens"]) < 1e-9
    assert example["distance"] < 1e-9


def test_a_drafter_that_misstates_its_distribution_is_caught(example: dict[str, Any]) -> None:
    class Flatterer(example["PopularTokens"]):  # type: ignore[misc]
        """The same, but it claims to have been sure of what it drew: a lie that biases the output."""

        def propose(self, *request: Any) -> Draft:
            draft = super().propose(*request)
            return Draft(draft.tokens, torch.ones_like(draft.probs))

    assert bias(example, Flatterer) > 0.01


@pytest.mark.parametrize(("law", "other", "distance"), [({"a": 1.0}, {"a": 1.0}, 0.0), ({"a": 1.0}, {"b": 1.0}, 1.0)])
def test_total_variation_is_zero_for_equal_laws_and_one_for_disjoint_ones(
    law: dict[str, float], other: dict[str, float], distance: float
) -> None:
    assert total_variation(law, other) == distance
