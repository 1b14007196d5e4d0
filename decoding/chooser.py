"""Which drafter and policy a request gets: the one place where that is decided.

``DRAFTERS`` names the ways to draft. A new one is a function that makes a ``Drafting`` and a line there;
``FILE.py:Class`` names a class of the reader's own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from decoding.cost_file import kept_costs
from decoding.costs import LONGEST_DRAFT, CostTable, measure_costs
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.plan_file import DraftPlan, read_plan
from decoding.policies import AdaptiveExit, BreakEven, ConfidenceGate, FixedLength, Policy
from decoding.sampling import SamplingParams
from model import Decoder, InputError, KVCache, LayerPlan
from weights.command_line import say
from weights.draft_model import load_draft_model
from weights.files import is_there, one_line
from weights.names import model_folder
from weights.tokenizer import Tokenizer

GAMMA = 4  # tokens drafted a round where nothing else is said
LONGEST_ADAPTIVE = 8  # of Draft & Verify's adaptive exit
START_GREEDY, START_SAMPLED = 0.8, 0.5  # its first thresholds


@dataclass(frozen=True)
class DraftOptions:
    """How to draft, as a user asks for it. None: not said.

    ``kind`` is a name in DRAFTERS or ``FILE.py:Class``; ``plan`` a plan file; ``exit_layer`` the layers that an early
    exit runs; ``draft_model`` a folder or a name under ``weights/``; ``gamma`` the longest draft; ``adaptive`` asks for
    Draft & Verify's exit; ``min_target_confidence`` for drafts only while the target is sure.
    """

    kind: str = "auto"
    plan: Path | None = None
    exit_layer: int | None = None
    draft_model: str | None = None
    gamma: int | None = None
    adaptive: bool | None = None
    min_target_confidence: float | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range, and for an option that this kind of draft would ignore."""
        if self.kind not in DRAFTERS and ":" not in self.kind:
            raise InputError(f"no draft is called {self.kind!r:.80}: give {', '.join(DRAFTERS)} or FILE.py:Class")
        FixedLength(self.gamma or 0)
        if self.min_target_confidence is not None:
            ConfidenceGate(FixedLength(0), self.min_target_confidence)
        useful_with = {"plan": ("skip", "auto"), "exit_layer": ("exit",), "draft_model": ("model",)}
        for name in ("plan", "exit_layer", "draft_model", "gamma", "adaptive", "min_target_confidence"):
            kinds = useful_with.get(name, ("auto",))
            useless = self.kind not in kinds if name in useful_with else self.kind == "none"
            if getattr(self, name) is not None and useless:
                option = "--" + name.replace("_", "-")
                raise InputError(f"{option} has no effect with --draft {self.kind}: give --draft {kinds[0]}")
        if self.kind == "model" and self.draft_model is None:
            raise InputError("--draft model needs --draft-model DIR")

    @property
    def longest_draft(self) -> int:
        """The most tokens that a round may draft, for the memory estimate, before a plan file is read."""
        return max(LONGEST_ADAPTIVE, LONGEST_DRAFT) if self.gamma is None else self.gamma


@dataclass(frozen=True)
class Setting:
    """What a choice depends on besides the options.

    The prepared target with its folder and tokenizer, the sampling parameters, and the longest text in tokens.
    """

    folder: Path
    model: Decoder
    tokenizer: Tokenizer
    params: SamplingParams
    positions: int


@dataclass(frozen=True)
class Drafting:
    """A way to draft.

    ``name`` is for people; ``new_drafter`` takes the target's cache, which the drafter may share; ``new_policy`` makes
    a fresh policy for a text. ``model`` is what drafts, the target itself under the ``chosen`` plan or one of its own;
    None where no model does.
    """

    name: str
    new_drafter: Callable[[KVCache], Drafter]
    new_policy: Callable[[], Policy] = lambda: FixedLength(GAMMA)
    model: Decoder | None = None
    chosen: DraftPlan | None = None

    @property
    def plan(self) -> LayerPlan | None:
        """The layer plan under which the target drafts for itself; None where it does not."""
        return self.chosen and self.chosen.plan


def plain(model: Decoder) -> Drafting:
    """No draft: what everything is compared with."""
    return Drafting("plain", lambda cache: NoDraft(model.vocab_size, model.device), lambda: FixedLength(0))


def planned(model: Decoder, chosen: DraftPlan, name: str | None = None) -> Drafting:
    """The target under a layer plan, sharing its cache, with the policy that was chosen with the plan."""
    plan = chosen.plan
    name = name or f"skipping {len(plan.skipped_attention)} attention and {len(plan.skipped_mlp)} MLP sublayers"
    return Drafting(
        name, lambda cache: ModelDrafter(model, cache, plan), lambda: chosen.new_policy(GAMMA), model, chosen
    )


def lookup(options: DraftOptions, setting: Setting) -> Drafting:
    """Copy what followed the last time the text went like this."""
    model = setting.model
    return Drafting("prompt lookup", lambda cache: PromptLookup(model.vocab_size, model.device))


def early_exit(options: DraftOptions, setting: Setting) -> Drafting:
    """The first layers of the target, by default half of them."""
    layers = setting.model.num_layers
    exit_layer = max(1, layers // 2) if options.exit_layer is None else options.exit_layer
    chosen = DraftPlan(LayerPlan.early_exit(layers, exit_layer))
    return planned(setting.model, chosen, f"exit at layer {exit_layer} of {layers}")


def skip(options: DraftOptions, setting: Setting) -> Drafting:
    """The target without the sublayers that a plan file names; plain where the plan says that no draft pays."""
    chosen = find_plan(options, setting)
    if chosen is None:
        raise InputError(f"--draft skip needs --plan FILE: {setting.folder} has no plan.json of its own")
    if chosen.gamma == 0 and options.gamma is None:
        return replace(plain(setting.model), name="plain: by the plan, no draft pays")
    return planned(setting.model, chosen)


def other_model(options: DraftOptions, setting: Setting) -> Drafting:
    """Another model of the same vocabulary, with a cache of its own."""
    folder = model_folder(options.draft_model or "")
    model = load_draft_model(folder, setting.model, setting.tokenizer.vocabulary, setting.positions)
    name = f"draft model {folder.name}"
    return Drafting(name, lambda cache: ModelDrafter(model, model.new_cache(cache.capacity)), model=model)


def auto(options: DraftOptions, setting: Setting) -> Drafting:
    """The plan if there is one that pays, else lookup; as much as measured costs and past acceptance say will pay."""
    chosen = find_plan(options, setting)
    off = chosen is None or (chosen.gamma == 0 and options.gamma is None)
    drafting = lookup(options, setting) if off else planned(setting.model, chosen)
    if options.adaptive or options.gamma is not None:
        return drafting
    model, params = setting.model, setting.params

    def measure() -> CostTable:
        say("measuring once what drafts cost on this machine")
        return measure_costs(model, drafting.model, drafting.plan, params)

    costs = kept_costs(setting.folder, model, drafting.plan, params, measure)
    return replace(drafting, new_policy=lambda: BreakEven(costs))


def own(options: DraftOptions, setting: Setting) -> Drafting:
    """A class of the reader's own, ``FILE.py:Class``, made with the target and its cache."""
    file, _, name = options.kind.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"own_drafter_{Path(file).stem}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise InputError(f"--draft {options.kind}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up

    def make(cache: KVCache) -> Drafter:
        try:
            spec.loader.exec_module(module)
            return getattr(module, name)(setting.model, cache)
        except Exception as error:  # the file is a program: it can fail in any way
            raise InputError(f"--draft {options.kind}: {type(error).__name__}: {one_line(error)}") from None

    return Drafting(f"{name} of {Path(file).name}", make)


DRAFTERS: dict[str, Callable[[DraftOptions, Setting], Drafting]] = {
    "auto": auto,
    "none": lambda options, setting: plain(setting.model),
    "lookup": lookup,
    "skip": skip,
    "exit": early_exit,
    "model": other_model,
}


def choose(options: DraftOptions, setting: Setting) -> Drafting:
    """The drafting that the options ask for. Raises InputError when it cannot be had."""
    return with_policy(make_drafting(options, setting), options, setting.params)


def make_drafting(options: DraftOptions, setting: Setting) -> Drafting:
    """What drafts, with the policy that is its own."""
    return DRAFTERS.get(options.kind, own)(options, setting)


def with_policy(drafting: Drafting, options: DraftOptions, params: SamplingParams) -> Drafting:
    """The same with the policy that the options ask for."""
    return replace(drafting, new_policy=policy_maker(options, params, drafting))


def policy_maker(options: DraftOptions, params: SamplingParams, drafting: Drafting) -> Callable[[], Policy]:
    """How long to draft: --adaptive, else --gamma, else as the drafting has it; gated by the target's confidence."""
    chosen = drafting.chosen or DraftPlan(LayerPlan((), ()))
    gamma = chosen.gamma if options.gamma is None else options.gamma
    fixed = options.gamma is not None or (options.adaptive is False and options.kind != "auto")

    def make() -> Policy:
        policy = drafting.new_policy()
        if policy.gamma == 0 and options.gamma is None:  # no draft pays: nothing to decide
            return policy
        if options.adaptive:
            start = chosen.threshold or (START_SAMPLED if params.temperature else START_GREEDY)
            policy = AdaptiveExit(start, LONGEST_ADAPTIVE if gamma is None else gamma)
        elif fixed:
            policy = FixedLength(GAMMA if gamma is None else gamma)
        gate = options.min_target_confidence
        return policy if gate is None else ConfidenceGate(policy, gate)

    return make


def find_plan(options: DraftOptions, setting: Setting) -> DraftPlan | None:
    """The plan of --plan, else the model folder's own, if it has one."""
    own_plan = setting.folder / "plan.json"
    if options.plan is None and not is_there(own_plan):
        return None
    return read_plan(options.plan or own_plan, setting.model.num_layers, setting.folder)
