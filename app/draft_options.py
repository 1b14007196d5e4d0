"""Options of drafting: those of one text, checked, and the layer plan and the policy they mean.

``--draft lowbit`` may serve as an example: ``plan_for`` gives all layers in four bits, and
``policy_for``, without further options, that plan's own policy: five tokens per draft. Both depend
on the options and the model's config only, so that memory can be estimated before any weight is
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from app.plan_file import GAMMA, DraftPlan, read_plan
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from decoding.sampling import SamplingParams
from model import InputError, LayerPlan

KINDS = {  # of draft, with their descriptions in --help
    "auto": "in each round the best of lowbit, lookup and a layer plan, or none",
    "none": "plain decoding",
    "lookup": "copies what followed the same words earlier in the text",
    "skip": "the model without some sublayers, by a layer plan (--plan)",
    "exit": "the model's first layers (--exit-layer)",
    "lowbit": "the model with all weights in four bits (--bits)",
    "model": "a smaller model with the same tokenizer (--draft-model)",
}
BITS = 4  # of a low-bit draft by default
GAMMA_LOW_BITS = 5  # tokens drafted per round with --draft lowbit
PRIOR_LOW_BITS = 0.85  # acceptance of a draft in four bits before any is observed
LONGEST_ADAPTIVE = 8  # tokens per draft under Draft & Verify's adaptive exit
START_GREEDY = 0.8  # its first threshold
START_SAMPLED = 0.5
# kinds whose draft length the options may set
LENGTH_IS_FREE = ("lowbit", "exit", "skip", "model", "lookup", "class")
USEFUL_WITH = {  # kinds of draft on which an option has an effect; "class" is one of the user
    "plan": ("skip", "auto"),
    "exit_layer": ("exit",),
    "bits": ("lowbit", "exit", "skip"),
    "draft_model": ("model",),
    "gamma": LENGTH_IS_FREE,
    "adaptive": LENGTH_IS_FREE,
    "min_target_confidence": (*LENGTH_IS_FREE, "auto"),
}


@dataclass(frozen=True)
class DraftOptions:
    """Options of drafting, as on the command line. None: not given.

    ``kind`` is one of KINDS or ``FILE.py:Class``; ``plan`` a plan file; ``exit_layer`` the
    number of layers that an early exit runs; ``bits`` the width of the target's weights when it
    drafts; ``draft_model`` a folder or a name under ``weights/``; ``gamma`` the longest draft in
    tokens; ``adaptive`` Draft & Verify's exit; ``min_target_confidence`` the confidence of the
    target below which nothing is drafted.
    """

    kind: str = "auto"
    plan: Path | None = None
    exit_layer: int | None = None
    bits: int | None = None
    draft_model: str | None = None
    gamma: int | None = None
    adaptive: bool | None = None
    min_target_confidence: float | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range, and for an option without effect."""
        file, _, name = self.kind.rpartition(":")
        if self.kind not in KINDS and not (file and name):
            raise InputError(
                f"no draft is called {self.kind!r:.80}: give {', '.join(KINDS)} or FILE.py:Class",
                "draft",
            )
        kind = self.kind if self.kind in KINDS else "class"
        for option, kinds in USEFUL_WITH.items():
            if getattr(self, option) is not None and kind not in kinds:
                raise InputError(
                    f"--{option.replace('_', '-')} has no effect with --draft {self.kind}:"
                    f" give --draft {kinds[0]}",
                    option,
                )
        if self.gamma is not None and self.gamma < 0:
            raise InputError(f"--gamma must be at least 0, found {self.gamma}", "gamma")
        gate = self.min_target_confidence
        if gate is not None and not 0 <= gate <= 1:
            raise InputError(
                f"--min-target-confidence must be from 0 to 1, found {gate}",
                "min_target_confidence",
            )
        if self.kind == "model" and self.draft_model is None:
            raise InputError("--draft model needs --draft-model DIR", "draft_model")

    @property
    def without_policy(self) -> DraftOptions:
        """These options without those of the policy: those that a drafter is made by.

        A length stays where it decides whether there is a drafter: --gamma 0, and any beside a
        plan file, which may say that no draft pays.
        """
        gamma = self.gamma if self.gamma == 0 or self.kind == "skip" else None
        return replace(self, gamma=gamma, adaptive=None, min_target_confidence=None)


def plan_for(options: DraftOptions, folder: Path, layers: int) -> DraftPlan | None:
    """The plan under which the target drafts for itself; None where --draft has none.

    Of exit the first layers, by default half of them; of lowbit all layers, by default in four
    bits; of skip and auto the plan of --plan, else that of the model's folder, if any. Raises
    InputError for a plan that cannot be read.
    """
    shipped = folder / "plan.json"
    if options.kind == "exit":
        exit_layer = max(1, layers // 2) if options.exit_layer is None else options.exit_layer
        chosen = DraftPlan(LayerPlan.early_exit(layers, exit_layer))
    elif options.kind == "lowbit":
        plan = LayerPlan.full(layers).in_bits(BITS)
        chosen = DraftPlan(plan, GAMMA_LOW_BITS, kept_share=PRIOR_LOW_BITS)
    elif options.plan or (options.kind in ("skip", "auto") and shipped.exists()):
        chosen = read_plan(options.plan or shipped, layers, folder)
    else:
        return None
    return replace(chosen, plan=chosen.plan.in_bits(options.bits)) if options.bits else chosen


def plans_for_auto(options: DraftOptions, folder: Path, layers: int) -> dict[str, DraftPlan]:
    """The plans by name that may pay for self-drafts."""
    plans = {"low bits": plan_for(DraftOptions("lowbit"), folder, layers)}
    given = plan_for(options, folder, layers)
    if given and given.gamma != 0 and given.plan != plans["low bits"].plan:
        plans["plan"] = given
    return plans


def policy_for(
    options: DraftOptions,
    params: SamplingParams,
    default: Callable[[], Policy],
    plan: DraftPlan | None,
) -> Callable[[], Policy]:
    """The maker of a text's policy: that of --gamma and --adaptive, else the ``default`` one of the
    drafting, behind the confidence gate if asked.

    A length that is not given is that of the ``plan``, if any; so is the adaptive exit's first
    threshold. A drafting that is plain stays plain, unless --gamma asks for drafts.
    """
    if not options.gamma and default().gamma == 0:
        return default
    gamma = options.gamma or (plan and plan.gamma)
    ungated = default
    if options.adaptive:
        first = START_SAMPLED if params.temperature else START_GREEDY
        threshold = (plan and plan.threshold) or first
        ungated = partial(AdaptiveExit, threshold, gamma or LONGEST_ADAPTIVE)
    elif options.gamma or options.adaptive is False:
        ungated = partial(FixedLength, gamma or GAMMA)
    gate = options.min_target_confidence
    return ungated if gate is None else lambda: ConfidenceGate(ungated(), gate)
