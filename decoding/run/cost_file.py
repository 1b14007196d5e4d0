"""Keeps measured cost tables beside a model: ``costs.json`` in its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from decoding.run.costs import BITS, CONTEXT, CostTable, SublayerCosts
from decoding.sampling import SamplingParams
from model import Decoder, InputError, LayerPlan
from weights.cli.device import processor
from weights.cli.files import read_optional_json, write_json

FILE = "costs.json"
LARGEST_COST = 1e6  # plain steps; also keeps out infinity and NaN

SEVERAL = {CostTable: {"verify"}, SublayerCosts: {"verify", "attention", "mlp", "base"}}  # lists of costs

Costs = TypeVar("Costs", CostTable, SublayerCosts)


def kept_costs(
    folder: Path,
    model: Decoder,
    plan: LayerPlan | None,
    params: SamplingParams,
    measure: Callable[[], CostTable],
) -> CostTable:
    """The cost table of this model, plan (None: lookup), sampling, dtype and machine, else measured.

    It is kept in ``costs.json``, unless the machine was busy when it was measured. A folder that cannot be written, or
    a damaged file, only means measuring again.
    """
    drafts = "lookup" if plan is None else f"skip {plan.skipped_attention} {plan.skipped_mlp}"
    if plan is not None and plan.has_low_bits:
        drafts = f"bits {plan.attention} {plan.mlp} {plan.head}"
    return _kept(folder, model, f"{drafts}, {params}, after {CONTEXT} tokens", CostTable, measure)


def kept_sublayer_costs(
    folder: Path, model: Decoder, params: SamplingParams, measure: Callable[[], SublayerCosts]
) -> SublayerCosts:
    """The costs of this model's sublayers, kept as ``kept_costs`` keeps its tables."""
    return _kept(folder, model, f"sublayers, {params}", SublayerCosts, measure)


def _kept(folder: Path, model: Decoder, what: str, kind: type[Costs], measure: Callable[[], Costs]) -> Costs:
    share = getattr(model, "share", None)
    where = machine(model.device) + (f", {share.size} processes" if share else "")
    key = f"{where}, {str(model.dtype).removeprefix('torch.')}, {what}"
    try:
        kept = read_optional_json(folder / FILE)
    except InputError:
        kept = {}
    costs = _parse(kept.get(key), kind)
    if costs is None:
        costs = measure()
        if not getattr(costs, "steady", True):
            return costs
        with suppress(OSError, ValueError):  # no place to keep it, or a damaged file that cannot be written again
            write_json(folder / FILE, {**kept, key: {name: getattr(costs, name) for name in _names(kind)}})
    return costs


def _parse(entry: Any, kind: type[Costs]) -> Costs | None:
    """The costs of an entry; None if they are none that were measured."""
    if not isinstance(entry, dict) or set(entry) != _names(kind):
        return None
    several = {name for name, cost in entry.items() if isinstance(cost, list)}
    lengths = {name: len(entry[name]) for name in several - {"verify"}}
    if several != SEVERAL[kind] or set(lengths.values()) - {len(BITS)} or not entry["verify"] or 0 in entry["verify"]:
        return None
    costs = [cost for name, value in entry.items() for cost in (value if name in several else [value])]
    if not all(type(cost) in (int, float) and 0 <= cost < LARGEST_COST for cost in costs):
        return None
    return kind(**{n: tuple(map(float, cost)) if n in several else float(cost) for n, cost in entry.items()})


def _names(kind: type[Costs]) -> set[str]:
    """What is kept of costs."""
    return {field.name for field in fields(kind)} - {"steady"}


def machine(device: torch.device) -> str:
    """What costs depend on besides the model: the processor or GPU, the threads, the version of torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
