"""Costs of models of any size, measured with random weights in the shape of a config.

Times and memory do not depend on the values of the weights. The acceptance rate does, so speed-ups
are computed for several. A shape is a name in ``shapes.json`` or the ``config.json`` of a model.
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from app.files import read_json
from app.plan_file import LONGEST_DRAFT
from app.table import Row
from benchmark.llama_cpp import check_llama_cpp, llama_cpp_costs
from benchmark.timing import POSITION, REPEATS, floor_of, take_turns, timed
from model import Decoder, InputError, KVCache, LayerPlan, ModelConfig, build, parse_config
from model.fast import accelerate
from search.costs import CostTable, best_speedup
from weights.memory import (
    check_fits,
    estimate,
    has_memory_for,
    low_bit_bytes,
    parameter_count,
)

NAMED = Path(__file__).with_name("shapes.json")
RANDOM_NUMBERS = 1 << 20  # repeated in every weight
CLEAR_PEAK = Path("/proc/self/clear_refs")  # of Linux: "5" sets the peak to the present size

# measured
PROMPTS = (256, 2048)  # tokens before a first token
ROWS = (1, 2, 4, 6, 8, 9, 16)  # tokens of a step
EXIT = 0.25  # share of the layers that an early exit runs
# computed from it
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)  # rates for which speed-ups are given


def config_of(shape: str) -> ModelConfig:
    """Config of a named shape, or of a ``config.json``. Raises InputError for an unknown name."""
    named = read_json(NAMED)
    if shape not in named and not Path(shape).is_file():
        raise InputError(
            f"no shape is called {shape!r:.80}: give {', '.join(named)} or a config.json"
        )
    return parse_config(named[shape] if shape in named else read_json(Path(shape)))


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Model with random weights: the same numbers again and again, which are made fast."""
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
def measure_shape(
    shape: str, dtype: torch.dtype, device: torch.device, beside_llama_cpp: bool = False
) -> Row:
    """Row of a shape: its costs, its memory, and the speed-ups that follow from the costs; if asked
    also the costs of llama.cpp.

    Raises InputError where its weights do not fit into memory, or llama.cpp cannot run it.
    """
    config = config_of(shape)
    if beside_llama_cpp:
        check_llama_cpp(config, dtype)
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
    row: Row = {"shape": shape, "parameters, 10⁶": parameter_count(config) / 1e6}
    # ends before the steps, which are timed beside reading a large block of memory
    with watched_peak(device) as peak:
        start = partial(start_random_model, config, dtype, device, positions)
        (model, cache), row["start, s"] = timed(start, device)
        low_bits = low_bits_of(model)
        if low_bits:
            _, row["copies, s"] = timed(partial(model.prepare, low_bits), device)
            row["copies, GB"] = low_bit_bytes(config, low_bits) / 1e9
        for count in PROMPTS:
            reading = partial(read_prompt, model, cache, count)
            _, row[f"first token after {count}, s"] = timed(reading, device)
    if peak:
        row |= peak | {"estimate, GB": expected(plan=low_bits).total / 1e9}
    row |= measured_steps(model, cache, low_bits)
    return row | llama_cpp_costs(model, min(PROMPTS)) if beside_llama_cpp else row


def start_random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, positions: int
) -> tuple[Decoder, KVCache]:
    """Random model and a cache of this many positions, after a first step."""
    model = accelerate(random_model(config, dtype, device))
    cache = model.new_cache(positions)
    run_step(model, cache, start=0)
    return model, cache


def low_bits_of(model: Decoder) -> LayerPlan | None:
    """Plan of all layers in four bits; None without kernels for it, or memory for the copies."""
    plan = LayerPlan.full(model.num_layers).in_bits(4)
    return plan if model.fast_bits and has_memory_for(model, [plan]) else None


@contextmanager
def watched_peak(device: torch.device) -> Iterator[Row]:
    """Row with the most memory that this process takes within the block beyond what it had before,
    filled at its end. It stays empty elsewhere than on a CPU under Linux.
    """
    peak: Row = {}
    is_watched = device.type == "cpu" and CLEAR_PEAK.exists()
    if is_watched:
        CLEAR_PEAK.write_text("5")
        before = peak_bytes()
    yield peak
    if is_watched:
        peak["peak, GB"] = (peak_bytes() - before) / 1e9


def peak_bytes() -> int:
    """The most memory that this process has had since the peak was cleared, on Linux."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak[1]) * 1024


def read_prompt(model: Decoder, cache: KVCache, count: int) -> None:
    """Read a prompt of ``count`` tokens: up to the logits of the first token after it."""
    ids = torch.zeros(1, count - 1, dtype=torch.int64, device=model.device)
    model.prefill(ids, cache)
    run_step(model, cache, start=count - 1)


def run_step(
    model: Decoder,
    cache: KVCache,
    rows: int = 1,
    plan: LayerPlan | None = None,
    start: int = POSITION,
) -> None:
    """Run a step of some rows under a plan, from a position on."""
    model(torch.zeros(1, rows, dtype=torch.int64, device=model.device), cache, start, plan)


def measured_steps(model: Decoder, cache: KVCache, low_bits: LayerPlan | None) -> Row:
    """Times of steps, in turns: of one row beside its floor, and in its units those of more rows
    and of drafts; and the speed-ups that follow. Low bits are drafted in if their plan is given.
    """
    layers = model.num_layers
    early = LayerPlan.early_exit(layers, max(1, round(EXIT * layers)))
    drafts = {"exit": early}
    if low_bits:
        drafts = {"low bits": low_bits, "exit": early, "exit in low bits": early.in_bits(4)}
    cache.claim(range(layers), 0, POSITION)  # which a step attends to
    step = partial(run_step, model, cache)
    steps = {f"{rows} rows": partial(step, rows) for rows in ROWS}
    steps |= {name: partial(step, plan=plan) for name, plan in drafts.items()}
    times = take_turns(steps, REPEATS, model.device)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    one = seconds.pop("1 rows")
    floor = floor_of(model)
    row = {
        "step, ms": 1e3 * one,
        "GB/s of the memory": floor["GB/s"],
        "step, of its floor": 1e3 * one / floor["ms"],
        **{name: each / one for name, each in seconds.items()},
    }
    verify = interpolated([1.0, *(row[f"{rows} rows"] for rows in ROWS[1:])])
    for name in drafts:
        costs = CostTable(row[name], verify)
        row |= {f"{name} at {a}": best_speedup(a, costs) for a in ACCEPTANCES}
    return row


def interpolated(costs: Sequence[float]) -> list[float]:
    """Costs of steps of 1, 2, 3 ... rows, linear between those of ``ROWS``."""
    return np.interp(range(1, LONGEST_DRAFT + 2), ROWS, costs).tolist()


def plot_shapes(report: dict[str, list[Row]]) -> Figure:
    """Picture of the computed speed-ups by size: a panel per draft, a line per acceptance rate."""
    rows = report["shapes"]
    drafts = [name for name in ("low bits", "exit", "exit in low bits") if name in rows[0]]
    figure = Figure(figsize=(3.4 * len(drafts) + 0.6, 3.4))
    panels = figure.subplots(1, len(drafts), sharey=True, squeeze=False)[0]
    for name, axes in zip(drafts, panels, strict=True):
        shown = [row for row in rows if name in row]
        sizes = [row["parameters, 10⁶"] for row in shown]
        for acceptance in ACCEPTANCES:
            speeds = [row[f"{name} at {acceptance}"] for row in shown]
            axes.plot(sizes, speeds, marker="o", label=f"α = {acceptance}")
        axes.axhline(1, linestyle="--", linewidth=1)
        axes.set(title=name, xlabel="parameters, 10⁶", xscale="log")
    panels[0].set_ylabel("speed-up, computed")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
