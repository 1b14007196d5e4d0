"""The draft of a request: the drafter and the policy that its options ask for. Begin with ``choose``.

``DRAFTERS`` names the kinds of draft. A new one is a function that makes a ``Drafting``, and a line there;
``FILE.py:Class`` names a class in a file of the user.
"""

import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoding.drafters import BestOf, PromptLookup
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from decoding.run.bits import BitsTable, has_memory_for, measure_bits
from decoding.run.break_even import BreakEven
from decoding.run.calibration import calibration_texts, weigh_inputs
from decoding.run.cost_file import load_or_measure
from decoding.run.costs import CONTEXT, LONGEST_DRAFT, CostTable, measure_costs, measure_shared
from decoding.run.plan_file import DraftPlan, read_plan
from decoding.run.writer import GAMMA, Drafting, model_drafter, plain
from decoding.sampling import SamplingParams
from model import Decoder, InputError, LayerPlan, ModelConfig
from model.fast import accelerate
from model.plan import FULL, LOW_BITS
from weights.cli.command_line import say
from weights.cli.files import one_line
from weights.load import load_model, model_folder, read_config
from weights.tokenizer import Tokenizer

GAMMA_LOW_BITS = 5  # tokens drafted per round with --bits
LOOKUP_PRIORS = {"lookup 0": 0.0, "lookup 1": 0.3, "lookup 2": 0.5}  # acceptance before any is observed
LONGEST_ADAPTIVE = 8  # tokens per draft under Draft & Verify's adaptive exit
START_GREEDY, START_SAMPLED = 0.8, 0.5  # its first thresholds
CONTEXTS = (CONTEXT, 1024, 4096)  # tokens of context at which costs are measured: the nearest to the prompt's length
LENGTH_IS_FREE = ("lowbit", "exit", "skip", "model", "lookup", "class")  # kinds whose draft length the options may set
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

    ``kind`` is a name in DRAFTERS or ``FILE.py:Class``; ``plan`` a plan file; ``exit_layer`` the number of layers that
    an early exit runs; ``bits`` the width of the target's weights when it drafts; ``draft_model`` a folder or a name
    under ``weights/``; ``gamma`` the longest draft in tokens; ``adaptive`` Draft & Verify's exit;
    ``min_target_confidence`` the confidence of the target below which nothing is drafted.
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
        """Raises InputError for a value out of range, and for an option without effect on this kind of draft."""
        file, _, name = self.kind.rpartition(":")
        if self.kind not in DRAFTERS and not (file and name):
            raise InputError(f"no draft is called {self.kind!r:.80}: give {', '.join(DRAFTERS)} or FILE.py:Class")
        kind = self.kind if self.kind in DRAFTERS else "class"
        for option, kinds in USEFUL_WITH.items():
            if getattr(self, option) is not None and kind not in kinds:
                option = option.replace("_", "-")
                raise InputError(f"--{option} has no effect with --draft {self.kind}: give --draft {kinds[0]}")
        if self.gamma is not None and self.gamma < 0:
            raise InputError(f"gamma must be at least 0, found {self.gamma}")
        gate = self.min_target_confidence
        if gate is not None and not 0 <= gate <= 1:
            raise InputError(f"min-target-confidence must be from 0 to 1, found {gate}")
        if self.bits not in (None, *LOW_BITS):
            raise InputError(f"--bits must be {', '.join(map(str, LOW_BITS))}, found {self.bits}")
        if self.kind == "model" and self.draft_model is None:
            raise InputError("--draft model needs --draft-model DIR")

    def needs(self, folder: Path, config: ModelConfig) -> dict[str, Any]:
        """Arguments of ``weights.memory.estimate`` that depend on the draft: draft model, longest draft, plan.

        Bits that are chosen by measurement are not counted: they are used only if their copies fit. Raises InputError
        for a draft model or a plan that cannot be read.
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
    """The target of a draft and the texts it is to write.

    ``model`` is prepared (``model.fast.accelerate``); ``positions`` is the length of the longest text in tokens,
    ``coupling`` the name of the rule of verification, ``prompt`` the length of the prompt, 0 where it is not known.
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
        """Tokens of context at which costs are measured, one of ``CONTEXTS``."""
        return min(CONTEXTS, key=lambda tokens: abs(tokens - min(self.prompt, self.model.max_positions // 2)))


def choose(options: DraftOptions, setting: Setting) -> Drafting:
    """The drafting that the options ask for. Raises InputError where it is not possible."""
    return with_policy(make_drafting(options, setting), options, setting.params)


def make_drafting(options: DraftOptions, setting: Setting) -> Drafting:
    """The drafting of this kind with its default policy. Raises InputError for bits without kernels on this device."""
    fast = setting.model.fast_bits
    if options.bits and fast and options.bits not in fast:
        raise InputError(f"--bits {options.bits}: this device has kernels for {' and '.join(map(str, fast))} bits only")
    return DRAFTERS.get(options.kind, class_of_user)(options, setting)


def with_policy(drafting: Drafting, options: DraftOptions, params: SamplingParams) -> Drafting:
    """The same drafting under --adaptive, else --gamma, else its default policy, behind the confidence gate if asked.

    A drafting that is plain by default stays plain, unless --gamma is given.
    """
    chosen, gate = drafting.chosen, options.min_target_confidence
    threshold = chosen and chosen.threshold
    gamma = chosen.gamma if chosen and options.gamma is None else options.gamma

    def new_policy() -> Policy:
        policy = drafting.new_policy()
        if policy.gamma == 0 and options.gamma is None:
            return policy
        if options.adaptive:
            start = threshold or (START_SAMPLED if params.temperature else START_GREEDY)
            policy = AdaptiveExit(start, LONGEST_ADAPTIVE if gamma is None else gamma)
        elif options.gamma is not None or options.adaptive is False:
            policy = FixedLength(GAMMA if gamma is None else gamma)
        return policy if gate is None else ConfidenceGate(policy, gate)

    return replace(drafting, new_policy=new_policy)


def planned(setting: Setting, chosen: DraftPlan, name: str | None = None) -> Drafting:
    """The target under a layer plan, sharing its cache, with the policy that was chosen with the plan.

    Its low-bit copies are made now. Prints a line where they make drafts no faster.
    """
    model, plan = setting.model, chosen.plan
    if plan.has_low_bits and model.fast_bits:
        weigh_inputs(model, setting.folder, setting.tokenizer)
    model.prepare(plan)
    if plan.has_low_bits and not model.fast_bits:
        where = f"{model.dtype} on {model.device.type}"
        say(f"drafts in low bits are no faster here: there are no kernels for {where}")
    drafting = Drafting(plan_in_words(plan) if name is None else name, lambda cache: model_drafter(model, cache, plan))
    return replace(drafting, new_policy=lambda: chosen.new_policy(GAMMA), model=model, chosen=chosen)


def plan_in_words(plan: LayerPlan) -> str:
    """The number of sublayers that a plan skips, and the bits of the others."""
    attention, mlp = len(plan.skipped_attention), len(plan.skipped_mlp)
    left_out = f"skipping {attention} attention and {mlp} MLP sublayers, others" if attention or mlp else "all layers"
    bits = " and ".join(map(str, sorted({*plan.attention, *plan.mlp} - {0, FULL})))
    return f"{left_out} in {bits} bits" if bits else left_out.removesuffix(", others")


def lookup(options: DraftOptions, setting: Setting) -> Drafting:
    """Copies of the tokens that followed an earlier occurrence of the text's end."""
    model = setting.model
    return Drafting("prompt lookup", lambda cache: PromptLookup(model.vocab_size, model.device))


def early_exit(options: DraftOptions, setting: Setting) -> Drafting:
    """The first layers of the target, by default half of them."""
    layers = setting.model.num_layers
    chosen = find_plan(options, setting.folder, layers)
    name = f"exit at layer {layers - len(chosen.plan.skipped_mlp)} of {layers}"
    return planned(setting, chosen, name + (f", in {options.bits} bits" if options.bits else ""))


def low_bits(options: DraftOptions, setting: Setting) -> Drafting:
    """All layers of the target in low bits: those of --bits, else those of the largest measured gain."""
    model = setting.model
    if options.bits or not model.fast_bits:
        return planned(setting, find_plan(options, setting.folder, model.num_layers))
    table = bits_table(setting)
    best = table.best_plan(model.num_layers)
    if best is None:
        say(f"{table.in_words()}: decoding plainly; --bits N drafts nevertheless")
        return plain(model, "plain: no low bits gain here")
    say(table.in_words())
    return planned(setting, best)


def bits_table(setting: Setting) -> BitsTable:
    """Gains of drafts in each number of bits: kept ones, or measured now."""
    model, params, coupling = setting.model, setting.params, setting.coupling

    def measure() -> BitsTable:
        say("measuring which bits gain most for drafts on this machine: half a minute, kept for later runs")
        weigh_inputs(model, setting.folder, setting.tokenizer)
        return measure_bits(model, calibration_texts(model, setting.tokenizer, params), params, coupling)

    return load_or_measure(setting.folder, model, f"bits, {params}, {coupling}", BitsTable, measure)


def skip(options: DraftOptions, setting: Setting) -> Drafting:
    """The target without the sublayers that a plan file names; plain where the plan says that no draft pays."""
    chosen = find_plan(options, setting.folder, setting.model.num_layers)
    if chosen is None:
        raise InputError(f"{setting.folder} has no plan.json: give --plan FILE, or find a plan with python -m search")
    if chosen.gamma == 0 and options.gamma is None:
        return plain(setting.model, "plain: by the plan, no draft pays")
    return planned(setting, chosen)


def other_model(options: DraftOptions, setting: Setting) -> Drafting:
    """A smaller model of the same vocabulary, with a cache for itself; in the target's dtype, on its device."""
    folder = model_folder(options.draft_model)
    config, theirs, ours = read_config(folder), Tokenizer(folder), setting.tokenizer
    vocabulary = setting.model.vocab_size, ours.pieces, ours.special
    if vocabulary != (config.vocab_size, theirs.pieces, theirs.special):
        raise InputError(f"{folder} has another vocabulary: a draft model must share the target's tokenizer")
    if config.max_positions < setting.positions:
        raise InputError(f"{folder} has a context of {config.max_positions} tokens: lower --max-new-tokens")
    model = accelerate(load_model(folder, setting.model.dtype, setting.model.device))
    name = f"draft model {folder.name}"
    return Drafting(name, lambda cache: model_drafter(model, model.new_cache(cache.capacity)), model=model)


def auto(options: DraftOptions, setting: Setting) -> Drafting:
    """In each round the best of lookup, low bits and the plan, if any, by measured costs and past acceptance."""
    model, layers = setting.model, setting.model.num_layers
    ways: dict[str, Drafting] = {}
    costs: dict[str, CostTable] = {}
    priors = dict(LOOKUP_PRIORS)
    best = bits_table(setting).best_plan(layers) if model.fast_bits else None
    for name, chosen in {"low bits": best, "plan": find_plan(options, setting.folder, layers)}.items():
        if chosen is None or chosen.gamma == 0 or any(way.plan == chosen.plan for way in ways.values()):
            continue
        if chosen.plan.has_low_bits and not (model.fast_bits and has_memory_for(model, chosen.plan)):
            continue
        ways[name] = planned(setting, chosen)
        costs[name] = costs_of(ways[name], setting)
        if chosen.kept_share:
            priors[name] = chosen.kept_share
    ways["lookup"] = lookup(options, setting)
    measured = next(iter(costs.values()), None)
    costs["lookup"] = replace(measured, draft=0.0, drafts=()) if measured else costs_of(ways["lookup"], setting)
    return Drafting(
        "chosen each round: " + "; ".join(way.name for way in ways.values()),
        lambda cache: BestOf({name: way.new_drafter(cache) for name, way in ways.items()}),
        lambda: BreakEven(costs, priors=priors),
        model if len(ways) > 1 else None,
        next((way.chosen for way in ways.values()), None),
    )


def costs_of(way: Drafting, setting: Setting) -> CostTable:
    """Costs of a drafting on this machine: kept ones, or measured now (``ranks`` replaces this function)."""
    model, params, context, plan = setting.model, setting.params, setting.context, way.plan
    drafts = "lookup" if plan is None else f"attention {plan.attention} mlp {plan.mlp} head {plan.head}"

    def measure() -> CostTable:
        say(f"measuring the costs of drafts on this machine after {context} tokens, kept for later runs")
        costs = measure_costs(model, way.model, plan, params, setting.coupling, context=context)
        return measure_shared(model, way.model, plan, params, setting.coupling, costs)

    name = f"{drafts}, {params}, {setting.coupling}, after {context} tokens"
    return load_or_measure(setting.folder, model, name, CostTable, measure)


def class_of_user(options: DraftOptions, setting: Setting) -> Drafting:
    """An instance of the user's ``FILE.py:Class``, made with the target and its cache."""
    file, _, name = options.kind.rpartition(":")

    def explained(make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except Exception as error:  # the user's code may raise anything
            raise InputError(f"--draft {options.kind}: {type(error).__name__}: {one_line(error)}") from None

    found = explained(runpy.run_path, file).get(name)
    if found is None:
        raise InputError(f"--draft {options.kind}: {file} has no class {name}")
    return Drafting(f"{name} of {Path(file).name}", lambda cache: explained(found, setting.model, cache))


DRAFTERS: dict[str, Callable[[DraftOptions, Setting], Drafting]] = {
    "auto": auto,
    "none": lambda options, setting: plain(setting.model),
    "lookup": lookup,
    "skip": skip,
    "exit": early_exit,
    "lowbit": low_bits,
    "model": other_model,
}


def find_plan(options: DraftOptions, folder: Path, layers: int) -> DraftPlan | None:
    """The plan under which a target of this many layers drafts for itself; None where it does not.

    It is an early exit, all layers in low bits, the plan of --plan or the one in the model's folder, in the bits of
    --bits. Raises InputError for a plan that cannot be read.
    """
    chosen, shipped = None, folder / "plan.json"
    if options.kind == "exit":
        exit_layer = max(1, layers // 2) if options.exit_layer is None else options.exit_layer
        chosen = DraftPlan(LayerPlan.early_exit(layers, exit_layer))
    elif options.kind == "lowbit":
        chosen = DraftPlan(LayerPlan.full(layers).in_bits(LOW_BITS[0]), GAMMA_LOW_BITS)
    elif options.kind in ("skip", "auto") and (options.plan or shipped.exists()):
        chosen = read_plan(options.plan or shipped, layers, folder)
    return replace(chosen, plan=chosen.plan.in_bits(options.bits)) if chosen and options.bits else chosen
