"""Costs of draft steps and of verification on this machine, in units of one round of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from decoding.drafters import ModelDrafter, NoDraft
from decoding.model_port import Model
from decoding.policies import FixedLength
from decoding.randomness import Place, SeededRandomness
from decoding.sampling import SamplingParams, distribution
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import verify_by_ratio
from model.clock import take_turns
from model.plan import FULL, LOW_BITS, LayerPlan
from weights.memory import LONGEST_DRAFT

CONTEXT = 128  # tokens in the cache while measuring
REPEATS, SHARED_REPEATS = 11, 5
IN_A_ROW = 4  # draft steps timed together, so that the processor's caches are in the state of a draft
UNSTEADY = 1.3  # ratio of a cost by medians to that by fastest repeats, above which other work disturbs it
PATIENCE = 4.0  # seconds after which no further repeat begins
GREEDY = SamplingParams()
LARGEST_COST = 1e6
SHARED_ROWS, SHARED_DRAFTS = (16, 32, 64), (4, 16)  # rows of a step of several texts, at which its cost is measured
BITS = (*LOW_BITS, FULL)  # of a sublayer that runs, in the order of its costs


@dataclass(frozen=True)
class CostTable:
    """Costs of a draft.

    ``draft``: one draft step. ``verify[n - 1]``: a round that verifies n tokens, without its draft steps; verify[0], a
    round without a draft, is 1 by definition. Where several texts can share a step: ``beside``, the part of a round
    beside its step; ``steps`` and ``drafts``, steps of ``SHARED_ROWS`` and draft steps of ``SHARED_DRAFTS`` rows.
    """

    draft: float
    verify: tuple[float, ...]
    beside: float = 0.0
    steps: tuple[float, ...] = ()
    drafts: tuple[float, ...] = ()
    steady: bool = field(default=True, compare=False)  # whether the repeats agreed

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that are no costs."""
        if (
            not self.verify
            or not all(0 < cost < LARGEST_COST for cost in self.verify)
            or not 0 <= self.draft < LARGEST_COST
        ):
            raise ValueError(f"no table of costs: {self}")

    @property
    def longest_draft(self) -> int:
        """The longest draft whose verification, of one token more, was measured."""
        return len(self.verify) - 1

    @lru_cache  # noqa: B019 - of few tables, which live as long as the process
    def shared_by(self, texts: int) -> CostTable:
        """The table where this number of texts share each step: costs of all of them, in units of their plain round."""
        if texts == 1 or not self.steps:
            return self
        step = [cost - self.beside for cost in self.verify]
        rounds = [
            at_rows(texts * count, (*range(1, len(step) + 1), *SHARED_ROWS), (*step, *self.steps)) + texts * self.beside
            for count in range(1, len(step) + 1)
        ]
        draft = at_rows(texts, (1, *SHARED_DRAFTS), (self.draft, *self.drafts)) if self.drafts else 0.0
        return CostTable(draft / rounds[0], tuple(cost / rounds[0] for cost in rounds))


@dataclass(frozen=True)
class SublayerCosts:
    """Costs of the parts of a draft step, for the draft steps of any layer plan.

    ``attention``, ``mlp``: one sublayer in each of ``BITS``; ``base``: a draft step that skips all sublayers
    (embedding, head, distribution, draw), with the head in each of ``BITS``; ``confidence``: reading the confidence of
    a drafted token; ``verify`` as in CostTable.
    """

    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    base: tuple[float, ...]
    confidence: float
    verify: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for costs of other numbers of bits than ``BITS``."""
        if {len(self.attention), len(self.mlp), len(self.base)} != {len(BITS)}:
            raise ValueError(f"no table of costs: {self}")

    def draft(self, plan: LayerPlan) -> float:
        """A draft step under ``plan``."""
        sublayers = [(self.attention, bits) for bits in plan.attention] + [(self.mlp, bits) for bits in plan.mlp]
        return self.base[BITS.index(plan.head)] + sum(cost[BITS.index(bits)] for cost, bits in sublayers if bits)


def at_rows(rows: int, measured: Sequence[int], costs: Sequence[float]) -> float:
    """Cost of a step of ``rows`` rows, between and beyond the numbers of rows at which it was measured."""
    return float(np.interp(rows, measured, costs)) * max(1, rows / measured[-1])


def expected_tokens(acceptance: float, length: int) -> float:
    """Expected tokens per round: 1 + α + ... + α^γ = (1 - α^(γ+1)) / (1 - α) (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**kept for kept in range(length + 1))


def predicted_speedup(acceptance: float, length: int, costs: CostTable) -> float:
    """Expected speed-up over plain decoding: expected tokens over γ·c + v (arXiv 2211.17192, theorem 3.8)."""
    return expected_tokens(acceptance, length) / (length * costs.draft + costs.verify[length])


@torch.inference_mode()
def measure_costs(
    target: Model,
    draft_model: Model | None,
    plan: LayerPlan | None,
    params: SamplingParams = GREEDY,
    *,
    longest: int = LONGEST_DRAFT,
    context: int = CONTEXT,
    verify: tuple[float, ...] | None = None,
    patience: float = PATIENCE,
) -> CostTable:
    """Costs of the loop's steps with these sampling parameters: fastest of repeats in turns, after a warm-up.

    ``draft_model`` drafts under ``plan``; with None, a drafter without a model, a draft step costs nothing. The steps
    are timed after ``context`` tokens. ``verify``: costs of verification that are known already; ``patience``: the
    seconds after which no further repeat begins.
    """
    cache = filled_cache(target, max(longest, IN_A_ROW), context)
    counts = range(1, longest + 2) if verify is None else ()
    steps = [plain_rounds(target, cache, params)]
    steps += [verification(target, count, cache, params, context) for count in counts]
    if draft_model is not None:
        draft_cache = cache if draft_model is target else filled_cache(draft_model, IN_A_ROW, context)
        steps.append(draft_steps(draft_model, draft_cache, plan, params, context=context))
    timings = take_turns(steps, REPEATS, target.device, patience)
    # The fastest repeats: other work only ever makes a step slower.
    plain, beside = timings[0].fastest / IN_A_ROW, 0.0
    if verify is None:
        one, *more = (took.fastest for took in timings[1 : longest + 2])
        beside = max(0.0, plain - one)  # a round contains a step
        plain = one + beside
        verify = (1.0, *((seconds + beside) / plain for seconds in more))
    drifts = [took.median / took.fastest / (timings[0].median / timings[0].fastest) for took in timings]
    steady = max(drifts) <= UNSTEADY and min(drifts) >= 1 / UNSTEADY
    draft = timings[-1].fastest / IN_A_ROW / plain if draft_model is not None else 0.0
    return CostTable(draft, verify, beside / plain, steady=steady)


@torch.inference_mode()
def measure_shared(
    target: Model, draft_model: Model | None, plan: LayerPlan | None, params: SamplingParams, costs: CostTable
) -> CostTable:
    """``costs`` with those of steps that several texts share, for a target that has such steps.

    Apart from the others, since the large steps would drive the small ones out of the processor's caches.
    """
    if not hasattr(target, "together"):
        return costs
    cache = filled_cache(target, SHARED_ROWS[-1])
    steps = [verification(target, rows, cache, params) for rows in (1, *SHARED_ROWS)]
    if draft_model is not None:
        draft_cache = cache if draft_model is target else filled_cache(draft_model, SHARED_DRAFTS[-1])
        steps += [shared_draft(draft_model, rows, draft_cache, plan, params) for rows in SHARED_DRAFTS]
    one, *more = (took.fastest for took in take_turns(steps, SHARED_REPEATS, target.device, PATIENCE))
    relative = tuple(seconds / one * (1 - costs.beside) for seconds in more)  # in plain rounds
    count = len(SHARED_ROWS)
    return replace(costs, steps=relative[:count], drafts=relative[count:])


def plain_rounds(target: Model, cache: Any, params: SamplingParams) -> Callable[[], None]:
    """``IN_A_ROW`` rounds of the loop without a draft."""
    drafter, policy = NoDraft(target.vocab_size, target.device), FixedLength(0)
    randomness, prompt = SeededRandomness(0, target.device), [0] * (cache.length + 1)

    def rounds() -> None:
        for _ in speculate(target, cache, Text(prompt, Rules(IN_A_ROW), target), drafter, policy, params, randomness):
            pass

    return rounds


def verification(
    target: Model, count: int, cache: Any, params: SamplingParams = GREEDY, context: int = CONTEXT
) -> Callable[[], None]:
    """A step of the loop that verifies ``count`` tokens; with one token it is a plain step."""
    randomness = SeededRandomness(0, target.device)
    tokens = torch.zeros(context + count, dtype=torch.int64, device=target.device)
    draft_probs = torch.full((count - 1, target.vocab_size), 1 / target.vocab_size, device=target.device)

    def step() -> None:
        probs = distribution(target(tokens[None, context:], cache, context)[0], tokens, params)
        torch.stack(verify_by_ratio(probs, draft_probs, tokens[context + 1 :], randomness, Place(context))).tolist()

    return step


def draft_steps(
    model: Model, cache: Any, plan: LayerPlan | None, params: SamplingParams = GREEDY, context: int = CONTEXT
) -> Callable[[], None]:
    """A draft of ``IN_A_ROW`` tokens by ``ModelDrafter``, read by the host."""
    drafter, text = ModelDrafter(model, cache, plan), Text([0] * (context + 1), Rules(IN_A_ROW), model)
    policy, randomness = FixedLength(IN_A_ROW), SeededRandomness(0, model.device)

    def steps() -> None:
        drafter.rollback(len(text))
        drafter.propose(text, IN_A_ROW, params, policy, randomness).tokens.tolist()

    return steps


def shared_draft(
    model: Model, rows: int, cache: Any, plan: LayerPlan | None, params: SamplingParams, context: int = CONTEXT
) -> Callable[[], None]:
    """A draft step that this number of texts share, with a draw for each."""
    randomness = SeededRandomness(0, model.device)
    tokens = torch.zeros(context + rows, dtype=torch.int64, device=model.device)

    def step() -> None:
        logits = model(tokens[None, context:], cache, context, plan)[0]
        for row, text in zip(logits, range(context + 1, context + rows + 1), strict=True):
            randomness.draw(distribution(row[None], tokens[:text], params)[0], Place(text)).item()

    return step


def filled_cache(model: Model, longest: int, context: int = CONTEXT) -> Any:
    """A cache that holds ``context`` tokens, with positions for a draft of ``longest`` more."""
    cache = model.new_cache(context + longest + 1)
    model.prefill(torch.zeros(1, context, dtype=torch.int64, device=model.device), cache)
    return cache
