"""Proof of one drafter: the distance between the law of the loop with it and plain sampling's.

    bias(table, request, Setup(Bigrams)) < 1e-9

``Bigrams`` is called with the model and its cache, as by ``generate.py --draft
FILE.py:Bigrams``.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from decoding.drafters import Drafter, ModelDrafter
from decoding.policies import FixedLength, Policy
from decoding.proof.enumeration import (
    Enumerator,
    ProofError,
    RaceEnumerator,
    output_law,
    total_variation,
)
from decoding.proof.plain_law import DEAD_END, Request, plain_law
from decoding.proof.table_model import DRAFT_PLAN, TEXTS, TableModel
from decoding.randomness import KeyedRandomness, Randomness, SeededRandomness
from decoding.rounds import Round
from decoding.speculate import speculate
from decoding.text import DeadEnd, Text
from decoding.verify import Rule
from model.cache import KVCache
from model.errors import InputError

# The enumerator of each randomness: draws share no numbers, or those of one place. Exact classes
# only, since a subclass may share others.
ENUMERATORS = {SeededRandomness: Enumerator, KeyedRandomness: RaceEnumerator}


def self_draft(model: TableModel, cache: KVCache) -> Drafter:
    """Return the self-draft: the target under DRAFT_PLAN, with the target's cache."""
    return ModelDrafter(model, cache, DRAFT_PLAN)


@dataclass(frozen=True)
class Setup:
    """Drafter and policy to be proven: functions that make a new one of each, the drafter of a
    model and its cache. A drafter that is a policy too decides for itself.
    """

    drafter: Callable[[Any, KVCache], Drafter] = self_draft
    policy: Callable[[], Policy] = lambda: FixedLength(2)


def run_loop(
    model: Any,
    request: Request,
    setup: Setup,
    randomness: Randomness,
    rule: str = "ratio",
    on_round: Callable[[Round], object] = lambda round: None,
) -> Hashable:
    """Run one text of the production loop; return its tokens and the reason of its end, or
    DEAD_END.

    ``rule`` is a key of ``RULES``. ``on_round`` is called with the record of each round. Raises
    InputError for a prompt that is empty or leaves no room for a token, and ProofError for a loop
    that does not stop.
    """
    if not 0 < len(request.prompt) < model.max_positions:
        raise InputError(
            f"a prompt has 1 to {model.max_positions - 1} tokens, found {len(request.prompt)}"
        )
    cache = model.new_cache(model.max_positions)
    model.prefill(torch.tensor([request.prompt[:-1]], dtype=torch.int64), cache)
    verify = Rule(rule, seed=0).verify
    text = Text(request.prompt, request, model, lambda token: TEXTS[token])
    drafter = setup.drafter(model, cache)
    policy = drafter if isinstance(drafter, Policy) else setup.policy()
    try:
        for round in speculate(
            model, cache, text, drafter, policy, request.params, randomness, verify
        ):
            on_round(round)
            if len(text.generated) > request.max_new_tokens:
                raise ProofError("the loop does not stop")
    except DeadEnd:
        return DEAD_END
    return tuple(text.generated), text.finish


def bias(model: TableModel, request: Request, setup: Setup, rule: str = "ratio") -> float:
    """Return the total variation between the laws of the loop and of plain sampling: 0 up to
    rounding if the loop is exact.

    Under the exponential race the model must have two tokens. A request of two tokens takes
    seconds, with a banned word up to two minutes; a bar shows the probability of the draws so far.
    Raises InputError for an unknown rule, and for one whose randomness has no enumerator.
    """
    randomness = type(Rule(rule, seed=0).randomness())
    if randomness not in ENUMERATORS:
        raise InputError(
            f"which draws of {randomness.__name__} share random numbers is unknown: add its"
            " enumerator to ENUMERATORS"
        )
    law = output_law(
        lambda walk: run_loop(model, request, setup, walk, rule), ENUMERATORS[randomness]
    )
    return total_variation(law, plain_law(model, request))
