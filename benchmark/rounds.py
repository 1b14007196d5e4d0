"""Speed of whole rounds at given acceptance rates, of random weights in the shape of a model.

``python -m benchmark.rounds llama-3.2-1b`` shows what a draft in few bits gains on this machine,
sampling and verification included, where no trained weights are at hand. Knows nothing of prompts.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import sys
from collections.abc import Iterator

import torch
from rich.console import Console
from torch import Tensor

from app.device import machine, pick_device
from app.options import Options
from app.parsers import DEVICE, DTYPE, Groups, run_script
from app.session import accelerated
from app.table import Row, table
from benchmark.shapes import config_of, random_model
from benchmark.timing import timed
from decoding.drafters import ModelDrafter, NoDraft
from decoding.policies import FixedLength
from decoding.randomness import Place, Randomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Rule, Verify
from model.decoder import Decoder
from model.device import now
from model.plan import LayerPlan
from weights.load import DTYPES
from weights.memory import bytes_read

PARAMS = SamplingParams(0.7, top_p=0.9)
ACCEPTANCES = (0.7, 0.8, 0.9)
DRAFTED = 4  # tokens of a draft
TOKENS = 96  # of a text
COPIED = 1 << 28  # bytes, by whose copies the bandwidth is measured
COPIES = 20

OPTIONS: Groups = {
    "": {
        "shapes": {"nargs": "+", "metavar": "SHAPE", "help": "as of python -m benchmark --shape"},
        "--device": DEVICE,
        "--dtype": {**DTYPE, "choices": [*DTYPES, "auto"]},
    }
}


def forced(rate: float) -> Verify:
    """Return the race with a verdict that ignores it: a drafted token is accepted at this rate."""
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
    drafter = ModelDrafter(model, cache, plan) if plan else NoDraft(model.vocab_size, model.device)
    text = Text([0], Rules(TOKENS), model)
    policy = FixedLength(DRAFTED if plan else 0)
    randomness = Rule("race", 0).randomness(model.device)
    rounds = speculate(model, cache, text, drafter, policy, PARAMS, randomness, forced(rate))
    next(rounds)  # compiles and captures
    began = now(model.device)
    written = sum(len(round.emitted) for round in rounds)
    return (now(model.device) - began) / written


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the device reads and writes in copies."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    _, seconds = timed(device, lambda: [target.copy_(source) for _ in range(COPIES)])
    return 2 * COPIED * COPIES / seconds


@torch.inference_mode()
def measured(shape: str, dtype: torch.dtype, device: torch.device) -> Iterator[Row]:
    """Yield a row of plain decoding, and of each draft at each acceptance rate."""
    model = accelerated(random_model(config_of(shape), dtype, device), Options())
    layers = model.num_layers
    full = LayerPlan.full(layers)
    plain = seconds_per_token(model, None, 0.0)
    share = bytes_read(model.config, full, dtype.itemsize) / plain / bandwidth(device)
    yield {"decoder": "plain", "tokens/s": 1 / plain, "of the bandwidth": share}
    plans = {"exit": LayerPlan.early_exit(layers, layers // 4)}
    if model.abilities.low_bits:
        plans["low bits"] = full.in_bits(4, head=4)
    for name, plan in plans.items():
        for rate in ACCEPTANCES:
            seconds = seconds_per_token(model, plan, rate)
            row = {"decoder": name, "accepted": rate, "tokens/s": 1 / seconds}
            yield row | {"speed-up": plain / seconds}
    if model.trouble:
        yield {"decoder": model.trouble}


def report(options: argparse.Namespace) -> None:
    """Print the table of each shape. Raises InputError."""
    device = pick_device(options.device)
    for shape in options.shapes:
        rows = [*measured(shape, DTYPES.get(options.dtype, torch.bfloat16), device)]
        Console(width=100).print(table(rows, f"{shape} ({machine(device)})"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return run_script(report, OPTIONS, "python -m benchmark.rounds", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
