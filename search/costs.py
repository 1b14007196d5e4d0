"""Costs of a model's sublayers in draft steps, by their bits, measured on this machine."""

from collections.abc import Iterator
from functools import partial

import torch

from decoding.drafters import raw_probability
from decoding.run.costs import BITS, IN_A_ROW, SublayerCosts, draft_steps, filled_cache, measure_costs, plain_rounds
from decoding.sampling import SamplingParams
from model import Decoder, LayerPlan
from model.clock import take_turns

REPEATS, PATIENCE = 21, 15.0  # times, and seconds: more than for one draft, since a whole search relies on these


@torch.inference_mode()
def measure_sublayers(model: Decoder, params: SamplingParams) -> SublayerCosts:
    """Costs in rounds of plain decoding: draft steps of some plans take turns with these, with these parameters.

    The draft steps are fitted by base + attention · attentions + mlp · MLPs, each by its bits (least squares).
    """
    verify = measure_costs(model, None, None, params, patience=PATIENCE).verify
    cache, plans = filled_cache(model, IN_A_ROW), list(measured_plans(model.num_layers))
    for plan in plans:
        model.prepare(plan)
    token = torch.tensor(0, device=model.device)
    logits = torch.zeros(model.vocab_size, dtype=model.dtype, device=model.device)
    steps = [plain_rounds(model, filled_cache(model, IN_A_ROW), params)]
    steps += [draft_steps(model, cache, plan, params) for plan in plans]  # IN_A_ROW of them, like the plain rounds
    timings = take_turns([*steps, partial(raw_probability, logits, token)], REPEATS, model.device, PATIENCE)
    plain, *drafts, confidence = (took.fastest for took in timings)  # other work only makes a step slower
    sizes = torch.tensor([counts_of(plan) for plan in plans], dtype=torch.float64)
    costs = torch.tensor(drafts, dtype=torch.float64) / plain
    fitted = torch.linalg.lstsq(sizes, costs[:, None]).solution[:, 0].clamp(min=0)
    base, attention, mlp = (tuple(part.tolist()) for part in fitted.split(len(BITS)))
    return SublayerCosts(attention, mlp, base, confidence * IN_A_ROW / plain, verify)


def measured_plans(layers: int) -> Iterator[LayerPlan]:
    """Plans whose draft steps determine the costs of all sublayers, by their bits."""
    every = range(layers)
    for bits in BITS:
        for skipped in (((), ()), (every, every), (every[::2], ()), ((), every[1::2]), (every[::2], every[::2])):
            yield LayerPlan.skipping(layers, *skipped).in_bits(bits, bits)


def counts_of(plan: LayerPlan) -> list[float]:
    """Numbers of heads, attentions and MLPs of each number of bits in a plan: ``3 · len(BITS)``."""
    parts = ([plan.head], plan.attention, plan.mlp)
    return [float(sum(each == bits for each in part)) for part in parts for bits in BITS]
