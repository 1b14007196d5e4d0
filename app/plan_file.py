"""Plan files: the sublayers that a draft skips, as ``{"attn": [layer, ...], "mlp": [layer, ...]}``.

Optional: ``bits`` of the other sublayers, one number for all or one per layer, ``{"attn": [...],
"mlp": [...]}``; ``head_bits``, those of the head; 16 means the checkpoint's weights. ``window``,
the number of the newest tokens that the draft sees; ``gamma``, ``threshold``, ``alpha``, and
``model``, the fingerprint of the model for which the plan was made; and the provenance that a
search writes.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.common.files import read_json, write_json
from decoding.policies import AdaptiveExit, FixedLength, Policy
from model.errors import InputError
from model.plan import FULL, LOW_BITS, LayerPlan
from weights.load import model_fingerprint

GAMMA = 4  # tokens drafted per round by default
LONGEST_DRAFT = 8  # upper bound of a draft's length where no option sets it
SUBLAYERS = ("attn", "mlp")
WIDTHS = (*LOW_BITS, FULL)
READ = {*SUBLAYERS, "bits", "head_bits", "window", "gamma", "threshold", "alpha", "model"}
PROVENANCE = {
    "acceptance_rate",
    "predicted_speedup",
    "measured_speedup",
    "sampling",
    "dtype",
    "machine",
    "date",
    "study",
}


@dataclass(frozen=True)
class DraftPlan:
    """A layer plan, with the draft length and exit threshold of its file (None: not given).

    A ``gamma`` of 0 means that no draft pays: decode plainly. ``alpha`` is the expected probability
    that the target accepts a drafted token after accepted ones: α in the formulas.
    """

    plan: LayerPlan
    gamma: int | None = None
    threshold: float | None = None
    alpha: float | None = None

    def new_policy(self) -> Policy:
        """Return the plan's policy: drafts of its length, ended early by its threshold, if any."""
        gamma = GAMMA if self.gamma is None else self.gamma
        return (
            AdaptiveExit(self.threshold, gamma, step=0.0) if self.threshold else FixedLength(gamma)
        )


def write_plan(path: Path, chosen: DraftPlan, fingerprint: str, provenance: dict[str, Any]) -> None:
    """Write a plan file for the model with this fingerprint, atomically. Raises InputError if it
    cannot be written.
    """
    plan = chosen.plan
    content = {
        "attn": plan.skipped_attention,
        "mlp": plan.skipped_mlp,
        "window": plan.window,
        "gamma": chosen.gamma,
        "threshold": chosen.threshold,
        "alpha": chosen.alpha,
        "model": fingerprint,
    }
    if plan.has_low_bits:
        content |= {"bits": {"attn": plan.attention, "mlp": plan.mlp}, "head_bits": plan.head}
    write_json(path, content | provenance)


def read_plan(path: Path, num_layers: int, folder: Path | None = None) -> DraftPlan:
    """Return the plan of a file, for a model of ``num_layers`` layers. Raises InputError.

    With the model's ``folder`` given, a plan that names another model is refused.
    """
    raw = read_json(path)
    if not isinstance(raw, dict) or not {"attn", "mlp", "bits"} & raw.keys():
        raise InputError(
            f'{path}: a plan file holds one object like {{"attn": [3, 7], "mlp": [5]}}'
        )
    for key in raw.keys() - READ - PROVENANCE:
        raise InputError(f"{path}: the key {key!r:.80} is unknown: correct it, or leave it out")

    def check(fits: bool, key: str, wanted: str) -> None:
        if not fits:
            raise InputError(f"{path}: {key} must be {wanted}, found {raw[key]!r:.80}")

    if folder is not None and raw.get("model") and raw["model"] != model_fingerprint(folder):
        raise InputError(
            f"{path} was made for another model than {folder}: run python -m search for this one"
        )
    skipped = {name: raw.get(name, []) for name in SUBLAYERS}
    for name, layers in skipped.items():
        is_list = whole_numbers(layers, range(num_layers)) and len(set(layers)) == len(layers)
        check(is_list, name, f"a list of different layers from 0 to {num_layers - 1}")
    bits = raw.get("bits", FULL)
    if isinstance(bits, dict):
        fits = all(
            whole_numbers(each, (0, *WIDTHS)) and len(each) == num_layers for each in bits.values()
        )
        wanted = f"lists of {num_layers} numbers of bits for attn and mlp"
        check(fits and bits.keys() <= {*SUBLAYERS}, "bits", wanted)
    else:
        check(whole_numbers([bits], WIDTHS), "bits", "4, 8 or 16")
        bits = dict.fromkeys(SUBLAYERS, [bits] * num_layers)
    head = raw.get("head_bits", FULL)
    check(whole_numbers([head], WIDTHS), "head_bits", "4, 8 or 16")
    for key, kinds, least, most, wanted in (
        ("window", (int,), 1, math.inf, "a whole number of at least 1"),
        ("gamma", (int,), 0, math.inf, "a whole number of at least 0"),
        ("threshold", (int, float), 0, 1, "a number from 0 to 1"),
        ("alpha", (int, float), 0, 1, "a number from 0 to 1"),
    ):
        value = raw.get(key)
        check(value is None or (type(value) in kinds and least <= value <= most), key, wanted)
    runs = (
        tuple(
            0 if layer in skipped[name] else width
            for layer, width in enumerate(bits.get(name, [FULL] * num_layers))
        )
        for name in SUBLAYERS
    )
    plan = LayerPlan(*runs, head, raw.get("window"))
    return DraftPlan(plan, raw.get("gamma"), raw.get("threshold"), raw.get("alpha"))


def whole_numbers(value: Any, allowed: Collection[int]) -> bool:
    """Return whether a value of JSON is a list of such whole numbers; true and 1.0 are none."""
    return isinstance(value, list) and all(type(each) is int and each in allowed for each in value)
