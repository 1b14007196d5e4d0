"""Measured costs of every sublayer of a draft step, by its bits, and of a round of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from decoding.drafters import raw_probability
from decoding.run.costs import (
    BITS,
    IN_A_ROW,
    LONGEST_DRAFT,
    SublayerCosts,
    draft_steps,
    filled_cache,
    plain_rounds,
    verification,
)
from decoding.sampling import SamplingParams
from model import Decoder, LayerPlan
from model.clock import take_turns

REPEATS, PATIENCE = 21, 15.0  # times, and seconds: more than for one draft, since a whole search relies on these


@torch.inference_mode()
def measure_sublayers(model: Decoder, params: SamplingParams) -> SublayerCosts:
    """Time draft steps of some plans, verifications and the plain loop, in turns, with these sampling parameters.

    The draft steps are fitted by base + attention · attentions + mlp · MLPs, each by its bits (least squares).
    """
    cache, plans = filled_cache(model, LONGEST_DRAFT), list(measured_plans(model.num_layers))
    for plan in plans:
        model.prepare(plan)
    plain, *verify = (verification(model, count, cache, params) for count in range(1, LONGEST_DRAFT + 2))
    rows = [lambda: [plain() for _ in range(IN_A_ROW)], plain_rounds(model, filled_cache(model, IN_A_ROW), params)]
    rows += [draft_steps(model, cache, plan, params) for plan in plans]  # IN_A_ROW steps each
    timings = take_turns([*rows, *verify, _confidence(model)], REPEATS, model.device, PATIENCE)
    seconds = torch.tensor([took.median for took in timings], dtype=torch.float64)
    seconds[: len(rows)] /= IN_A_ROW
    in_plain_steps = seconds / seconds[0]
    loop, drafts = in_plain_steps[1], in_plain_steps[2 : len(rows)]
    sizes = torch.tensor([counts_of(plan) for plan in plans], dtype=torch.float64)
    fitted = torch.linalg.lstsq(sizes, drafts[:, None]).solution[:, 0].clamp(min=0)
    base, attention, mlp = (tuple(part.tolist()) for part in fitted.split(len(BITS)))
    *longer, confidence = in_plain_steps[len(rows) :].tolist()
    return SublayerCosts(attention, mlp, base, confidence, max(0.0, loop.item() - 1), (1.0, *longer))


def measured_plans(layers: int) -> Iterator[LayerPlan]:
    """Plans whose draft steps tell the costs of all sublayers, by their bits."""
    every = range(layers)
    for bits in BITS:
        for skipped in (((), ()), (every, every), (every[::2], ()), ((), every[1::2]), (every[::2], every[::2])):
            yield LayerPlan.skipping(layers, *skipped).in_bits(bits, bits)


def counts_of(plan: LayerPlan) -> list[float]:
    """The numbers of heads, attentions and MLPs of each number of bits in a plan: ``3 · len(BITS)``."""
    parts = ([plan.head], plan.attention, plan.mlp)
    return [float(sum(each == bits for each in part)) for part in parts for bits in BITS]


def _confidence(model: Decoder) -> Callable[[], object]:
    token = torch.tensor(0, device=model.device)
    logits = torch.zeros(model.vocab_size, dtype=model.dtype, device=model.device)
    return lambda: raw_probability(logits, token)
