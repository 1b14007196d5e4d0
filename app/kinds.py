"""Kinds of draft: the values of ``--draft``, and the strategy of a text under its options.

A new kind is a row in ``KINDS``, and its maker a function like those of ``app.drafts``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from app.drafts import Strategy, by_plan, class_of_user, lookup, other_model, plain
from decoding.model_port import Model
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength
from model.errors import explaining

if TYPE_CHECKING:
    from app.options import Options
    from app.sample import Sample, Slot
    from app.session import Session

LONGEST_ADAPTIVE = 8  # tokens per draft under Draft & Verify's adaptive exit
START_GREEDY = 0.8  # first threshold of that exit
START_SAMPLED = 0.5


def strategy_of(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy in which a text is written, whose prompt was read into the cache of a
    slot. A draft may share that cache.

    ``target`` is the model as the loop calls it. Raises InputError where the draft is not possible.
    """
    options = sample.options
    if options.gamma == 0:
        return plain("plain: --gamma 0 drafts nothing")
    kind = kind_of(options.draft)
    with explaining(
        f"--draft {options.draft} lacks a file of this project", (ModuleNotFoundError,)
    ):
        strategy = with_policy(kind.make(session, sample, slot, target), options)
    drafter = strategy.drafter
    if target is not session.model and options.draws_alike:
        from decoding.together import ForFew

        drafter = ForFew(drafter, target)
    if sample.grammar:
        from decoding.grammar import ForcedTokens

        drafter = ForcedTokens(sample.grammar, drafter)
    return strategy._replace(drafter=drafter)


def with_policy(strategy: Strategy, options: Options) -> Strategy:
    """Return the strategy with the policy that the options ask for, if they do, behind the
    confidence gate if asked. A plain one stays plain, unless ``--gamma`` asks for drafts.
    """
    policy = strategy.policy
    if not (policy.gamma or options.gamma):
        return strategy
    if options.adaptive:
        first = START_SAMPLED if options.temperature else START_GREEDY
        longest = options.gamma or strategy.gamma or LONGEST_ADAPTIVE
        policy = AdaptiveExit(getattr(policy, "threshold", first), longest)
    elif options.draft != "auto" and (options.gamma or options.adaptive is False):
        policy = FixedLength(options.gamma or policy.gamma)
    if options.min_target_confidence is not None:
        policy = ConfidenceGate(policy, options.min_target_confidence)
    return strategy._replace(policy=policy)


def auto(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy that takes the best of several drafts in each round."""
    from app.offers import best_of_offers

    return best_of_offers(session, sample, slot, target)


class Kind(NamedTuple):
    """Kind of draft: its line in --help, the options that have an effect on it, and its maker."""

    help: str
    options: tuple[str, ...]
    make: Callable[[Session, Sample, Slot, Model], Strategy]


LENGTH = ("gamma", "min_target_confidence")
BY_PLAN = (*LENGTH, "adaptive", "bits", "window")
KINDS = {
    "auto": Kind(
        "in each round the best of lowbit, lookup and a layer plan, or none",
        (*LENGTH, "plan"),
        auto,
    ),
    "none": Kind("plain decoding", (), lambda *_: plain()),
    "lookup": Kind("copies what followed the same words earlier in the text", LENGTH, lookup),
    "skip": Kind(
        "the model without some sublayers, by a layer plan (--plan)", (*BY_PLAN, "plan"), by_plan
    ),
    "exit": Kind("the model's first layers (--exit-layer)", (*BY_PLAN, "exit_layer"), by_plan),
    "lowbit": Kind("the model with all weights in four bits (--bits)", BY_PLAN, by_plan),
    "model": Kind(
        "a smaller model with the same tokenizer (--draft-model)",
        (*LENGTH, "adaptive", "draft_model"),
        other_model,
    ),
}
OF_DRAFTS = [*dict.fromkeys(option for kind in KINDS.values() for option in kind.options)]
OWN = Kind("a drafter of your own", (*LENGTH, "adaptive"), class_of_user)


def kind_of(draft: str) -> Kind:
    """Return the kind of a value of ``--draft``: a name, or the class of a user."""
    return KINDS.get(draft, OWN)
