"""What a draft step and a verification cost on this machine: a value, measured once and kept.

All costs are in units of one plain decoding step, so a table says directly what speculation can win.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from decoding.model_port import Model
from decoding.randomness import SeededRandomness
from decoding.sampling import Sampler
from decoding.verify import verify
from model.plan import LayerPlan

CONTEXT = 128  # tokens in the cache while measuring
LONGEST_DRAFT = 8
REPEATS = 7
PATIENCE = 4.0  # seconds after which no further repeat begins


@dataclass(frozen=True)
class CostTable:
    """``draft``: one draft step. ``verify[n - 1]``: verifying n tokens at once, so verify[0] is 1 by definition."""

    draft: float
    verify: tuple[float, ...]

    @property
    def longest_draft(self) -> int:
        """The longest draft whose verification (one token more) was measured."""
        return len(self.verify) - 1


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens a round yields on average: 1 + α + ... + α^γ = (1 - α^(γ+1)) / (1 - α) (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**kept for kept in range(length + 1))


def predicted_speedup(acceptance: float, length: int, costs: CostTable) -> float:
    """Speed over plain decoding: expected tokens over γ·c + v (arXiv 2211.17192, theorem 3.8, with v measured)."""
    return expected_tokens(acceptance, length) / (length * costs.draft + costs.verify[length])


@torch.inference_mode()
def measure_costs(
    target: Model, draft_model: Model | None, plan: LayerPlan | None, *, longest: int = LONGEST_DRAFT
) -> CostTable:
    """Time the loop's own steps, interleaved, and take medians; the first repeat is warm-up.

    ``draft_model`` with ``plan`` is what drafts; None is a drafter without a model, whose step costs nothing.
    """
    sampler, randomness = Sampler(), SeededRandomness(0, target.device)

    def verification(count: int, cache: Any) -> Callable[[], None]:
        tokens = torch.zeros(CONTEXT + count, dtype=torch.int64, device=target.device)
        draft_probs = torch.full((count - 1, target.vocab_size), 1 / target.vocab_size, device=target.device)

        def step() -> None:
            probs = sampler.distribution(target(tokens[None, CONTEXT:], cache, CONTEXT)[0], tokens)
            torch.stack(verify(probs, draft_probs, tokens[CONTEXT + 1 :], randomness)).tolist()

        return step

    def drafting(model: Model, cache: Any) -> Callable[[], None]:
        tokens = torch.zeros(CONTEXT + 1, dtype=torch.int64, device=model.device)

        def step() -> None:
            probs = sampler.distribution(model(tokens[None, CONTEXT:], cache, CONTEXT, plan)[0], tokens)
            randomness.draw(probs[0]).item()

        return step

    cache = _filled_cache(target, longest)
    steps = [verification(count, cache) for count in range(1, longest + 2)]
    if draft_model is not None:
        steps.append(drafting(draft_model, _filled_cache(draft_model, longest)))
    plain, *rest = (statistics.median(times) for times in _time(steps))
    verify_costs = (1.0, *(seconds / plain for seconds in rest[:longest]))
    return CostTable(rest[-1] / plain if draft_model is not None else 0.0, verify_costs)


def _filled_cache(model: Model, longest: int) -> Any:
    cache = model.new_cache(CONTEXT + longest + 1)
    model.prefill(torch.zeros(1, CONTEXT, dtype=torch.int64, device=model.device), cache)
    return cache


def _time(steps: list[Callable[[], None]]) -> list[list[float]]:
    """Seconds of every step, over repeats of the whole list, so that a slow spell hits all alike."""
    began = time.perf_counter()
    times: list[list[float]] = [[] for _ in steps]
    for repeat in range(REPEATS + 1):
        if repeat > 1 and time.perf_counter() - began > PATIENCE:
            break
        for step, seconds in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            if repeat:
                seconds.append(time.perf_counter() - start)
    return times
