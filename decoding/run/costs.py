"""What a draft step and a verification cost on this machine: a value, measured once and kept.

All costs are in units of one plain decoding step, so a table says directly what speculation can win.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from decoding.model_port import Model
from decoding.randomness import Place, SeededRandomness
from decoding.sampling import SamplingParams, distribution
from decoding.verify import verify_by_ratio
from model.clock import take_turns
from model.plan import FULL, LOW_BITS, LayerPlan

CONTEXT = 128  # tokens in the cache while measuring
LONGEST_DRAFT = 8
REPEATS = 7
IN_A_ROW = 4  # draft steps: the processor's caches are full of what the last one used, as in a draft
UNSTEADY = (
    1.3  # how far a cost by medians may be from the same by fastest repeats, as a factor; else others compute here
)
PATIENCE = 4.0  # seconds after which no further repeat begins
GREEDY = SamplingParams()
BITS = (*LOW_BITS, FULL)  # of a sublayer that runs, in the order of its costs


@dataclass(frozen=True)
class CostTable:
    """``draft``: one draft step. ``verify[n - 1]``: verifying n tokens at once, so verify[0] is 1 by definition."""

    draft: float
    verify: tuple[float, ...]
    steady: bool = field(default=True, compare=False)  # whether the repeats agreed when this was measured

    @property
    def longest_draft(self) -> int:
        """The longest draft whose verification (one token more) was measured."""
        return len(self.verify) - 1


@dataclass(frozen=True)
class SublayerCosts:
    """What the draft step of any layer plan costs, sublayer by sublayer, and what a round costs besides.

    ``attention``, ``mlp``: one sublayer in 4, in 8 and in all its bits; ``base``: a draft step that skips them all
    (embedding, head, distribution, draw), with the head in as many; ``confidence``: reading the confidence of a drafted
    token; ``verify`` as in CostTable; ``overhead``: what a round of the loop takes beyond its draft steps and its
    verification.
    """

    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    base: tuple[float, ...]
    confidence: float
    overhead: float
    verify: tuple[float, ...]

    def draft(self, plan: LayerPlan) -> float:
        """A draft step under ``plan``."""
        sublayers = [(self.attention, bits) for bits in plan.attention] + [(self.mlp, bits) for bits in plan.mlp]
        return self.base[BITS.index(plan.head)] + sum(cost[BITS.index(bits)] for cost, bits in sublayers if bits)


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens a round yields on average: 1 + α + ... + α^γ = (1 - α^(γ+1)) / (1 - α) (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**kept for kept in range(length + 1))


def predicted_speedup(acceptance: float, length: int, costs: CostTable) -> float:
    """Speed over plain decoding: expected tokens over γ·c + v (arXiv 2211.17192, theorem 3.8, with v measured)."""
    return expected_tokens(acceptance, length) / (length * costs.draft + costs.verify[length])


@torch.inference_mode()
def measure_costs(
    target: Model,
    draft_model: Model | None,
    plan: LayerPlan | None,
    params: SamplingParams = GREEDY,
    *,
    longest: int = LONGEST_DRAFT,
) -> CostTable:
    """Time the loop's own steps with these sampling parameters, interleaved, and take medians; the first is warm-up.

    ``draft_model`` with ``plan`` is what drafts; None is a drafter without a model, whose step costs nothing.
    ``CONTEXT`` tokens stand before them.
    """
    cache = filled_cache(target, longest)
    steps = [verification(target, count, cache, params) for count in range(1, longest + 2)]
    if draft_model is not None:
        steps.append(draft_steps(draft_model, filled_cache(draft_model, IN_A_ROW), plan, params))
    timings = take_turns(steps, REPEATS, target.device, PATIENCE)
    plain, *rest = (took.median for took in timings)
    verify_costs = (1.0, *(seconds / plain for seconds in rest[:longest]))
    drifts = [took.median / took.fastest / (plain / timings[0].fastest) for took in timings]
    steady = max(drifts) <= UNSTEADY and min(drifts) >= 1 / UNSTEADY
    return CostTable(rest[-1] / IN_A_ROW / plain if draft_model is not None else 0.0, verify_costs, steady)


def verification(target: Model, count: int, cache: Any, params: SamplingParams = GREEDY) -> Callable[[], None]:
    """A step that verifies ``count`` tokens as the loop does; of one token it is a plain step."""
    randomness = SeededRandomness(0, target.device)
    tokens = torch.zeros(CONTEXT + count, dtype=torch.int64, device=target.device)
    draft_probs = torch.full((count - 1, target.vocab_size), 1 / target.vocab_size, device=target.device)

    def step() -> None:
        probs = distribution(target(tokens[None, CONTEXT:], cache, CONTEXT)[0], tokens, params)
        torch.stack(verify_by_ratio(probs, draft_probs, tokens[CONTEXT + 1 :], randomness, Place(CONTEXT))).tolist()

    return step


def draft_steps(
    model: Model,
    cache: Any,
    plan: LayerPlan | None,
    params: SamplingParams = GREEDY,
    count: int = IN_A_ROW,
) -> Callable[[], None]:
    """Steps that draft ``count`` tokens as ModelDrafter does: one after another, and read by the host at the end."""
    randomness = SeededRandomness(0, model.device)
    before = torch.zeros(CONTEXT + 1, dtype=torch.int64, device=model.device)

    def steps() -> None:
        cache.truncate(CONTEXT)
        text = before
        for start in range(CONTEXT, CONTEXT + count):
            probs = distribution(model(text[None, start:], cache, start, plan)[0], text, params)
            text = torch.cat((text, randomness.draw(probs[0], Place(start))[None]))
        text.tolist()

    return steps


def filled_cache(model: Model, longest: int) -> Any:
    """A cache that holds ``CONTEXT`` tokens, with room for a draft of ``longest`` more."""
    cache = model.new_cache(CONTEXT + longest + 1)
    model.prefill(torch.zeros(1, CONTEXT, dtype=torch.int64, device=model.device), cache)
    return cache
