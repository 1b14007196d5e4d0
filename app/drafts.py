"""Drafts: from options to a ``Strategy``, the drafter and the policy of a text.

``KINDS`` has the values of ``--draft``. Take ``lowbit`` as an example. Its plan is
``low_bit_plan``, all layers in four bits. Its maker is ``by_plan``: it asks the session for this
plan, lets it make the low-bit copies, and gives a ``ModelDrafter`` under it. ``policy_of`` gives
the policy: what --gamma and --adaptive do not say, the plan says. A new kind is a function like
``by_plan`` and a row in ``KINDS``.

A plan passes four steps. ``low_bit_plan``, ``exit_plan`` or ``given_plan`` makes it, by the kind.
``LoadedModel.plan_for`` applies --bits and --window. ``runnable`` fits it to the kernels of the
device, and ``plan_drafter`` has its copies and steps made. ``auto`` takes several plans:
``LoadedModel.optional_plans`` has its candidates, ``plans_at_hand`` those that fit and pay, and
``short_sighted`` the same with windows.

Knows nothing of screens and requests.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.plan_file import GAMMA, GAMMA_LOW_BITS, DraftPlan, plan_in_words, runnable
from decoding.drafters import CheckedDrafter, Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.model_port import Model
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from model.errors import InputError, explaining, typed_line
from model.plan import LayerPlan
from weights.load import model_folder
from weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.loaded import LoadedModel
    from app.options import Options
    from app.sample import Sample, Slot
    from app.session import Session

LONGEST_ADAPTIVE = 8  # tokens per draft under Draft & Verify's adaptive exit
START_GREEDY = 0.8  # first threshold of that exit
START_SAMPLED = 0.5
BITS = 4  # of a low-bit draft by default
PRIOR_LOW_BITS = 0.85  # acceptance of such a draft before any is observed


class Strategy(NamedTuple):
    """Drafter and policy of a text, with a ``name`` that is shown."""

    name: str
    drafter: Drafter
    policy: Policy


def strategy_of(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy of a text. The cache of the slot holds its prompt, and a draft may share
    this cache.

    ``target`` is the model as the loop calls it. Raises InputError where the draft is not possible.
    """
    options = sample.options
    if options.gamma == 0:
        return plain("plain: --gamma 0 drafts nothing")
    with explaining(
        f"--draft {options.draft} lacks a file of this project", (ModuleNotFoundError,)
    ):
        name, drafter, policy = kind_of(options.draft).make(session, sample, slot, target)
    if options.min_target_confidence is not None and policy.gamma:
        policy = ConfidenceGate(policy, options.min_target_confidence)
    if target is not session.model and options.draws_alike:
        from decoding.together import ForFew

        drafter = ForFew(drafter, target)
    if sample.grammar:
        from decoding.grammar import ForcedTokens

        drafter = ForcedTokens(drafter, sample.grammar)
    return Strategy(name, drafter, policy)


def policy_of(options: Options, gamma: int | None = None, threshold: float | None = None) -> Policy:
    """Return the policy of --gamma and --adaptive. What they do not say, a plan may say: its draft
    length ``gamma``, and the confidence ``threshold`` below which its drafts end.
    """
    length = options.gamma or gamma
    if options.adaptive:
        first = START_SAMPLED if options.temperature else START_GREEDY
        return AdaptiveExit(threshold or first, length or LONGEST_ADAPTIVE)
    if threshold and options.gamma is None and options.adaptive is None:
        return AdaptiveExit(threshold, length or GAMMA, step=0.0)
    return FixedLength(length or GAMMA)


def plain(name: str = "plain") -> Strategy:
    """Return plain decoding: an empty draft."""
    return Strategy(name, NoDraft(), FixedLength(0))


def lookup(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy that copies what followed an earlier occurrence of the text's end."""
    return Strategy("prompt lookup", PromptLookup(), policy_of(sample.options))


def exit_plan(loaded: LoadedModel, options: Options) -> DraftPlan:
    """Return the plan of the first layers, by default half of them. Raises InputError."""
    layers = loaded.config.num_layers
    exit_layer = max(1, layers // 2) if options.exit_layer is None else options.exit_layer
    return DraftPlan(LayerPlan.early_exit(layers, exit_layer))


def low_bit_plan(loaded: LoadedModel, options: Options) -> DraftPlan:
    """Return the plan of all layers in four bits, unless --bits says otherwise later."""
    plan = LayerPlan.full(loaded.config.num_layers).in_bits(BITS)
    return DraftPlan(plan, GAMMA_LOW_BITS, alpha=PRIOR_LOW_BITS)


def given_plan(loaded: LoadedModel, options: Options) -> DraftPlan | None:
    """Return the plan of --plan, else that of the model's folder, if any.

    ``Session.merged`` has read the file of --plan: the option is a plan by now. Raises InputError
    for the folder's file where it cannot be read, and for a plan of another model.
    """
    shipped = loaded.folder / "plan.json"
    if options.plan is None and not shipped.exists():
        return None
    chosen = options.plan or loaded.read_plan(shipped)
    if chosen.plan.num_layers != loaded.config.num_layers:
        raise InputError(
            f"the plan is one of {chosen.plan.num_layers} layers, but {loaded.name} has"
            f" {loaded.config.num_layers}: find one for this model with python -m search",
            "plan",
        )
    return chosen


def by_plan(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the target under the plan of --draft exit, lowbit or skip; plain where a plan file
    says that no draft pays.
    """
    options = sample.options
    possible = session.model.abilities.low_bits
    if options.bits and possible and options.bits not in possible:
        raise InputError(
            f"--bits {options.bits}: this device has kernels for"
            f" {' and '.join(map(str, possible))} bits only"
        )
    chosen = session.plan_for(options)
    if chosen is None:
        raise InputError(
            f"{session.name} has no plan.json, and no --plan is given: find one with"
            " python -m search"
        )
    if chosen.gamma == 0 and options.gamma is None:
        return plain("plain: by the plan, no draft pays")
    plan = runnable(session.model, chosen.plan)
    return Strategy(
        plan_in_words(plan),
        plan_drafter(session, plan, slot, target),
        policy_of(options, chosen.gamma, chosen.threshold),
    )


def plan_drafter(session: Session, plan: LayerPlan, slot: Slot, target: Model) -> ModelDrafter:
    """Return a drafter by the target under a plan, whose copies and steps are made now."""
    session.prepare(plan)
    session.model.make_step(slot.cache, plan)
    return ModelDrafter(target, slot.cache, plan)


def other_model(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return a smaller model of the same tokens, with a cache of its own, which reads the prompt
    when it first drafts.
    """
    folder = model_folder(sample.options.draft_model)
    if folder not in session.draft_models:
        if not are_alike(session.tokenizer, Tokenizer(folder)):
            raise InputError(
                f"{folder} has another vocabulary: a draft model must share the target's tokenizer"
            )
        session.check_draft_memory(folder, slot.cache.capacity)
        session.draft_models[folder] = session.load(folder)
    model = session.draft_models[folder]
    if model not in slot.draft_caches:
        slot.draft_caches[model] = model.new_cache(slot.cache.capacity)
    cache = slot.draft_caches[model]
    cache.truncate(0)
    model.make_step(cache)
    if target is not session.model:
        from decoding.together import Together

        model = Together(model, target)
    name = f"draft model {folder.name}"
    if model.max_positions < sample.source.longest:
        name += f", up to its context of {model.max_positions} tokens"
    return Strategy(name, ModelDrafter(model, cache), policy_of(sample.options))


def are_alike(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Return whether the ids that two tokenizers have in common are the same tokens.

    One may have more tokens. A token without bytes, which is reserved or a control token, may have
    another name or be text in the other, but a name has one id.
    """
    pairs = zip(ours.pieces, theirs.pieces, strict=False)
    return all(a == b for a, b in pairs if a and b) and all(
        theirs.special.get(name, number) == number for name, number in ours.special.items()
    )


def class_of_user(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return an instance of the user's ``FILE.py:Class``, made with the target and its cache, whose
    drafts are checked. The file is run once per session.

    Raises InputError where there is no such class. An error in a method of the instance becomes an
    InputError too, whose cause is the original one.
    """
    kind = sample.options.draft
    file, _, name = kind.rpartition(":")
    with blaming(kind):
        if file not in session.user_files:
            session.user_files[file] = runpy.run_path(file)
        found = session.user_files[file].get(name)
        if found is None:
            raise InputError(f"--draft {kind}: {file} has no class {name}")
        checked = CheckedDrafter(found(target, slot.cache), target)
    blame = blaming(kind, in_text=True)
    checked.propose = blame(checked.propose)
    checked.rollback = blame(checked.rollback)
    return Strategy(f"{name} of {Path(file).name}", checked, policy_of(sample.options))


@contextmanager
def blaming(kind: str, in_text: bool = False) -> Iterator[None]:
    """Return a context, or a decorator, that turns any error of the user's class into an InputError
    that names its line.

    ``in_text``: with the original error as its cause, so that the traceback is shown.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        file = kind.rpartition(":")[0]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f"{kind}, line {lines[-1]}" if lines else kind
        raise InputError(f"--draft {where}: {typed_line(error)}") from (error if in_text else None)


def auto(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy that takes the best of several drafts in each round."""
    # Now: the other kinds of draft work without this file, and without ``decoding.auto``.
    from app.offers import auto_strategy

    return auto_strategy(session, sample, slot, target)


class Kind(NamedTuple):
    """Kind of draft: its line in --help, the options that have an effect on it, and its maker.

    ``plan`` gives the plan under which the target drafts for itself, if any. ``needs``: the option
    without which it cannot run, unless the model's folder has that file.
    """

    help: str
    options: tuple[str, ...]
    make: Callable[[Session, Sample, Slot, Model], Strategy]
    plan: Callable[[LoadedModel, Options], DraftPlan | None] = lambda *_: None
    needs: str | None = None


LENGTH = ("gamma", "min_target_confidence")
BY_PLAN = (*LENGTH, "adaptive", "bits", "window")
KINDS = {
    "auto": Kind(
        "in each round the best of lowbit, lookup and a layer plan, or none",
        options=(*LENGTH, "plan"),
        make=auto,
        plan=given_plan,
    ),
    "none": Kind("plain decoding", options=(), make=lambda *_: plain()),
    "lookup": Kind(
        "copies what followed the same words earlier in the text", options=LENGTH, make=lookup
    ),
    "skip": Kind(
        "the model without some sublayers, by a layer plan (--plan)",
        options=(*BY_PLAN, "plan"),
        make=by_plan,
        plan=given_plan,
        needs="plan",
    ),
    "exit": Kind(
        "the model's first layers (--exit-layer)",
        options=(*BY_PLAN, "exit_layer"),
        make=by_plan,
        plan=exit_plan,
    ),
    "lowbit": Kind(
        "the model with all weights in four bits (--bits)",
        options=BY_PLAN,
        make=by_plan,
        plan=low_bit_plan,
    ),
    "model": Kind(
        "a smaller model with the same tokenizer (--draft-model)",
        options=(*LENGTH, "adaptive", "draft_model"),
        make=other_model,
        needs="draft_model",
    ),
}
# every option that has an effect on some kind of draft
DRAFT_OPTIONS = [*dict.fromkeys(option for kind in KINDS.values() for option in kind.options)]
OWN = Kind("a drafter of your own", options=(*LENGTH, "adaptive"), make=class_of_user)


def kind_of(draft: str) -> Kind:
    """Return the kind of a value of ``--draft``: a name, or the class of a user."""
    return KINDS.get(draft, OWN)


def kinds_with(option: str) -> str:
    """Return the names of the kinds of draft on which an option has an effect, in words."""
    return " or ".join(name for name, kind in KINDS.items() if option in kind.options)
