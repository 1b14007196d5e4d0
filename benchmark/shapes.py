"""Costs of steps and the speed of whole rounds, of random weights in the shape of a model of any
size.

Times do not depend on the values of the weights. The acceptance rate does. So the speed-ups of a
shape are computed for several rates, and its rounds accept drafted tokens at given ones: they show
what a draft gains on this machine, sampling and verification included. A shape is a name in
``shapes.json`` or the ``config.json`` of a model. Knows nothing of prompts.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.common.command_line import say
from app.common.files import read_json
from app.common.table import Row
from app.loaded import accelerated
from app.options import Options
from app.plan_file import LONGEST_DRAFT, runnable
from benchmark.steps import ROWS, measure_steps
from benchmark.timing import bandwidth, timed
from decoding.drafters import ModelDrafter, NoDraft
from decoding.policies import FixedLength
from decoding.randomness import Place, Randomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Conditions, Text
from decoding.verify import Rule, Verify
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.errors import InputError
from model.plan import LayerPlan
from search.costs import CostModel
from weights.memory import bytes_read, check_fits, estimate, has_memory_for, parameter_count

NAMED = Path(__file__).with_name("shapes.json")
PROMPT_LENGTHS = (256, 2048)  # tokens
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)  # rates for which speed-ups are given
ROUNDS_ACCEPT = (0.7, 0.8, 0.9)  # rates at which whole rounds are measured
TOKENS = 96  # of a text of such rounds
DRAFTED = 4  # tokens of a draft in such rounds
PARAMS = SamplingParams(0.7, top_p=0.9)


def config_of(shape: str) -> ModelConfig:
    """Return the config of a named shape, or of a ``config.json``. Raises InputError for an unknown
    name.
    """
    named = read_json(NAMED)
    if shape not in named and not Path(shape).is_file():
        raise InputError(
            f"no shape is called {shape!r:.80}: give {', '.join(named)} or a config.json"
        )
    return parse_config(named[shape] if shape in named else read_json(Path(shape)))


def shape_model(shape: str, dtype: torch.dtype, device: torch.device, positions: int) -> Decoder:
    """Return a model with random weights of the size of trained ones, and with fast steps. Raises
    InputError where it does not fit into memory with a cache of these ``positions``.
    """
    config = config_of(shape)
    check_fits(
        estimate(config, dtype, positions, device, prompt=positions, longest_draft=LONGEST_DRAFT),
        device,
        remedy="give a narrower --dtype or a smaller shape",
    )
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model = model.to_empty(device=device).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.uniform_(-(config.hidden_size**-0.5), config.hidden_size**-0.5)
    return accelerated(model, Options())


def plans_of(model: Decoder) -> dict[str, LayerPlan]:
    """Return the plans of drafts by name: an exit after a quarter of the layers, and all layers in
    four bits where these are fast and fit into memory.
    """
    plans = {"exit": LayerPlan.early_exit(model.num_layers, max(1, model.num_layers // 4))}
    low_bits = runnable(model, LayerPlan.full(model.num_layers).in_bits(4))
    if model.abilities.low_bits and has_memory_for(model, [low_bits]):
        plans["low bits"] = low_bits
    return plans


@torch.inference_mode()
def measure_shape(shape: str, dtype: torch.dtype, device: torch.device) -> list[Row]:
    """Return rows of a shape: the costs of steps, those of a draft with the speed-ups that follow,
    and the times of prompts.

    Raises InputError where its weights do not fit into memory.
    """
    model = shape_model(shape, dtype, device, max(PROMPT_LENGTHS))
    cache = model.new_cache(max(PROMPT_LENGTHS))
    plans = plans_of(model)
    if "low bits" in plans:
        plans["exit in low bits"] = runnable(model, plans["exit"].in_bits(4))
    drafters = {name: ModelDrafter(model, cache, plan) for name, plan in plans.items()}
    rows = measure_steps(model, cache, drafters)
    verify = [row["plain rounds"] for row in rows if row["step"] == "verification"]
    costs = CostModel({}, np.interp(range(1, LONGEST_DRAFT + 2), ROWS, verify).tolist())
    for row in rows:
        if row["step"] != "verification":
            row |= {f"at {a}": costs.best(a, row["plain rounds"])[0] for a in ACCEPTANCES}
    for count in PROMPT_LENGTHS:
        _, seconds = timed(
            device,
            model.prefill,
            torch.zeros(1, count, dtype=torch.int64, device=device),
            cache,
        )
        rows.append({"step": "prompt", "tokens": count, "ms": 1e3 * seconds})
    return [
        {"shape": shape, "parameters, 10⁶": parameter_count(model.config) / 1e6} | row
        for row in rows
    ]


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
    rounds = speculate(
        model,
        cache,
        Text([0], Conditions(TOKENS), model),
        drafter,
        FixedLength(DRAFTED if plan else 0),
        PARAMS,
        Rule("race", 0).randomness(model.device),
        accepting(rate),
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
        for rate in ROUNDS_ACCEPT:
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
