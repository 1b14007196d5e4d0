"""The draft of a request: the drafter and the policy that its options ask for.

``DRAFTERS`` names the ways to draft. A new one is a function that makes a ``Drafting`` and a line there;
``FILE.py:Class`` names a class of the user's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoding.drafters import BestOf, Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from decoding.run.bits import BitsTable, has_memory_for, measure_bits
from decoding.run.break_even import BreakEven
from decoding.run.cost_file import kept, kept_costs
from decoding.run.costs import CONTEXT, LONGEST_DRAFT, CostTable, measure_costs
from decoding.run.importance import weigh_inputs, write_texts
from decoding.run.plan_file import DraftPlan, read_plan
from decoding.sampling import SamplingParams
from model import Decoder, InputError, KVCache, LayerPlan, ModelConfig
from model.plan import FULL, LOW_BITS
from weights.cli.command_line import say
from weights.cli.files import one_line
from weights.draft_model import load_draft_model
from weights.load import read_config
from weights.names import model_folder
from weights.tokenizer import Tokenizer

GAMMA = 4  # tokens drafted per round where nothing else is said
GAMMA_LOW_BITS = 5  # of drafts in a number of bits that the user names
LOOKUP_PRIORS = {"lookup 0": 0.0, "lookup 1": 0.3, "lookup 2": 0.5}  # acceptance before any was seen
LONGEST_ADAPTIVE = 8  # of Draft & Verify's adaptive exit
START_GREEDY, START_SAMPLED = 0.8, 0.5  # its first thresholds
CONTEXTS = (CONTEXT, 1024, 4096)  # tokens of context at which costs are measured: the nearest to the prompt's length
USEFUL_WITH = {  # the drafts on which an option has an effect; any but "none" where an option is not named
    "plan": ("skip", "auto"),
    "exit_layer": ("exit",),
    "bits": ("lowbit", "exit", "skip"),
    "draft_model": ("model",),
}


@dataclass(frozen=True)
class DraftOptions:
    """How to draft, as a user asks for it. None: not said.

    ``kind`` is a name in DRAFTERS or ``FILE.py:Class``; ``plan`` a plan file; ``exit_layer`` the layers that an early
    exit runs; ``bits`` those of the target's own weights that draft; ``draft_model`` a folder or a name under
    ``weights/``; ``gamma`` the longest draft; ``adaptive`` asks for Draft & Verify's exit; ``min_target_confidence``
    for drafts only while the target is sure.
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
        """Raises InputError for a value out of range, and for an option that this kind of draft would ignore."""
        file, _, name = self.kind.rpartition(":")
        if self.kind not in DRAFTERS and not (file and name):
            raise InputError(f"no draft is called {self.kind!r:.80}: give {', '.join(DRAFTERS)} or FILE.py:Class")
        if self.gamma is not None and self.gamma < 0:
            raise InputError(f"gamma must be at least 0, found {self.gamma}")
        gate = self.min_target_confidence
        if gate is not None and not 0 <= gate <= 1:
            raise InputError(f"min-target-confidence must be from 0 to 1, found {gate}")
        if self.bits not in (None, *LOW_BITS):
            raise InputError(f"--bits must be {', '.join(map(str, LOW_BITS))}, found {self.bits}")
        for name in ("plan", "exit_layer", "bits", "draft_model", "gamma", "adaptive", "min_target_confidence"):
            kinds, option = USEFUL_WITH.get(name), "--" + name.replace("_", "-")
            if getattr(self, name) is None:
                continue
            if self.kind == "auto" and name in ("gamma", "adaptive"):
                raise InputError(f"{option} has no effect with --draft auto, which chooses lengths: name another draft")
            if self.kind not in kinds if kinds else self.kind == "none":
                better = kinds[0] if kinds else "lowbit"
                raise InputError(f"{option} has no effect with --draft {self.kind}: give --draft {better}")
        if self.kind == "model" and self.draft_model is None:
            raise InputError("--draft model needs --draft-model DIR")

    def needs(self, folder: Path, config: ModelConfig) -> dict[str, Any]:
        """The memory estimate's arguments that depend on the draft: a draft model, a longest draft, a plan in low bits.

        Bits that are chosen by measurement take part only if their copies fit, so they are not counted. Raises
        InputError for a draft model or a plan that cannot be read.
        """
        measured = self.kind == "lowbit" and self.bits is None
        plan = None if measured else find_plan(self, folder, config.num_layers)
        return {
            "draft": read_config(model_folder(self.draft_model)) if self.draft_model else None,
            "longest_draft": max(LONGEST_ADAPTIVE, LONGEST_DRAFT) if self.gamma is None else self.gamma,
            "plan": plan and plan.plan,
        }


@dataclass(frozen=True)
class Setting:
    """The target of a choice and its circumstances.

    The prepared target with its folder and tokenizer, the sampling parameters, the longest text in tokens, the rule of
    verification, and the tokens of the prompt, as far as it is known.
    """

    folder: Path
    model: Decoder
    tokenizer: Tokenizer
    params: SamplingParams
    positions: int
    coupling: str = "ratio"
    prompt: int = 0

    @property
    def context(self) -> int:
        """The tokens of context at which costs are measured, one of ``CONTEXTS``."""
        return min(CONTEXTS, key=lambda tokens: abs(tokens - min(self.prompt, self.model.max_positions // 2)))


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


def make_steps(model: Decoder, cache: KVCache, plan: LayerPlan | None = None) -> None:
    """Let a model with static steps make them now, while no text is timed."""
    if step := getattr(model, "step_of", None):
        step(cache, plan or LayerPlan.full(model.num_layers))


def model_drafter(model: Decoder, cache: KVCache, plan: LayerPlan | None = None) -> ModelDrafter:
    """A drafter that is ready to draft."""
    make_steps(model, cache, plan)
    return ModelDrafter(model, cache, plan)


def planned(setting: Setting, chosen: DraftPlan, name: str | None = None) -> Drafting:
    """The target under a layer plan, sharing its cache, with the policy that was chosen with the plan.

    Its low-bit copies are made now. A line says so where they are not those that the plan asks for.
    """
    model, plan = setting.model, chosen.plan
    if plan.has_low_bits and model.fast_bits:
        weigh_inputs(model, setting.folder, setting.tokenizer)
    model.prepare(plan)
    if plan.has_low_bits and (trouble := low_bits_trouble(model)):
        say(trouble)
    drafting = Drafting(plan_in_words(plan) if name is None else name, lambda cache: model_drafter(model, cache, plan))
    return replace(drafting, new_policy=lambda: chosen.new_policy(GAMMA), model=model, chosen=chosen)


def low_bits_trouble(model: Decoder) -> str | None:
    """Why drafts in low bits save no time here; None where they do."""
    if not model.fast_bits:
        return f"drafts in low bits are no faster here: there are no kernels for {model.dtype} on {model.device.type}"
    return model.twins.trouble


def plan_in_words(plan: LayerPlan) -> str:
    """What a plan leaves out, and in how many bits the rest is."""
    skipped = len(plan.skipped_attention), len(plan.skipped_mlp)
    left_out = "skipping {} attention and {} MLP sublayers".format(*skipped)
    bits = " and ".join(map(str, sorted({*plan.attention, *plan.mlp} - {0, FULL})))
    if not any(skipped):
        return f"all layers in {bits} bits" if bits else "all layers"
    return f"{left_out}, others in {bits} bits" if bits else left_out


def lookup(options: DraftOptions, setting: Setting) -> Drafting:
    """Copy what followed the last time the text went like this."""
    model = setting.model
    return Drafting("prompt lookup", lambda cache: PromptLookup(model.vocab_size, model.device))


def early_exit(options: DraftOptions, setting: Setting) -> Drafting:
    """The first layers of the target, by default half of them."""
    layers = setting.model.num_layers
    chosen = find_plan(options, setting.folder, layers)
    name = f"exit at layer {layers - len(chosen.plan.skipped_mlp)} of {layers}"
    return planned(setting, chosen, name + (f", in {options.bits} bits" if options.bits else ""))


def low_bits(options: DraftOptions, setting: Setting) -> Drafting:
    """All layers of the target, rounded to few bits: those of --bits, else those that were measured to gain most."""
    model = setting.model
    if options.bits or not model.fast_bits:
        return planned(setting, find_plan(options, setting.folder, model.num_layers))
    table = bits_table(setting)
    if table.best is None:
        say(f"{bits_in_words(table)}: decoding plainly; --bits N drafts nevertheless")
        return replace(plain(model), name="plain: no low bits gain here")
    say(bits_in_words(table))
    return planned(setting, measured_plan(table, model.num_layers))


def bits_table(setting: Setting) -> BitsTable:
    """What drafts in each number of bits gain: kept, or measured now."""
    model, params, coupling = setting.model, setting.params, setting.coupling

    def measure() -> BitsTable:
        say("measuring once how many bits a draft needs here")
        weigh_inputs(model, setting.folder, setting.tokenizer)
        return measure_bits(model, write_texts(model, setting.tokenizer, params), params, coupling)

    return kept(setting.folder, model, f"bits, {params}, {coupling}", BitsTable, measure)


def measured_plan(table: BitsTable, layers: int) -> DraftPlan:
    """The plan of the bits that gain most."""
    best = table.best
    plan = LayerPlan.full(layers).in_bits(table.bits[best])
    return DraftPlan(plan, table.gamma[best], acceptance=table.acceptance[best])


def bits_in_words(table: BitsTable) -> str:
    """The predicted speed-up of every number of bits, in a line."""
    if not table.bits:
        return "drafts in low bits do not fit into the free memory"
    gains = [f"{bits} bits {gain:.2f}" for bits, gain in zip(table.bits, table.speedup, strict=True)]
    return "predicted speed of drafts, in times of plain decoding: " + ", ".join(gains)


def skip(options: DraftOptions, setting: Setting) -> Drafting:
    """The target without the sublayers that a plan file names; plain where the plan says that no draft pays."""
    chosen = find_plan(options, setting.folder, setting.model.num_layers)
    if chosen is None:
        raise InputError(f"--draft skip needs --plan FILE: {setting.folder} has no plan.json of its own")
    if chosen.gamma == 0 and options.gamma is None:
        return replace(plain(setting.model), name="plain: by the plan, no draft pays")
    return planned(setting, chosen)


def other_model(options: DraftOptions, setting: Setting) -> Drafting:
    """Another model of the same vocabulary, with a cache of its own."""
    folder = model_folder(options.draft_model or "")
    model = load_draft_model(folder, setting.model, setting.tokenizer.vocabulary, setting.positions)
    name = f"draft model {folder.name}"
    return Drafting(name, lambda cache: model_drafter(model, model.new_cache(cache.capacity)), model=model)


def auto(options: DraftOptions, setting: Setting) -> Drafting:
    """Each round the best of lookup, the plan if there is one, and low bits, by measured costs and past acceptance."""
    model, layers = setting.model, setting.model.num_layers
    chosen = find_plan(options, setting.folder, layers)
    ways: dict[str, Drafting] = {}
    costs: dict[str, CostTable] = {}
    priors = dict(LOOKUP_PRIORS)
    table = bits_table(setting) if model.fast_bits else BitsTable((), (), (), (), (), ())
    plans = {"low bits": None if table.best is None else measured_plan(table, layers)}
    if chosen and chosen.gamma != 0 and (model.fast_bits or not chosen.plan.has_low_bits):
        plans["plan"] = chosen
    for name, draft in plans.items():
        same = draft is not None and any(way.plan == draft.plan for way in ways.values())
        if draft and not same and (not draft.plan.has_low_bits or has_memory_for(model, draft.plan)):
            ways[name] = planned(setting, draft)
            costs[name] = costs_of(ways[name], setting)
            priors |= {name: draft.acceptance} if draft.acceptance else {}
    ways["lookup"] = lookup(options, setting)
    measured = next(iter(costs.values()), None)
    costs["lookup"] = replace(measured, draft=0.0) if measured else costs_of(ways["lookup"], setting)
    return Drafting(
        " or ".join(way.name for way in ways.values()),
        lambda cache: BestOf({name: way.new_drafter(cache) for name, way in ways.items()}),
        lambda: BreakEven(costs, priors=priors),
        model if len(ways) > 1 else None,
        next((way.chosen for way in ways.values()), None),
    )


def costs_of(way: Drafting, setting: Setting) -> CostTable:
    """The costs of a way to draft on this machine: kept ones, or measured now (``ranks`` replaces this)."""
    model, params, context = setting.model, setting.params, setting.context

    def measure() -> CostTable:
        say(f"measuring once what drafts cost on this machine after {context} tokens")
        return measure_costs(model, way.model, way.plan, params, context=context)

    return kept_costs(setting.folder, model, way.plan, params, measure, context)


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
    "lowbit": low_bits,
    "model": other_model,
}


def choose(options: DraftOptions, setting: Setting) -> Drafting:
    """The drafting that the options ask for. Raises InputError when it is not possible."""
    return with_policy(make_drafting(options, setting), options, setting.params)


def make_drafting(options: DraftOptions, setting: Setting) -> Drafting:
    """The draft with its default policy. Raises InputError for bits that this device has no kernels for."""
    fast = setting.model.fast_bits
    if options.bits and fast and options.bits not in fast:
        raise InputError(f"--bits {options.bits}: this device has kernels for {' and '.join(map(str, fast))} bits only")
    return DRAFTERS.get(options.kind, own)(options, setting)


def with_policy(drafting: Drafting, options: DraftOptions, params: SamplingParams) -> Drafting:
    """The same with the policy that the options ask for."""
    return replace(drafting, new_policy=policy_maker(options, params, drafting))


def policy_maker(options: DraftOptions, params: SamplingParams, drafting: Drafting) -> Callable[[], Policy]:
    """How long to draft: --adaptive, else --gamma, else as the drafting has it; gated by the target's confidence."""
    chosen = drafting.chosen or DraftPlan(LayerPlan((), ()))
    gamma = chosen.gamma if options.gamma is None else options.gamma
    fixed = options.gamma is not None or options.adaptive is False

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


def find_plan(options: DraftOptions, folder: Path, layers: int) -> DraftPlan | None:
    """The plan under which a target of this many layers drafts for itself; None where it does not.

    An early exit, all layers in low bits, or the plan of --plan, else the model folder's, if it has one: each in the
    bits of --bits. Raises InputError for a plan that cannot be read.
    """
    chosen, own_plan = None, folder / "plan.json"
    if options.kind == "exit":
        exit_layer = max(1, layers // 2) if options.exit_layer is None else options.exit_layer
        chosen = DraftPlan(LayerPlan.early_exit(layers, exit_layer))
    elif options.kind == "lowbit":
        chosen = DraftPlan(LayerPlan.full(layers).in_bits(LOW_BITS[0]), GAMMA_LOW_BITS)
    elif options.kind in ("skip", "auto") and (options.plan or own_plan.exists()):
        chosen = read_plan(options.plan or own_plan, layers, folder)
    return replace(chosen, plan=chosen.plan.in_bits(options.bits)) if chosen and options.bits else chosen
