"""Costs of a model's sublayers in draft steps, by their bits, measured on this machine."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from decoding.drafters import NoDraft, raw_probability
from decoding.run.costs import REPEATS, filled_cache, measure_costs, round_of
from decoding.sampling import SamplingParams
from decoding.verify import Coupling
from model import Decoder, LayerPlan
from model.clock import take_turns
from model.plan import FULL, LOW_BITS

BITS = (*LOW_BITS, FULL)  # of a sublayer that runs
PATIENCE = 1.0  # seconds per plan after which no further repeat begins


class SublayerCosts(NamedTuple):
    """Costs of the parts of a draft step, for the draft steps of any layer plan, in rounds of plain decoding.

    ``parts``: a draft step that skips all sublayers (embedding, head, distribution, draw), one attention and one MLP,
    each in each of ``BITS``: ``3 · len(BITS)`` numbers. ``confidence``: reading the confidence of a drafted token;
    ``verify`` as in CostTable.
    """

    parts: list[float]
    confidence: float
    verify: tuple[float, ...]

    def draft(self, plan: LayerPlan) -> float:
        """A draft step under ``plan``."""
        return float(np.dot(counts_of(plan), self.parts))


def counts_of(plan: LayerPlan) -> list[int]:
    """Numbers of heads, attentions and MLPs of each number of bits in a plan: ``3 · len(BITS)``."""
    return [parts.count(bits) for parts in ((plan.head,), plan.attention, plan.mlp) for bits in BITS]


def measured_plans(layers: int) -> Iterator[LayerPlan]:
    """Plans whose draft steps determine the costs of all sublayers, by their bits."""
    every = range(layers)
    for bits in BITS:
        for skipped in (((), ()), (every, every), (every[::2], ()), ((), every[1::2]), (every[::2], every[::2])):
            yield LayerPlan.skipping(layers, *skipped).in_bits(bits, bits)


@torch.inference_mode()
def measure_sublayers(model: Decoder, params: SamplingParams, coupling: str) -> SublayerCosts:
    """Costs with these sampling parameters and this rule of verification.

    The least-squares solution of: the cost of a plan's draft step is the sum of the costs of its parts.
    """
    how, plans = (params, coupling), list(measured_plans(model.num_layers))
    known, drafts = measure_costs(model, None, None, *how), []
    for plan in plans:
        model.prepare(plan)
        drafts.append(measure_costs(model, model, plan, *how, known=known, patience=PATIENCE).draft)
    parts = np.linalg.lstsq([counts_of(plan) for plan in plans], drafts, rcond=None)[0]
    none, drawn = NoDraft(model.vocab_size, model.device), Coupling(coupling, 0)
    plain = round_of(model, filled_cache(model, 1), none, 0, params, drawn, fresh=True)
    token = torch.tensor(0, device=model.device)
    logits = torch.zeros(model.vocab_size, dtype=model.dtype, device=model.device)
    one, reading = take_turns([plain, partial(raw_probability, logits, token)], REPEATS, model.device)
    return SublayerCosts(parts.clip(min=0).tolist(), min(reading) / min(one), known.verify)
