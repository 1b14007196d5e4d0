"""Costs of models of any size, measured with random weights in the shape of a config.

Times and memory do not depend on the values of the weights. The acceptance rate does, so speed-ups
are computed for several. A shape is a name in ``shapes.json`` or the ``config.json`` of a model.
"""

import re
from functools import partial
from pathlib import Path

import torch

from app.files import read_json
from app.plan_file import LONGEST_DRAFT
from app.table import Row
from benchmark.costs import ROWS, Drafting, measure_costs, run_steps
from benchmark.timing import timed
from model import Decoder, InputError, KVCache, LayerPlan, ModelConfig, build, parse_config
from model.fast import accelerate
from weights.memory import check_fits, estimate, has_memory_for, parameter_count

NAMED = Path(__file__).with_name("shapes.json")
RANDOM_NUMBERS = 1 << 20  # repeated in every weight
CLEAR_PEAK = Path("/proc/self/clear_refs")  # of Linux: "5" sets the peak to the present size
PROMPTS = (256, 2048)  # tokens before a first token
EXIT = 0.25  # share of the layers that an early exit runs
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


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return a model with random weights: the same numbers again and again, which are made fast."""
    with torch.device("meta"):
        model = build(config).to(dtype)
    model = model.to_empty(device=device).requires_grad_(False).eval()
    numbers = torch.randn(RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0))
    numbers = (numbers * 0.5 * config.hidden_size**-0.5).to(device, dtype)
    for parameter in model.parameters():
        for part in parameter.view(-1).split(RANDOM_NUMBERS):
            part.copy_(numbers[: len(part)])
    return model


@torch.inference_mode()
def measure_shape(shape: str, dtype: torch.dtype, device: torch.device) -> Row:
    """Return the row of a shape: its costs, its memory, and the speed-ups that follow from the
    costs. Raises InputError where its weights do not fit into memory.
    """
    config = config_of(shape)
    layers = config.num_layers
    low_bits = LayerPlan.full(layers).in_bits(4)
    early = LayerPlan.early_exit(layers, max(1, round(EXIT * layers)))
    positions = max(PROMPTS) + max(ROWS)
    expected = partial(
        estimate,
        config,
        dtype,
        positions,
        prompt=max(PROMPTS),
        longest_draft=LONGEST_DRAFT,
        fast_on=device,
    )
    check_fits(expected(), device)
    is_watched = device.type == "cpu" and CLEAR_PEAK.exists()
    if is_watched:
        CLEAR_PEAK.write_text("5")
        before = peak_gigabytes()
    model = accelerate(random_model(config, dtype, device))
    cache = model.new_cache(positions)
    run_steps(Drafting(model, cache))  # which may compile
    row: Row = {"shape": shape, "parameters, 10⁶": parameter_count(config) / 1e6}
    plans = {"exit": early}
    if model.abilities.low_bits and has_memory_for(model, [low_bits]):
        row["copies, s"] = timed(model.prepare, device, low_bits).seconds
        plans = {"low bits": low_bits, "exit": early, "exit in low bits": early.in_bits(4)}
    for count in PROMPTS:
        row[f"first token after {count}, s"] = timed(read, device, model, cache, count).seconds
    if is_watched:
        row["peak, GB"] = peak_gigabytes() - before
        row["estimate, GB"] = expected(plan=plans.get("low bits")).total / 1e9
    drafts = {name: Drafting(model, cache, plan) for name, plan in plans.items()}
    costs = measure_costs(model, cache, drafts)
    row |= {"step, ms": costs.milliseconds, "step, of its floor": 1 / costs.floor}
    row |= {f"{rows} rows": cost for rows, cost in costs.rows.items() if rows > 1}
    for name, (step, first) in costs.drafts.items():
        row |= {name: step, f"{name}, more in the first": first}
        row |= {f"{name} at {rate}": costs.speedup(name, rate) for rate in ACCEPTANCES}
    return row


def read(model: Decoder, cache: KVCache, count: int) -> None:
    """Read a prompt of ``count`` tokens: up to the logits of the first token after it."""
    ids = torch.zeros(1, count, dtype=torch.int64, device=model.device)
    model.prefill(ids[:, 1:], cache)
    model(ids[:, :1], cache, count - 1)


def peak_gigabytes() -> float:
    """Return the most memory that this process has had since the peak was cleared, on Linux."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak[1]) * 1024 / 1e9
