"""Offers of ``--draft auto``: the drafts among which ``decoding.auto`` chooses in each round, and
what they cost.

Knows nothing of how it chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from app.drafts import Strategy, plan_drafter
from app.loaded import READ_RATE
from app.plan_file import LONG, DraftPlan, copies_of, runnable
from decoding.auto import MOST_DRAFTED, PRIOR_RATE, Auto, Costs, Estimates, measured_costs
from decoding.drafters import Drafter, PromptLookup
from decoding.model_port import Model
from decoding.rounds import expected_speedup
from model.plan import LayerPlan
from weights.memory import bytes_read, has_memory_for

if TYPE_CHECKING:
    from app.sample import Sample, Slot
    from app.session import Session

WINDOW = 512  # newest tokens that drafts may see instead of all of a long text
PRIOR_WINDOW = 0.8  # acceptance of such a draft before any is observed
SAME_COSTS = 512  # tokens up to which costs hardly depend on a text's length
# Costs by bytes count other work as bytes that could have been read meanwhile: per round or draft
# step, and per verified row (a share of a plain round, plus bytes). At the rate ``READ_RATE`` the
# overheads are 0.5 ms a round and 0.05 ms a row.
ROUND_OVERHEAD = 20e6
ROW = 0.03
ROW_OVERHEAD = 2e6


@dataclass
class Offers:
    """What is known of offers: estimates from past rounds, and costs by a text's length and the
    plans at hand.
    """

    estimates: Estimates = field(default_factory=Estimates)
    costs: dict[tuple[object, ...], Costs] = field(default_factory=dict)


def auto_strategy(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy that takes the best of lookup, low bits and the plan: see ``Auto``.

    A text that no draft can change is *fixed*. Fixed texts share the session's offers, whose costs
    are measured, and short ones draft without low-bit copies. The others begin anew, with the same
    plans and with costs by bytes, so that a seed repeats its text. Costs are measured now: the
    prompt is read, and the text is not timed yet.

    Say a text may get 5000 tokens long, and low bits are at hand: ``in_short`` has "low bits", and
    ``in_long`` has "low bits, newest" too, with a window. Up to ``LONG`` tokens only the first is
    offered, then both. Costs are counted for 512 tokens, then for 1024, 2048, 4096 and 8192: those
    for 1024 hold from 513 tokens on.
    """
    is_fixed = sample.options.draws_alike and session.model.abilities.why_rows_vary is None
    session.offers = session.offers or Offers()
    offers = session.offers if is_fixed else Offers()
    in_short = plans_at_hand(session, sample, is_fixed)
    in_long = in_short | short_sighted(in_short) if sample.source.longest > LONG else in_short
    drafters: dict[str, Drafter] = {
        name: plan_drafter(session, each.plan, slot, target) for name, each in in_long.items()
    }
    drafters["lookup"] = PromptLookup()

    def costs_at(length: int) -> Costs:
        """Return the costs after a text of this length, counted anew where it has doubled."""
        doubled = 1 << (max(SAME_COSTS, length) - 1).bit_length()
        at_hand = in_long if doubled > LONG else in_short
        plans = {name: each.plan for name, each in at_hand.items()}
        # The plans too, since another text of the session may have others at hand.
        key = (doubled, *plans.items())
        if key not in offers.costs:
            offers.costs[key] = (
                measured_costs(session.model, slot.cache, plans)
                if is_fixed
                else costs_by_bytes(session, plans, doubled)
            )
        return offers.costs[key]

    costs_at(len(sample.source))
    chooser = Auto(
        drafters,
        costs_at,
        offers.estimates,
        priors={name: each.alpha for name, each in in_long.items() if each.alpha},
        by_confidence=session.device.type == "cpu",  # a GPU would synchronise for each token
        longest=sample.options.gamma,
    )
    return Strategy("auto", chooser, chooser)


def plans_at_hand(session: Session, sample: Sample, is_fixed: bool) -> dict[str, DraftPlan]:
    """Return the plans to draft under, by name, as the device runs them: their low bits are fast,
    and their copies are made already, or fit into memory and pay.
    """
    model = session.model
    plans: dict[str, DraftPlan] = {}
    new: list[LayerPlan] = []  # whose copies are to be made
    for name, chosen in session.optional_plans(sample.options).items():
        plan = runnable(model, chosen.plan)
        copies = copies_of(plan)
        if copies.has_low_bits and copies not in session.prepared:
            pays = (
                not is_fixed
                or session.copies_at_once
                or copies_pay(session, chosen, sample.source.remaining)
            )
            if not (pays and model.abilities.low_bits and has_memory_for(model, [*new, copies])):
                continue
            new.append(copies)
        plans[name] = replace(chosen, plan=plan)
    return plans


def copies_pay(session: Session, chosen: DraftPlan, tokens: int) -> bool:
    """Return whether the low-bit copies of a plan would save more time than they take, at its prior
    acceptance, over these tokens and as many as the session has written: rent or buy.
    """
    itemsize = session.dtype.itemsize
    full = bytes_read(session.config, LayerPlan.full(session.model.num_layers), itemsize)
    cost = bytes_read(session.config, chosen.plan, itemsize) / full + ROW
    rate = chosen.alpha or PRIOR_RATE
    speedup = max(expected_speedup(rate, k, cost, 1.0) for k in range(1, MOST_DRAFTED + 1))
    saved = (1 - 1 / speedup) * full / READ_RATE  # seconds a token
    return (session.written + tokens) * saved > session.rounding_seconds(chosen.plan)


def short_sighted(plans: dict[str, DraftPlan]) -> dict[str, DraftPlan]:
    """Return these plans, but those that have one, with a window."""
    return {
        f"{name}, newest": DraftPlan(replace(chosen.plan, window=WINDOW), alpha=PRIOR_WINDOW)
        for name, chosen in plans.items()
        if not chosen.plan.window
    }


def costs_by_bytes(session: Session, plans: dict[str, LayerPlan], positions: int) -> Costs:
    """Return the costs of draft steps and rows after ``positions``, by the bytes that they read."""

    def reading(plan: LayerPlan) -> float:
        return bytes_read(session.config, plan, session.dtype.itemsize, positions) + ROUND_OVERHEAD

    full = reading(LayerPlan.full(session.model.num_layers))
    steps = {name: reading(plan) / full for name, plan in plans.items()}
    return Costs(steps, ROW + ROW_OVERHEAD / full)
