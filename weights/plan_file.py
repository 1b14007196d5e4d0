"""Plan files: which sublayers a draft skips, as ``{"attn": [layer, ...], "mlp": [layer, ...]}``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model import InputError, LayerPlan
from weights.files import read_json


@dataclass(frozen=True)
class DraftPlan:
    """A layer plan with the draft length and exit threshold that were chosen with it (None: not given)."""

    plan: LayerPlan
    gamma: int | None = None
    threshold: float | None = None


def read_plan(path: Path, num_layers: int) -> DraftPlan:
    """Read a plan file for a model of ``num_layers`` layers. Raises InputError naming what is wrong."""
    raw = read_json(path)
    if not isinstance(raw, dict) or not {"attn", "mlp"} & set(raw):
        raise InputError(f'{path}: a plan file holds one object like {{"attn": [3, 7], "mlp": [5]}}')
    lists = {}
    for key in ("attn", "mlp"):
        layers = raw.get(key, [])
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise InputError(f"{path}: {key} must be a list of layer numbers, found {layers!r:.80}")
        lists[key] = layers
    gamma, threshold = raw.get("gamma"), raw.get("threshold")
    if gamma is not None and (type(gamma) is not int or gamma < 0):
        raise InputError(f"{path}: gamma must be a whole number of at least 0, found {gamma!r:.80}")
    if threshold is not None and (type(threshold) not in (int, float) or not 0 <= threshold <= 1):
        raise InputError(f"{path}: threshold must be a number from 0 to 1, found {threshold!r:.80}")
    try:
        plan = LayerPlan.skipping(num_layers, lists["attn"], lists["mlp"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return DraftPlan(plan, gamma, threshold)
