"""Judges a drafter: whether the production loop with it writes with exactly plain sampling's law.

    bias(table, request, Setup(MyDrafter)) < 1e-9

``MyDrafter`` is called with the model and its cache, as ``generate.py --draft FILE.py:MyDrafter`` calls it. The rule is
the ratio's; ``race_bias`` judges under the race, with a table of two tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from decoding import speculate as loop  # modules: a mutant may stand in the place of a function
from decoding import verify as rules
from decoding.drafters import Drafter, ModelDrafter
from decoding.policies import FixedLength, Policy
from decoding.proof.enumeration import RaceEnumerator, output_law, total_variation
from decoding.proof.plain_law import DEAD_END, Outcome, Request, plain_law
from decoding.proof.table_model import DRAFT_PLAN, TEXTS, TableModel
from decoding.randomness import Randomness
from decoding.rounds import Round
from decoding.text import Text
from model import InputError, KVCache


def self_draft(model: TableModel, cache: KVCache) -> Drafter:
    """The target under DRAFT_PLAN, sharing its cache."""
    return ModelDrafter(model, cache, DRAFT_PLAN)


@dataclass(frozen=True)
class Setup:
    """How to draft: makers of a fresh drafter for a model and its cache, and of a fresh policy."""

    drafter: Callable[[Any, KVCache], Drafter] = self_draft
    policy: Callable[[], Policy] = lambda: FixedLength(2)


def run_loop(
    model: Any,
    request: Request,
    setup: Setup,
    randomness: Randomness,
    rounds: list[Round] | None = None,
    coupling: str = "ratio",
) -> Outcome:
    """One text from the production loop: its tokens and why it ended. ``rounds`` takes its records."""
    cache = model.new_cache(model.max_positions)
    model.prefill(torch.tensor([request.prompt[:-1]], dtype=torch.int64), cache)
    verify = {"ratio": rules.verify_by_ratio, "race": rules.verify_by_race}[coupling]
    text = Text(request.prompt, request.rules, model, lambda token: TEXTS[token])
    drafter, policy = setup.drafter(model, cache), setup.policy()
    try:
        for round in loop.speculate(model, cache, text, drafter, policy, request.params, randomness, verify):
            if rounds is not None:
                rounds.append(round)
            assert len(text.generated) <= request.max_new_tokens, "the loop does not stop"
    except InputError:
        return DEAD_END
    return tuple(text.generated), text.finish


def bias(model: TableModel, request: Request, setup: Setup) -> float:
    """Total variation between what the loop writes and what plain sampling writes: 0 but for rounding if exact."""
    law = output_law(lambda randomness: run_loop(model, request, setup, randomness))
    return total_variation(law, plain_law(model, request))


def race_bias(model: TableModel, request: Request, setup: Setup) -> float:
    """The same under the exponential race, for a model of two tokens."""

    def run(randomness: Randomness) -> Outcome:
        return run_loop(model, request, setup, randomness, coupling="race")

    return total_variation(output_law(run, RaceEnumerator), plain_law(model, request))
