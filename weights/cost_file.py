"""Keeps measured cost tables beside a model: ``costs.json`` in its folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from decoding.costs import CostTable
from model import Decoder, InputError, LayerPlan
from weights.files import read_optional_json, write_json

FILE = "costs.json"


def kept_costs(
    folder: Path, model: Decoder, plan: LayerPlan | None, draft_model: str | None, measure: Callable[[], CostTable]
) -> CostTable:
    """The cost table of this model, draft, dtype and machine: from ``costs.json``, else measured and kept.

    A folder that cannot be written, or a damaged file, only means measuring again.
    """
    drafts = draft_model or ("lookup" if plan is None else f"skip {plan.skipped_attention} {plan.skipped_mlp}")
    key = f"{_machine(model.device)}, {str(model.dtype).removeprefix('torch.')}, {drafts}"
    try:
        kept = read_optional_json(folder / FILE)
        entry = kept.get(key)
        if isinstance(entry, dict):
            return CostTable(float(entry["draft"]), tuple(map(float, entry["verify"])))
    except (InputError, KeyError, TypeError, ValueError):
        kept = {}
    costs = measure()
    try:
        write_json(folder / FILE, {**kept, key: asdict(costs)})
    except OSError:
        return costs
    return costs


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
