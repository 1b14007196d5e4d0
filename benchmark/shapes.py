"""Costs of steps of random weights in the shape of a model of any size.

Times do not depend on the values of the weights. The acceptance rate does, so the speed-ups of a
shape are computed for several rates. A shape is a name in ``shapes.json`` or the ``config.json`` of
a model. Knows nothing of prompts.
"""

from pathlib import Path

import numpy as np
import torch

from app.common.files import read_json
from app.common.table import Row
from app.loaded import accelerated
from app.options import Options
from app.plan_file import LONGEST_DRAFT, runnable
from benchmark.steps import ROWS, measure_steps
from benchmark.timing import timed
from decoding.drafters import ModelDrafter
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.errors import InputError
from model.plan import LayerPlan
from search.costs import CostModel
from weights.memory import check_fits, estimate, has_memory_for, parameter_count

NAMED = Path(__file__).with_name("shapes.json")
PROMPT_LENGTHS = (256, 2048)  # tokens
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)  # rates for which speed-ups are given


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
    verifications, drafts = measure_steps(model, cache, drafters)
    costs = CostModel(
        parts={},
        verify=np.interp(
            range(1, LONGEST_DRAFT + 2), ROWS, [row["plain rounds"] for row in verifications]
        ).tolist(),
    )
    rows = verifications + [
        row | {f"at {a}": costs.best(a, row["plain rounds"])[0] for a in ACCEPTANCES}
        for row in drafts
    ]
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
