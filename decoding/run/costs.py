"""Costs of draft steps and of verification on this machine, in units of one round of plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from decoding.drafters import Draft, Drafter, ModelDrafter, NoDraft
from decoding.model_port import Model
from decoding.policies import FixedLength, Policy
from decoding.randomness import Randomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model.clock import take_turns
from model.plan import LayerPlan
from weights.memory import LONGEST_DRAFT

CONTEXT = 128  # tokens in the cache while measuring
REPEATS, SHARED_REPEATS = 40, 5
IN_A_ROW = 4  # draft steps timed in one round, so that the processor's caches are in the state of a draft
UNSTEADY = 1.3  # ratio of a cost by medians to that by fastest repeats, above which other work disturbs it
PATIENCE = 4.0  # seconds after which no further repeat begins
LARGEST_COST = 1e6
ROWS, DRAFT_ROWS = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16)  # rows of a step of several texts, at which it is measured


@dataclass(frozen=True)
class CostTable:
    """Costs of a draft.

    ``draft``: one draft step. ``verify[n - 1]``: a round that verifies n tokens, without its draft steps; verify[0], a
    round without a draft, is 1 by definition. Where several texts can share a step: ``steps`` and ``drafts``, calls of
    the target for ``ROWS`` rows and of the draft for ``DRAFT_ROWS``, without anything around them.
    ``per_extra_token``: the random numbers for each token that a round writes but one; the race has some for every id.
    """

    draft: float
    verify: tuple[float, ...]
    steps: tuple[float, ...] = ()
    drafts: tuple[float, ...] = ()
    per_extra_token: float = 0.0
    steady: bool = field(default=True, compare=False)  # whether the repeats agreed

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that are no costs."""
        costs = self.draft, *self.verify
        if not self.verify or min(self.verify) <= 0 or not all(0 <= cost < LARGEST_COST for cost in costs):
            raise ValueError(f"no table of costs: {self}")

    @property
    def longest_draft(self) -> int:
        """The longest draft whose verification, of one token more, was measured."""
        return len(self.verify) - 1

    def of_round(self, drafted: int, written: float) -> float:
        """Cost of a round that drafts and writes these numbers of tokens."""
        return drafted * self.draft + self.verify[drafted] + self.per_extra_token * (written - 1)

    @lru_cache  # noqa: B019 - of few tables, which live as long as the process
    def shared_by(self, texts: int) -> CostTable:
        """The table where this number of texts share each step: costs of all of them, in units of their plain round."""
        if texts == 1 or not self.steps:
            return self

        def together(cost: float, rows: int, measured: Sequence[int], steps: Sequence[float]) -> float:
            """Cost of one step for all, and of the other work for each."""
            one, every = at_rows(rows, measured, steps), at_rows(texts * rows, measured, steps)
            return every + texts * max(0.0, cost - one)

        rounds = [together(cost, rows, ROWS, self.steps) for rows, cost in enumerate(self.verify, 1)]
        draft = together(self.draft, 1, DRAFT_ROWS, self.drafts) if self.drafts else 0.0
        relative = tuple(cost / rounds[0] for cost in rounds)
        return CostTable(draft / rounds[0], relative, per_extra_token=texts * self.per_extra_token / rounds[0])


def at_rows(rows: int, measured: Sequence[int], costs: Sequence[float]) -> float:
    """Cost of a step of ``rows`` rows, between and beyond the numbers of rows at which it was measured."""
    return float(np.interp(rows, measured, costs)) * max(1, rows / measured[-1])


def expected_tokens(acceptance: float, length: int) -> float:
    """Expected tokens per round: 1 + α + ... + α^γ = (1 - α^(γ+1)) / (1 - α) (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**kept for kept in range(length + 1))


def predicted_speedup(acceptance: float, length: int, costs: CostTable) -> float:
    """Expected speed-up over plain decoding: expected tokens over γ·c + v (arXiv 2211.17192, theorem 3.8)."""
    tokens = expected_tokens(acceptance, length)
    return tokens / costs.of_round(length, tokens)


class KnownDraft(NoDraft):
    """Drafter of zeros, all that may be drafted: its rounds cost their verification."""

    def propose(self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness) -> Draft:
        ids = torch.zeros(limit, dtype=torch.int64, device=self.empty.tokens.device)
        return Draft(ids, F.one_hot(ids, self.empty.probs.shape[1]).float())


def round_of(
    target: Model, cache: Any, drafter: Drafter, length: int, params: SamplingParams, coupling: Coupling, *, fresh: bool
) -> Callable[[], None]:
    """A round of the loop with a draft of this length, after the tokens of the cache, again and again.

    ``fresh``: each call draws new random numbers; otherwise those of the race are in memory from the second call on.
    """
    context, drawn = cache.length, coupling.randomness(target.device)
    text = Text([0] * (context + 1), Rules(length + 2), target)
    rounds = speculate(target, cache, text, drafter, FixedLength(length), params, drawn, coupling.verify)

    def one_round() -> None:
        if fresh and coupling.name == "race":
            drawn.cached.cache_clear()
        cache.truncate(context)
        drafter.rollback(context + 1)
        next(rounds)
        text.cut_at(context + 1)

    return one_round


@torch.inference_mode()
def measure_costs(
    target: Model,
    draft_model: Model | None,
    plan: LayerPlan | None,
    params: SamplingParams,
    coupling: str = "ratio",
    *,
    longest: int = LONGEST_DRAFT,
    context: int = CONTEXT,
    known: CostTable | None = None,
    patience: float = PATIENCE,
) -> CostTable:
    """Costs of rounds of the loop with these sampling parameters: fastest of repeats in turns, after a warm-up.

    ``draft_model`` drafts under ``plan``; with None, a drafter without a model, a draft step costs nothing. The rounds
    begin after ``context`` tokens. ``known``: a table whose costs of verification hold; ``patience``: the seconds after
    which no further repeat begins.
    """
    longest = known.longest_draft if known else longest
    cache, empty = filled_cache(target, longest, context), (target.vocab_size, target.device)
    timed = partial(round_of, target, cache, params=params, coupling=Coupling(coupling, 0), fresh=False)
    rounds = [timed(NoDraft(*empty), 0, fresh=True)]
    rounds += [timed(KnownDraft(*empty), length) for length in ([] if known else range(longest + 1))]
    length = min(IN_A_ROW, longest)
    if draft_model is not None:
        draft_cache = cache if draft_model is target else filled_cache(draft_model, longest, context)
        rounds.append(timed(ModelDrafter(draft_model, draft_cache, plan), length))
    timings = take_turns(rounds, REPEATS, target.device, patience)
    drifts = [statistics.median(times) / min(times) for times in timings]
    steady = max(drifts) <= UNSTEADY * min(drifts)
    fastest = [min(times) for times in timings]  # other work only ever makes a step slower
    drafting = fastest.pop() if draft_model is not None else None
    plain, *verify = fastest
    if not known:
        extra = max(0.0, 1 - verify[0] / plain) if coupling == "race" else 0.0
        known = CostTable(0.0, (1.0, *(seconds / plain + extra for seconds in verify[1:])), per_extra_token=extra)
    draft = 0.0
    if drafting is not None:
        draft = max(0.0, (drafting / plain + known.per_extra_token - known.verify[length]) / length)
    return replace(known, draft=draft, steady=steady)


@torch.inference_mode()
def measure_shared(
    target: Model, draft: Model | None, plan: LayerPlan | None, params: SamplingParams, coupling: str, costs: CostTable
) -> CostTable:
    """``costs`` with those of steps that several texts share, for a target that has such steps.

    Apart from the others, since the large steps would drive the small ones out of the processor's caches.
    """
    if not hasattr(target, "together"):
        return costs

    def calls(model: Model, cache: Any, every: Sequence[int], plan: LayerPlan | None = None) -> list[partial]:
        tokens = torch.zeros(1, every[-1], dtype=torch.int64, device=model.device)
        return [partial(model, tokens[:, :rows], cache, cache.length, plan) for rows in every]

    cache = filled_cache(target, ROWS[-1])
    none = NoDraft(target.vocab_size, target.device)
    steps = [round_of(target, cache, none, 0, params, Coupling(coupling, 0), fresh=True)]
    steps += calls(target, cache, ROWS)
    if draft is not None:
        draft_cache = cache if draft is target else filled_cache(draft, DRAFT_ROWS[-1])
        steps += calls(draft, draft_cache, DRAFT_ROWS, plan)
    plain, *more = map(min, take_turns(steps, SHARED_REPEATS, target.device, PATIENCE))
    relative = tuple(seconds / plain for seconds in more)
    return replace(costs, steps=relative[: len(ROWS)], drafts=relative[len(ROWS) :])


def filled_cache(model: Model, longest: int, context: int = CONTEXT) -> Any:
    """A cache that holds ``context`` tokens, at most half the model's, with positions for a draft of ``longest``."""
    context = min(context, model.max_positions // 2)
    cache = model.new_cache(context + longest + 1)
    model.prefill(torch.zeros(1, context, dtype=torch.int64, device=model.device), cache)
    return cache
