"""Choice of a draft: from ``DraftOptions`` to a ``Drafting``, a drafter with its policy.

``Setting.drafting`` has two steps. ``--draft lowbit`` may serve as an example.

1. ``Setting.made_for``: the drafting of this kind, made by its function in ``DRAFTERS``, here
   ``self_draft``, under the plan that ``plan_for`` finds. Its ``Preparation`` reads the low-bit
   copies, or makes them. It is made once for all texts.
2. ``policy_for``: the policy of ``--gamma``, ``--adaptive`` and ``--min-target-confidence``, which
   each text may have of its own.

A new kind is a function that makes a ``Drafting``, a line in ``DRAFTERS`` and one in ``KINDS``;
``FILE.py:Class`` names a class in a file of the user.
"""

import math
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from app.command_line import say
from app.draft_options import DraftOptions, plan_for, plans_for_auto, policy_for
from app.files import one_line
from app.plan_file import DraftPlan
from app.writer import Drafting, Preparation, model_drafter, plain
from decoding.break_even import KNOWN, BreakEven
from decoding.drafters import BestOf, Drafter, ForcedTokens, PromptLookup, check_drafter
from decoding.sampling import SamplingParams
from model import FULL, Decoder, InputError, KVCache, LayerPlan
from model.fast import accelerate
from weights.importance import importance
from weights.load import load_model, model_folder, pick_dtype, read_config
from weights.memory import bytes_read, has_memory_for
from weights.tokenizer import Tokenizer

# Acceptance of tokens that are known without a model before any is observed; "forced 0": of the
# guesses after forced ones.
KNOWN_PRIORS = {"lookup 1": 0.3, "lookup 2": 0.5, "forced 0": 0.9}
LONGEST_OF_AUTO = 7  # tokens per draft: a ninth row is beyond a tile and may cost much more
ROUND_OVERHEAD = 20e6  # work beside the weights, per round or draft step, in bytes read meanwhile
VERIFY_SLOPE = 0.03  # of a plain round, for each drafted token that it verifies, in a large model
VERIFY_OVERHEAD = 2e6  # and, beside that, in bytes read meanwhile


@dataclass
class Setting:
    """The target of drafts, and the texts that it is to write.

    ``model`` is prepared (``model.fast.accelerate``); ``positions`` is the length of the longest
    text in tokens, ``coupling`` the name of the rule of verification. ``made`` are the draftings so
    far, by their options without those of the policy.
    """

    folder: Path
    model: Decoder
    tokenizer: Tokenizer
    params: SamplingParams
    positions: int
    coupling: str = "ratio"
    made: dict[DraftOptions, Drafting] = field(default_factory=dict)

    def drafting(self, options: DraftOptions, params: SamplingParams) -> Drafting:
        """The drafting of a text: the one made for its options, under its own policy.

        Raises InputError where it is not possible, such as for bits without kernels on this device.
        """
        made = self.made_for(options)
        return replace(made, new_policy=policy_for(options, params, made.new_policy, made.chosen))

    def made_for(self, options: DraftOptions) -> Drafting:
        """The drafting of these options without those of the policy, made at their first use."""
        made_of = options.without_policy
        if made_of not in self.made:
            make = no_draft if options.gamma == 0 else DRAFTERS.get(options.kind, class_of_user)
            drafting = make(made_of, self)
            # Of auto on a CPU, the rest while a text is written: see ``BestOf``.
            at_once = options.kind != "auto" or self.model.device.type != "cpu"
            drafting.preparation.work(math.inf if at_once else 0)
            self.made[made_of] = drafting
        return self.made[made_of]


def load_setting(
    folder: Path, device: torch.device, dtype: str, params: SamplingParams, coupling: str
) -> Setting:
    """The prepared target of a folder, for texts up to its context; ``dtype`` as in --dtype."""
    tokenizer = Tokenizer(folder)
    model = accelerate(load_model(folder, pick_dtype(dtype, folder, device), device))
    return Setting(folder, model, tokenizer, params, model.max_positions, coupling)


def no_draft(options: DraftOptions, setting: Setting) -> Drafting:
    """Plain decoding, as --draft none or --gamma 0 ask for it."""
    name = "plain" if options.gamma is None else "plain: --gamma 0 drafts nothing"
    return plain(setting.model, name)


def lookup(options: DraftOptions, setting: Setting) -> Drafting:
    """Copies of the tokens that followed an earlier occurrence of the text's end."""
    return Drafting(
        "prompt lookup",
        lambda cache: PromptLookup(setting.model.vocab_size, setting.model.device),
    )


def self_draft(options: DraftOptions, setting: Setting) -> Drafting:
    """The target under the plan of --draft exit, lowbit or skip; plain where a plan file says that
    no draft pays.
    """
    model = setting.model
    fast = model.fast_bits
    if options.bits and fast and options.bits not in fast:
        kernels = " and ".join(map(str, fast))
        raise InputError(f"--bits {options.bits}: this device has kernels for {kernels} bits only")
    chosen = plan_for(options, setting.folder, model.num_layers)
    if chosen is None:
        raise InputError(
            f"{setting.folder} has no plan.json: give --plan FILE, or find a plan with python -m"
            " search"
        )
    if chosen.gamma == 0 and options.gamma is None:
        return plain(model, "plain: by the plan, no draft pays")
    return by_plan(setting, chosen)


def by_plan(setting: Setting, chosen: DraftPlan) -> Drafting:
    """The target under a layer plan, sharing its cache, with the policy of the plan.

    A head in eight bits gets four where only four have a kernel: there, on a GPU, it would read the
    checkpoint's own weights. Prints a line where low bits make drafts no faster.
    """
    model = setting.model
    if chosen.plan.head == 8 and model.fast_bits == (4,):
        chosen = replace(chosen, plan=replace(chosen.plan, head=4))
    plan = chosen.plan
    if plan.has_low_bits and not model.fast_bits:
        where = f"{model.dtype} on {model.device.type}"
        say(f"drafts in low bits are no faster here: there are no kernels for {where}")
    return Drafting(
        plan_in_words(plan),
        lambda cache: model_drafter(model, cache, plan),
        chosen.new_policy,
        chosen,
        Preparation(lambda: preparing(setting, plan)),
    )


def preparing(setting: Setting, plan: LayerPlan) -> Iterator[None]:
    """The pieces of a plan's preparation: its low-bit copies, read or made, and its tables. All
    importance of weights is read or measured in the first piece.
    """
    model = setting.model
    if plan.has_low_bits and model.fast_bits:
        importance(model, setting.tokenizer, setting.folder)
        yield
    model.prepare(plan)


def plan_in_words(plan: LayerPlan) -> str:
    """The layer of a plan's exit or its number of skipped sublayers, and the bits of the others."""
    attention = plan.skipped_attention
    mlp = plan.skipped_mlp
    exit_layer = plan.num_layers - len(mlp)
    bits = " and ".join(map(str, sorted({*plan.attention, *plan.mlp} - {0, FULL})))
    if not (attention or mlp):
        words = "all layers"
    elif attention == mlp == [*range(exit_layer, plan.num_layers)]:
        words = f"exit at layer {exit_layer} of {plan.num_layers}"
    else:
        words = f"skipping {len(attention)} attention and {len(mlp)} MLP sublayers"
        words += ", others" if bits else ""
    return f"{words} in {bits} bits" if bits else words


def other_model(options: DraftOptions, setting: Setting) -> Drafting:
    """A smaller model of the same vocabulary, with a cache of its own."""
    folder = model_folder(options.draft_model)
    config = read_config(folder)
    theirs = Tokenizer(folder)
    ours = setting.tokenizer
    vocabulary = setting.model.vocab_size, ours.pieces, ours.special
    if vocabulary != (config.vocab_size, theirs.pieces, theirs.special):
        raise InputError(
            f"{folder} has another vocabulary: a draft model must share the target's tokenizer"
        )
    if config.max_positions < setting.positions:
        raise InputError(
            f"{folder} has a context of {config.max_positions} tokens: lower --max-new-tokens or"
            " --context"
        )
    model = accelerate(load_model(folder, setting.model.dtype, setting.model.device))
    return Drafting(
        f"draft model {folder.name}",
        lambda cache: model_drafter(model, model.new_cache(cache.capacity)),
    )


def class_of_user(options: DraftOptions, setting: Setting) -> Drafting:
    """Instances of the user's ``FILE.py:Class``, made with the target and its cache.

    Raises InputError where there is no such class. An error in a method of an instance becomes an
    InputError too, whose cause is the original one.
    """
    kind = options.kind
    file, _, name = kind.rpartition(":")
    with blaming(kind):
        found = runpy.run_path(file).get(name)
    if found is None:
        raise InputError(f"--draft {kind}: {file} has no class {name}")

    def make(cache: KVCache) -> Drafter:
        with blaming(kind):
            drafter = found(setting.model, cache)
            check_drafter(drafter)
            for method in ("propose", "rollback"):
                setattr(drafter, method, blaming(kind, in_text=True)(getattr(drafter, method)))
        return drafter

    return Drafting(f"{name} of {Path(file).name}", make)


@contextmanager
def blaming(kind: str, in_text: bool = False) -> Iterator[None]:
    """Context that turns any error of the user's class into an InputError that names its line.

    ``in_text``: with the original error as its cause, so that the traceback is shown.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        file = kind.rpartition(":")[0]
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        place = f"{kind}, line {lines[-1]}" if lines else kind
        said = InputError(f"--draft {place}: {type(error).__name__}: {one_line(error)}")
        raise said from (error if in_text else None)


def auto(options: DraftOptions, setting: Setting) -> Drafting:
    """In each round the best of lookup, low bits and the plan, if any: see ``BreakEven``."""
    model = setting.model
    ways: dict[str, Drafting] = {}
    for name, chosen in plans_for_auto(options, setting.folder, model.num_layers).items():
        plans = [chosen.plan, *(way.plan for way in ways.values())]
        is_fast = model.fast_bits or not chosen.plan.has_low_bits
        if is_fast and has_memory_for(model, plans):
            ways[name] = by_plan(setting, chosen)
    slopes = first_slopes(model, {name: way.plan for name, way in ways.items()})
    priors = {name: way.chosen.kept_share for name, way in ways.items() if way.chosen.kept_share}
    ways["lookup"] = lookup(options, setting)
    forced = ForcedTokens(model.vocab_size, model.device)  # an empty draft without constraints
    preparation = Preparation(
        lambda: chain.from_iterable(way.preparation.begin() for way in ways.values())
    )
    return Drafting(
        "chosen each round: " + "; ".join(way.name for way in ways.values()),
        lambda cache: BestOf(
            {name: way.new_drafter(cache) for name, way in ways.items()} | {"forced": forced},
            lambda: preparation.is_done,
        ),
        lambda: BreakEven(
            slopes,
            LONGEST_OF_AUTO,
            priors=KNOWN_PRIORS | priors,
            by_confidence=model.device.type == "cpu",  # a GPU would synchronise for each token
        ),
        next(iter(ways.values())).chosen,
        preparation,
    )


def first_slopes(model: Decoder, plans: Mapping[str, LayerPlan]) -> dict[str, float]:
    """Time that a token adds to a round, in plain rounds, before any is measured: of known tokens
    their verification, of those drafted under a plan also its draft step, by the bytes of weights
    that it reads.
    """

    def reading(plan: LayerPlan) -> float:
        return bytes_read(model.config, plan, model.dtype.itemsize) + ROUND_OVERHEAD

    full = reading(LayerPlan.full(model.num_layers))
    verification = VERIFY_SLOPE + VERIFY_OVERHEAD / full
    drafting = {name: reading(plan) / full for name, plan in plans.items()}
    return {KNOWN: verification} | {name: verification + step for name, step in drafting.items()}


DRAFTERS: dict[str, Callable[[DraftOptions, Setting], Drafting]] = {
    "auto": auto,
    "none": no_draft,
    "lookup": lookup,
    "skip": self_draft,
    "exit": self_draft,
    "lowbit": self_draft,
    "model": other_model,
}
