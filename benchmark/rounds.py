"""Speed of whole rounds of random weights in the shape of a model, at given acceptance rates.

The rounds accept drafted tokens at these rates: they show what a draft gains on this machine,
sampling and verification included. Knows nothing of prompts.
"""

import torch
from torch import Tensor

from app.common.command_line import say
from app.common.table import Row
from benchmark.shapes import plans_of, shape_model
from benchmark.timing import bandwidth, timed
from decoding.drafters import ModelDrafter, NoDraft
from decoding.policies import FixedLength
from decoding.randomness import Place, Randomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Conditions, Text
from decoding.verify import Rule, Verify
from model.decoder import Decoder
from model.plan import LayerPlan
from weights.memory import bytes_read

ACCEPTANCES = (0.7, 0.8, 0.9)
TOKENS = 96  # of a text
DRAFTED = 4  # tokens of a draft
PARAMS = SamplingParams(0.7, top_p=0.9)


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
    rounds = speculate(
        target=model,
        cache=cache,
        text=Text([0], Conditions(TOKENS), model),  # the prompt is one token
        drafter=ModelDrafter(model, cache, plan) if plan else NoDraft(),
        policy=FixedLength(DRAFTED if plan else 0),
        params=PARAMS,
        randomness=Rule("race", 0).randomness(model.device),
        verify=accepting(rate),
    )
    next(rounds)  # compiles and captures
    written, seconds = timed(model.device, lambda: sum(len(round.emitted) for round in rounds))
    return seconds / written


@torch.inference_mode()
def measure_rounds(shape: str, dtype: torch.dtype, device: torch.device) -> list[Row]:
    """Return a row of plain decoding, and of each draft at each acceptance rate. Raises InputError
    where the weights do not fit into memory.
    """
    model = shape_model(shape, dtype, device, TOKENS)
    plain = seconds_per_token(model, None, 0.0)
    read = bytes_read(model.config, LayerPlan.full(model.num_layers), dtype.itemsize)
    rows: list[Row] = [
        {
            "decoder": "plain",
            "tokens/s": 1 / plain,
            "of the bandwidth": read / plain / bandwidth(device),
        }
    ]
    for name, plan in plans_of(model).items():
        for rate in ACCEPTANCES:
            seconds = seconds_per_token(model, plan, rate)
            rows.append(
                {
                    "decoder": name,
                    "accepted": rate,
                    "tokens/s": 1 / seconds,
                    "speed-up": plain / seconds,
                }
            )
    if model.trouble:  # a step has fallen back
        say(f"{shape}: {model.trouble}")
    return [{"shape": shape} | row for row in rows]
