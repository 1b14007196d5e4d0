"""Speed of whole rounds at given acceptance rates, of random weights in the shape of a model.

They show what a draft in few bits gains on this machine, sampling and verification included, where
no trained weights are at hand. Knows nothing of prompts.
"""

import torch
from torch import Tensor

from app.common.table import Row
from app.plan_file import runnable
from benchmark.shapes import shape_model
from benchmark.timing import timed
from decoding.drafters import ModelDrafter, NoDraft
from decoding.policies import FixedLength
from decoding.randomness import Place, Randomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Rule, Verify
from model.decoder import Decoder
from model.plan import LayerPlan
from weights.memory import bytes_read

PARAMS = SamplingParams(0.7, top_p=0.9)
ACCEPTANCES = (0.7, 0.8, 0.9)
DRAFTED = 4  # tokens of a draft
TOKENS = 96  # of a text
COPIED = 1 << 28  # bytes, by whose copies the bandwidth is measured
COPIES = 20


def accepting(rate: float) -> Verify:
    """Return the race with another verdict: each drafted token is accepted at this rate."""
    generator = torch.Generator().manual_seed(0)

    def verify(
        p: Tensor, q: Tensor, drafted: Tensor, randomness: Randomness, place: Place
    ) -> tuple[Tensor, Tensor]:
        drawn = randomness.draw_each(p, place)
        kept = torch.rand(len(drafted), generator=generator) < rate
        accepted = int(kept.long().cumprod(0).sum())
        return drawn.new_full((), accepted), drawn[accepted]

    return verify


def seconds_per_token(model: Decoder, plan: LayerPlan | None, rate: float) -> float:
    """Return the seconds per token of a text, drafted under a plan; None is plain decoding."""
    cache = model.new_cache(TOKENS + DRAFTED + 1)
    drafter = ModelDrafter(model, cache, plan) if plan else NoDraft()
    text = Text([0], Rules(TOKENS), model)
    policy = FixedLength(DRAFTED if plan else 0)
    randomness = Rule("race", 0).randomness(model.device)
    rounds = speculate(model, cache, text, drafter, policy, PARAMS, randomness, accepting(rate))
    next(rounds)  # compiles and captures
    written, seconds = timed(model.device, lambda: sum(len(round.emitted) for round in rounds))
    return seconds / written


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the device reads and writes in copies."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    _, seconds = timed(device, lambda: [target.copy_(source) for _ in range(COPIES)])
    return 2 * COPIED * COPIES / seconds


@torch.inference_mode()
def measure_rounds(shape: str, dtype: torch.dtype, device: torch.device) -> list[Row]:
    """Return a row of plain decoding, and of each draft at each acceptance rate. Raises InputError
    where the weights do not fit into memory.
    """
    model = shape_model(shape, dtype, device, TOKENS)
    full = LayerPlan.full(model.num_layers)
    plans = {"exit": LayerPlan.early_exit(model.num_layers, max(1, model.num_layers // 4))}
    if model.abilities.low_bits:
        plans["low bits"] = runnable(model, full.in_bits(4))
    plain = seconds_per_token(model, None, 0.0)
    share = bytes_read(model.config, full, dtype.itemsize) / plain / bandwidth(device)
    rows: list[Row] = [{"decoder": "plain", "tokens/s": 1 / plain, "of the bandwidth": share}]
    for name, plan in plans.items():
        for rate in ACCEPTANCES:
            seconds = seconds_per_token(model, plan, rate)
            row = {"decoder": name, "accepted": rate, "tokens/s": 1 / seconds}
            rows.append(row | {"speed-up": plain / seconds})
    if model.trouble:
        rows.append({"decoder": model.trouble})
    return rows
