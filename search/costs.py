"""Measures what the objective charges for: every sublayer of a draft step, and a round of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from decoding.drafters import NoDraft, raw_probability
from decoding.policies import FixedLength
from decoding.randomness import SeededRandomness
from decoding.run.costs import (
    BITS,
    CONTEXT,
    IN_A_ROW,
    LONGEST_DRAFT,
    SublayerCosts,
    draft_steps,
    filled_cache,
    verification,
)
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from model import Decoder, LayerPlan
from model.clock import take_turns

REPEATS, PATIENCE = 21, 15.0  # more than for one draft: a whole search is built on these


@torch.inference_mode()
def measure_sublayers(model: Decoder, params: SamplingParams) -> SublayerCosts:
    """Time draft steps of some plans, verifications and the plain loop, in turns, with these sampling parameters.

    The draft steps are fitted by base + attention · attentions + mlp · MLPs, each by its bits (least squares).
    """
    cache, plans = filled_cache(model, LONGEST_DRAFT), list(measured_plans(model.num_layers))
    for plan in plans:
        model.prepare(plan)
    steps: list[Callable[[], None]] = [
        verification(model, count, cache, params) for count in range(1, LONGEST_DRAFT + 2)
    ]
    steps[0] = _row(steps[0])
    steps += [draft_steps(model, cache, plan, params) for plan in plans]
    steps += [_confidence(model), _plain_loop(model, params)]
    seconds = torch.tensor(
        [took.median for took in take_turns(steps, REPEATS, model.device, PATIENCE)], dtype=torch.float64
    )
    for row in (0, *range(LONGEST_DRAFT + 1, len(seconds) - 2), -1):
        seconds[row] /= IN_A_ROW
    plain, verify, drafts = seconds[0], seconds[: LONGEST_DRAFT + 1], seconds[LONGEST_DRAFT + 1 : -2] / seconds[0]
    sizes = torch.tensor([counts_of(plan) for plan in plans], dtype=torch.float64)
    fitted = torch.linalg.lstsq(sizes, drafts[:, None]).solution[:, 0].clamp(min=0)
    base, attention, mlp = (tuple(part.tolist()) for part in fitted.split(len(BITS)))
    overhead = max(0.0, (seconds[-1] / plain - 1).item())
    return SublayerCosts(attention, mlp, base, (seconds[-2] / plain).item(), overhead, tuple((verify / plain).tolist()))


def measured_plans(layers: int) -> Iterator[LayerPlan]:
    """Plans from whose steps the costs of all sublayers follow, by their bits."""
    every = range(layers)
    for bits in BITS:
        for skipped in (((), ()), (every, every), (every[::2], ()), ((), every[1::2]), (every[::2], every[::2])):
            yield LayerPlan.skipping(layers, *skipped).in_bits(bits, bits)


def counts_of(plan: LayerPlan) -> list[float]:
    """How many heads, attentions and MLPs of each number of bits a plan has."""
    parts = ([plan.head], plan.attention, plan.mlp)
    return [float(sum(each == bits for each in part)) for part in parts for bits in BITS]


def _row(step: Callable[[], None]) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(IN_A_ROW):
            step()

    return steps


def _confidence(model: Decoder) -> Callable[[], None]:
    token = torch.tensor(0, device=model.device)
    logits = torch.zeros(model.vocab_size, dtype=model.dtype, device=model.device)

    def step() -> None:
        raw_probability(logits, token)

    return step


def _plain_loop(model: Decoder, params: SamplingParams) -> Callable[[], None]:
    cache, prompt = filled_cache(model, IN_A_ROW), [0] * (CONTEXT + 1)
    drafter = NoDraft(model.vocab_size, model.device)
    randomness = SeededRandomness(0, model.device)

    def step() -> None:
        text = Text(prompt, Rules(IN_A_ROW), model)
        for _ in speculate(model, cache, text, drafter, FixedLength(0), params, randomness):
            pass

    return step
