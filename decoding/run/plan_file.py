"""Plan files: the sublayers that a draft skips, as ``{"attn": [layer, ...], "mlp": [layer, ...]}``.

Optional: ``bits`` of the other sublayers, one number for all or one per layer, ``{"attn": [...], "mlp": [...]}``;
``head_bits``, those of the head; 16 means the checkpoint's weights. ``gamma``, ``threshold``, ``acceptance_rate``, and
``model``, the fingerprint of the model for which the plan was made. Other keys are ignored.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from decoding.policies import AdaptiveExit, FixedLength, Policy
from model import InputError, LayerPlan
from model.plan import FULL, LOW_BITS
from weights.cli.files import explaining, read_json, write_json
from weights.load import model_fingerprint


@dataclass(frozen=True)
class DraftPlan:
    """A layer plan with the draft length and exit threshold that were chosen with it (None: not given).

    A ``gamma`` of 0 means that no draft pays: decode plainly. ``acceptance`` is the share of drafted tokens that the
    target accepted in measurements.
    """

    plan: LayerPlan
    gamma: int | None = None
    threshold: float | None = None
    acceptance: float | None = None

    def new_policy(self, default_gamma: int) -> Policy:
        """The policy of the plan: drafts of its length, ended early by its fixed threshold, if any."""
        gamma = default_gamma if self.gamma is None else self.gamma
        return AdaptiveExit(self.threshold, gamma, step=0.0) if self.threshold else FixedLength(gamma)


def write_plan(path: Path, chosen: DraftPlan, fingerprint: str, provenance: dict[str, Any]) -> None:
    """Write a plan file for the model with this fingerprint, atomically. Raises InputError if it cannot be written."""
    content = {
        "attn": chosen.plan.skipped_attention,
        "mlp": chosen.plan.skipped_mlp,
        **_bits_of(chosen.plan),
        "gamma": chosen.gamma,
        "threshold": chosen.threshold,
        "model": fingerprint,
        **provenance,
    }
    with explaining(f"{path} cannot be written"):
        write_json(path, content)


def _bits_of(plan: LayerPlan) -> dict[str, Any]:
    if not plan.has_low_bits:
        return {}
    (first, *others) = {*plan.attention, *plan.mlp} - {0} or {FULL}
    return {"bits": {"attn": plan.attention, "mlp": plan.mlp} if others else first, "head_bits": plan.head}


def read_plan(path: Path, num_layers: int, folder: Path | None = None) -> DraftPlan:
    """The plan of a file, for a model of ``num_layers`` layers. Raises InputError naming the mistake.

    With the model's ``folder`` given, a plan that names another model is refused.
    """
    raw = read_json(path)
    if not isinstance(raw, dict) or not {"attn", "mlp", "bits"} & set(raw):
        raise InputError(f'{path}: a plan file holds one object like {{"attn": [3, 7], "mlp": [5]}}')
    made_for = raw.get("model")
    if folder is not None and made_for is not None and made_for != model_fingerprint(folder):
        raise InputError(f"{path} was made for another model than {folder}: run python -m search for this one")
    raw = {"attn": [], "mlp": [], "bits": FULL, "head_bits": FULL} | raw
    every = f"4, 6, 8 or {FULL}"
    runs = f"{every}, or {num_layers} of them (0: skipped) for attn and mlp"
    for key, valid, wanted in (
        ("attn", _is_set_of_layers, "a list of layer numbers, each once"),
        ("mlp", _is_set_of_layers, "a list of layer numbers, each once"),
        ("bits", partial(_are_bits, layers=num_layers), runs),
        ("head_bits", _is_width, every),
        ("gamma", lambda gamma: gamma is None or (type(gamma) is int and gamma >= 0), "a whole number of at least 0"),
        ("threshold", _is_share, "a number from 0 to 1"),
        ("acceptance_rate", _is_share, "a number from 0 to 1"),
    ):
        if not valid(raw.get(key)):
            raise InputError(f"{path}: {key} must be {wanted}, found {raw[key]!r:.80}")
    try:
        plan = LayerPlan.skipping(num_layers, raw["attn"], raw["mlp"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    bits = raw["bits"] if isinstance(raw["bits"], dict) else dict.fromkeys(("attn", "mlp"), [raw["bits"]] * num_layers)
    attention, mlp = (
        tuple(each if runs else 0 for each, runs in zip(bits.get(name, kept), kept, strict=True))
        for name, kept in (("attn", plan.attention), ("mlp", plan.mlp))
    )
    plan = LayerPlan(attention, mlp, raw["head_bits"])
    return DraftPlan(plan, raw.get("gamma"), raw.get("threshold"), raw.get("acceptance_rate"))


def _is_set_of_layers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value) and len(set(value)) == len(value)


def _is_width(value: Any) -> bool:
    return type(value) is int and value in (*LOW_BITS, FULL)


def _are_bits(value: Any, layers: int) -> bool:
    """Whether these are bits of all sublayers, or of each."""
    if not isinstance(value, dict):
        return _is_width(value)
    lists = all(isinstance(each, list) and len(each) == layers for each in value.values())
    return (
        lists
        and set(value) <= {"attn", "mlp"}
        and all(_is_width(bits) or (bits == 0 and type(bits) is int) for each in value.values() for bits in each)
    )


def _is_share(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= 1)
