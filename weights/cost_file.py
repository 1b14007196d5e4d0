"""Keeps measured cost tables beside a model: ``costs.json`` in its folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from decoding.costs import CostTable
from model import Decoder, InputError, LayerPlan
from weights.files import read_optional_json, write_json

FILE = "costs.json"
LARGEST_COST = 1e6  # plain steps; also keeps out infinity and NaN


def kept_costs(folder: Path, model: Decoder, plan: LayerPlan | None, measure: Callable[[], CostTable]) -> CostTable:
    """The cost table of this model, plan (None: lookup), dtype and machine: from ``costs.json``, else measured.

    A folder that cannot be written, or a damaged file, only means measuring again.
    """
    drafts = "lookup" if plan is None else f"skip {plan.skipped_attention} {plan.skipped_mlp}"
    key = f"{_machine(model.device)}, {str(model.dtype).removeprefix('torch.')}, {drafts}"
    try:
        kept = read_optional_json(folder / FILE)
    except InputError:
        kept = {}
    costs = _parse(kept.get(key))
    if costs is None:
        costs = measure()
        with suppress(OSError, ValueError):  # no place to keep it, or a damaged file that cannot be written again
            write_json(folder / FILE, {**kept, key: asdict(costs)})
    return costs


def _parse(entry: Any) -> CostTable | None:
    """The table of an entry; None if it is not one that was measured."""
    if not isinstance(entry, dict) or not isinstance(entry.get("verify"), list) or not entry["verify"]:
        return None
    costs = [entry.get("draft"), *entry["verify"]]
    if not all(type(cost) in (int, float) and 0 <= cost < LARGEST_COST for cost in costs) or 0 in entry["verify"]:
        return None
    return CostTable(float(costs[0]), tuple(map(float, costs[1:])))


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
