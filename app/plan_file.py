"""Plans of drafts, and the files that hold them.

A file has the sublayers that a draft skips, as ``{"attn": [layer, ...], "mlp": [layer, ...]}``.
Optional: ``bits`` of the other sublayers, one number for all or one per layer, ``{"attn": [...],
"mlp": [...]}``; ``head_bits``, those of the head; 16 means the checkpoint's weights. In lists, 0
skips the sublayer. ``window``, the number of the newest tokens that the draft sees; ``gamma``,
``threshold``, ``alpha``, and ``model``, the fingerprint of the model for which the plan was made;
and the provenance that a search writes. Knows nothing of options.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from app.common.files import read_json, write_json
from model.decoder import Decoder
from model.errors import InputError
from model.plan import FULL, LOW_BITS, LayerPlan
from weights.load import model_fingerprint

GAMMA = 4  # tokens drafted per round by default
GAMMA_LOW_BITS = 5  # the same in low bits
LONGEST_DRAFT = 8  # tokens of the longest draft where neither an option nor a plan gives more
MOST_GAMMA = 64  # the largest ``gamma`` of a plan file
LONG = 2048  # tokens of a text beyond which windows may pay
SUBLAYERS = ("attn", "mlp")
WIDTHS = (*LOW_BITS, FULL)
PROVENANCE = {
    "model",
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


PLAN_KEYS = [each.name for each in fields(DraftPlan) if each.name != "plan"]  # keys of a file too


def runnable(model: Decoder, plan: LayerPlan) -> LayerPlan:
    """Return the plan as the device runs it: a head in eight bits gets four where only four have a
    kernel. There, on a GPU, it would read the checkpoint's own weights.
    """
    return replace(plan, head=4) if plan.head == 8 and model.abilities.low_bits == (4,) else plan


def copies_of(plan: LayerPlan) -> LayerPlan:
    """Return the plan that stands for its low-bit copies: without its window, which changes none.

    Plans with and without a window share their copies.
    """
    return replace(plan, window=None)


def plan_in_words(plan: LayerPlan) -> str:
    """Return the layer of a plan's exit or its number of skipped sublayers, the bits of the others,
    and the plan's window.
    """
    attention = plan.skipped_attention
    mlp = plan.skipped_mlp
    exit_layer = plan.num_layers - len(mlp)
    bits = " and ".join(map(str, sorted({*plan.attention, *plan.mlp} - {0, FULL})))
    if not (attention or mlp):
        words = "all layers"
    elif attention == mlp == [*range(exit_layer, plan.num_layers)]:
        words = f"exit at layer {exit_layer} of {plan.num_layers}"
    else:
        others = ", others" if bits else ""
        words = f"skipping {len(attention)} attention and {len(mlp)} MLP sublayers{others}"
    words += f" in {bits} bits" if bits else ""
    return f"{words}, newest {plan.window} tokens" if plan.window else words


def write_plan(path: Path, chosen: DraftPlan, fingerprint: str, provenance: dict[str, Any]) -> None:
    """Write a plan file for the model with this fingerprint, atomically. Raises InputError if it
    cannot be written.
    """
    plan = chosen.plan
    content = {
        "attn": plan.skipped_attention,
        "mlp": plan.skipped_mlp,
        "window": plan.window,
        **{name: getattr(chosen, name) for name in PLAN_KEYS},
        "model": fingerprint,
    }
    if plan.has_low_bits:
        content |= {"bits": {"attn": plan.attention, "mlp": plan.mlp}, "head_bits": plan.head}
    write_json(path, content | provenance)


def read_plan(path: Path | str, num_layers: int, folder: Path | None = None) -> DraftPlan:
    """Return the plan of a file, for a model of ``num_layers`` layers. Raises InputError.

    With the model's ``folder`` given, a plan that names another model is refused.
    """
    raw = read_json(path)
    if not isinstance(raw, dict) or not {"attn", "mlp", "bits"} & raw.keys():
        raise InputError(
            f'{path}: a plan file holds one object like {{"attn": [3, 7], "mlp": [5]}}'
        )
    keys = wanted_of(num_layers)
    for key in raw.keys() - keys.keys() - PROVENANCE:
        raise InputError(f"{path}: the key {key!r:.80} is unknown: correct it, or leave it out")
    if folder is not None and raw.get("model") and raw["model"] != model_fingerprint(folder):
        raise InputError(
            f"{path} was made for another model than {folder}: run python -m search for this one"
        )
    for key, (fits, wanted) in keys.items():
        if raw.get(key) is not None and not fits(raw[key]):
            raise InputError(f"{path}: {key} must be {wanted}, found {raw[key]!r:.80}")
    bits = raw.get("bits") or FULL
    if not isinstance(bits, dict):
        bits = dict.fromkeys(SUBLAYERS, [bits] * num_layers)
    attention, mlp = (
        tuple(
            0 if layer in (raw.get(name) or ()) else width
            for layer, width in enumerate(bits.get(name, [FULL] * num_layers))
        )
        for name in SUBLAYERS
    )
    if not any(attention + mlp):
        raise InputError(f"{path} skips every layer: leave one sublayer at least")
    plan = LayerPlan(attention, mlp, raw.get("head_bits") or FULL, raw.get("window"))
    return DraftPlan(plan, **{name: raw.get(name) for name in PLAN_KEYS})


def wanted_of(num_layers: int) -> dict[str, tuple[Callable[[Any], bool], str]]:
    """Return which values of JSON fit each key of a plan file, as a function and in words."""

    def are_layers(value: Any) -> bool:
        return whole_numbers(value, range(num_layers)) and len({*value}) == len(value)

    def are_bits(value: Any) -> bool:
        if not isinstance(value, dict):
            return whole_numbers([value], WIDTHS)
        return value.keys() <= {*SUBLAYERS} and all(
            whole_numbers(each, (0, *WIDTHS)) and len(each) == num_layers for each in value.values()
        )

    layers = (are_layers, f"a list of different layers from 0 to {num_layers - 1}")
    rate = (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1")
    return {
        "attn": layers,
        "mlp": layers,
        "bits": (are_bits, f"4, 8 or 16, or lists of {num_layers} such numbers for attn and mlp"),
        "head_bits": (lambda value: whole_numbers([value], WIDTHS), "4, 8 or 16"),
        "window": (
            lambda value: type(value) is int and value >= 1,
            "a whole number of at least 1",
        ),
        "gamma": (
            lambda value: type(value) is int and 0 <= value <= MOST_GAMMA,
            f"a whole number from 0 to {MOST_GAMMA}",
        ),
        "threshold": rate,
        "alpha": rate,
    }


def whole_numbers(value: Any, allowed: Collection[int]) -> bool:
    """Return whether a value of JSON is a list of such whole numbers; true and 1.0 are none."""
    return isinstance(value, list) and all(type(each) is int and each in allowed for each in value)
