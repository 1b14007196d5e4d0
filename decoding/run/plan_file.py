"""Plan files: the sublayers that a draft skips, as ``{"attn": [layer, ...], "mlp": [layer, ...]}``.

Optional: ``bits`` of the other sublayers, one number for all or one per layer, ``{"attn": [...], "mlp": [...]}``;
``head_bits``, those of the head; 16 means the checkpoint's weights. ``gamma``, ``threshold``, ``acceptance_rate``, and
``model``, the fingerprint of the model for which the plan was made. Other keys are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    lists = {}
    for key in ("attn", "mlp"):
        layers = raw.get(key, [])
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise InputError(f"{path}: {key} must be a list of layer numbers, found {layers!r:.80}")
        lists[key] = layers
    gamma, threshold = raw.get("gamma"), raw.get("threshold")
    if gamma is not None and (type(gamma) is not int or gamma < 0):
        raise InputError(f"{path}: gamma must be a whole number of at least 0, found {gamma!r:.80}")
    for key in ("threshold", "acceptance_rate"):
        share = raw.get(key)
        if share is not None and (type(share) not in (int, float) or not 0 <= share <= 1):
            raise InputError(f"{path}: {key} must be a number from 0 to 1, found {share!r:.80}")
    try:
        plan = LayerPlan.skipping(num_layers, lists["attn"], lists["mlp"])
        plan = _with_bits(plan, raw.get("bits", FULL), raw.get("head_bits", FULL))
        return DraftPlan(plan, gamma, threshold, raw.get("acceptance_rate"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _with_bits(plan: LayerPlan, bits: Any, head: Any) -> LayerPlan:
    """The plan with its sublayers in the bits of a plan file. Raises InputError for other values."""
    layers, known = plan.num_layers, (*LOW_BITS, FULL)
    given = bits if isinstance(bits, dict) else {"attn": [bits] * layers, "mlp": [bits] * layers}
    for name, runs in given.items():
        numbers = runs if isinstance(runs, list) else []
        if name not in ("attn", "mlp") or len(numbers) != layers or not all(each in (0, *known) for each in numbers):
            raise InputError(
                f"bits must be 4, 6, 8 or {FULL}, or {layers} of them (0: skipped) for attn and mlp, found {bits!r:.80}"
            )
    if head not in known:
        raise InputError(f"head_bits must be 4, 6, 8 or {FULL}, found {head!r:.80}")
    attention, mlp = (
        tuple(int(each) if runs else 0 for each, runs in zip(given.get(name, kept), kept, strict=True))
        for name, kept in (("attn", plan.attention), ("mlp", plan.mlp))
    )
    return LayerPlan(attention, mlp, int(head))
