"""Offers of ``--draft auto``: the drafts among which ``decoding.auto`` chooses in each round, and
what they cost.

Knows nothing of how it chooses.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from app.drafts import Strategy, optional_plans, plan_drafter, rounding_seconds, runnable
from app.plan_file import DraftPlan
from decoding.auto import LONGEST, PRIOR_RATE, Auto, Costs, Estimates, measured_costs
from decoding.drafters import Drafter, PromptLookup
from decoding.model_port import Model
from decoding.rounds import expected_speedup
from model.plan import LayerPlan
from weights.memory import bytes_read, has_memory_for

if TYPE_CHECKING:
    from app.sample import Sample, Slot
    from app.session import Session

WINDOW = 512  # newest tokens that drafts may see instead of all, in a text of
LONG = 2048  # tokens or more
PRIOR_WINDOW = 0.8  # acceptance of such a draft before any is observed
SHORT = 512  # tokens up to which costs hardly depend on a text's length
# For costs by bytes: work beside the weights, per round or draft step, in bytes read meanwhile;
# what a verified row costs in plain rounds of a large model, and beside that in bytes.
ROUND_OVERHEAD = 20e6
ROW = 0.03
ROW_OVERHEAD = 2e6
READ = 38e9  # bytes that a plain round reads in a second, where ``drafts.ROUNDED`` was measured


def best_of_offers(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy that takes the best of lookup, low bits and the plan: see ``Auto``.

    Estimates and measured costs serve all texts that no draft length can change. Elsewhere a seed
    repeats its text only if each begins anew, with the same offers, and costs are counted in bytes.
    """
    is_free = sample.options.draws_alike and session.model.abilities.why_rows_vary is None
    plans = plans_that_pay(session, sample, is_free)
    windows = short_sighted(plans) if sample.source.longest >= LONG else {}
    offers: dict[str, Drafter] = {
        name: plan_drafter(session, chosen.plan, slot, target)
        for name, chosen in (plans | windows).items()
    }
    offers["lookup"] = PromptLookup()
    if is_free:
        session.estimates = session.estimates or Estimates()
    costs = CostsByLength(session, slot, plans, windows, is_measured=is_free)
    costs(len(sample.source))  # now, before the text is timed
    chooser = Auto(
        offers,
        costs,
        session.estimates if is_free else None,
        priors={name: each.alpha for name, each in (plans | windows).items() if each.alpha},
        by_confidence=session.device.type == "cpu",  # a GPU would synchronise for each token
        longest=sample.options.gamma,
    )
    return Strategy("auto", chooser, chooser)


def plans_that_pay(session: Session, sample: Sample, is_free: bool) -> dict[str, DraftPlan]:
    """Return the plans to draft under, by name, as the device runs them: their low bits are fast,
    and their copies are made already, or fit into memory and pay.

    If a draft may change the text, copies are made however short it is, so that a seed repeats it.
    """
    model = session.model
    plans: dict[str, DraftPlan] = {}
    new: list[LayerPlan] = []  # whose copies are to be made
    for name, chosen in optional_plans(sample.options, session.folder, model.num_layers).items():
        plan = runnable(model, chosen.plan)
        copies = replace(plan, window=None)
        if copies.has_low_bits and copies not in session.prepared:
            pays = not is_free or copies_pay(session, sample, replace(chosen, plan=copies))
            if not (model.abilities.low_bits and pays and has_memory_for(model, [*new, copies])):
                continue
            new.append(copies)
        plans[name] = replace(chosen, plan=plan)
    return plans


def copies_pay(session: Session, sample: Sample, chosen: DraftPlan) -> bool:
    """Return whether copies would save more time than they take, at the prior acceptance: over as
    many tokens as the session has written, and those that this text may have.

    So the time for copies is at most about what the session spent without them: rent or buy.
    """
    if session.written == math.inf:
        return True
    full = LayerPlan.full(session.model.num_layers)
    read, drafted = (
        bytes_read(session.config, plan, session.model.dtype.itemsize)
        for plan in (full, chosen.plan)
    )
    cost = drafted / read + ROW
    rate = chosen.alpha or PRIOR_RATE
    speedup = max(expected_speedup(rate, k, cost, 1.0) for k in range(1, LONGEST + 1))
    saved = (1 - 1 / speedup) * read / READ  # seconds a token
    tokens = session.written + sample.source.remaining
    return tokens * saved > rounding_seconds(session.config, chosen.plan)


def short_sighted(plans: dict[str, DraftPlan]) -> dict[str, DraftPlan]:
    """Return these plans, but those that have one, with a window."""
    return {
        f"{name}, newest": DraftPlan(replace(chosen.plan, window=WINDOW), alpha=PRIOR_WINDOW)
        for name, chosen in plans.items()
        if not chosen.plan.window
    }


class CostsByLength:
    """Costs of draft steps and rows for ``Auto``, which count anew where a text has doubled.

    Measured costs are kept by the session.
    """

    def __init__(
        self,
        session: Session,
        slot: Slot,
        plans: dict[str, DraftPlan],
        windows: dict[str, DraftPlan],
        is_measured: bool,
    ) -> None:
        """``windows`` are offered in long texts only."""
        self.session = session
        self.slot = slot
        self.plans = {name: chosen.plan for name, chosen in plans.items()}
        self.windows = {name: chosen.plan for name, chosen in windows.items()}
        self.is_measured = is_measured
        self.known: dict[int, Costs] = {}
        if is_measured:
            offered = (*self.plans.values(), *self.windows.values())
            self.known = session.costs.setdefault(offered, {})

    def __call__(self, length: int) -> Costs:
        """Return the costs after a text of this length."""
        at_most = 1 << (max(SHORT, length) - 1).bit_length()
        if at_most not in self.known:
            plans = self.plans | self.windows if at_most > LONG else self.plans
            self.known[at_most] = (
                measured_costs(self.session.model, self.slot.cache, plans)
                if self.is_measured
                else costs_by_bytes(self.session, plans, at_most)
            )
        return self.known[at_most]


def costs_by_bytes(session: Session, plans: dict[str, LayerPlan], positions: int) -> Costs:
    """Return the costs of draft steps and rows after ``positions``, by the bytes that they read."""

    def reading(plan: LayerPlan) -> float:
        itemsize = session.model.dtype.itemsize
        return bytes_read(session.config, plan, itemsize, positions) + ROUND_OVERHEAD

    full = reading(LayerPlan.full(session.model.num_layers))
    steps = {name: reading(plan) / full for name, plan in plans.items()}
    return Costs(steps, ROW + ROW_OVERHEAD / full)
