"""Drafts: from options to a ``Strategy``, the drafter and the policy of a text.

``--draft lowbit`` may serve as an example. Its function in ``DRAFTERS`` is ``by_plan``: it takes
the plan of ``plan_for``, all layers in four bits, lets the session make its low-bit copies, and
gives a ``ModelDrafter`` under this plan with the plan's own policy. ``with_policy`` then puts that
of ``--gamma``, ``--adaptive`` and ``--min-target-confidence`` in its place. A new kind is a
function here, a line in ``DRAFTERS`` and one in ``app.options.KINDS``; ``FILE.py:Class`` names a
class in a file of the user.

Knows nothing of screens and requests.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.command_line import say
from app.options import GAMMA_LOW_BITS, LONGEST_ADAPTIVE, Options
from app.plan_file import GAMMA, DraftPlan, read_plan
from decoding.drafters import CheckedDrafter, Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.model_port import Model
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from model.errors import InputError, explaining, typed_line
from model.plan import FULL, LayerPlan
from weights.load import model_folder
from weights.memory import bytes_read, has_memory_for
from weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.session import Sample, Session, Slot
    from decoding.auto import Costs

BITS = 4  # of a low-bit draft by default
PRIOR_LOW_BITS = 0.85  # acceptance of a draft in four bits before any is observed
WINDOW = 512  # newest tokens that drafts of auto may see instead of all, in a text of
LONG = 2048  # tokens or more
PRIOR_WINDOW = 0.8  # acceptance of such a draft
SHORT = 512  # tokens up to which costs hardly depend on a text's length
START_GREEDY = 0.8  # first threshold of Draft & Verify's adaptive exit
START_SAMPLED = 0.5
# For costs by bytes: work beside the weights, per round or draft step, in bytes read meanwhile;
# what a verified row costs in plain rounds of a large model, and beside that in bytes.
ROUND_OVERHEAD = 20e6
ROW = 0.03
ROW_OVERHEAD = 2e6


class Strategy(NamedTuple):
    """Drafter and policy of a text, with a ``name`` that is shown. ``gamma`` is the draft length
    that a plan names, if it does. ``ready`` is called when the prompt is read, before the text is
    timed.
    """

    name: str
    drafter: Drafter
    policy: Policy
    gamma: int | None = None
    ready: Callable[[], object] = lambda: None


def strategy_of(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy in which a text is written, on the cache of a slot, which it may share.

    ``target`` is the model as the loop calls it. Raises InputError where the draft is not possible.
    """
    options = sample.options
    if options.gamma == 0:
        return plain("plain: --gamma 0 drafts nothing")
    make = DRAFTERS.get(options.draft, class_of_user)
    with explaining(
        f"--draft {options.draft} lacks a file of this project", (ModuleNotFoundError,)
    ):
        strategy = with_policy(make(session, sample, slot, target), options)
    drafter = strategy.drafter
    if target is not session.model and draws_alike(sample):
        from decoding.together import ForFew

        drafter = ForFew(drafter, target)
    if sample.grammar:
        from decoding.grammar import ForcedTokens

        drafter = ForcedTokens(drafter, sample.grammar)
    return strategy._replace(drafter=drafter)


def draws_alike(sample: Sample) -> bool:
    """Return whether a text is the same with drafts of any length."""
    return sample.options.temperature == 0 or sample.rule.name == "race"


def with_policy(strategy: Strategy, options: Options) -> Strategy:
    """Return the strategy with the policy that the options ask for, if they do, behind the
    confidence gate if asked. A plain one stays plain, unless ``--gamma`` asks for drafts.
    """
    policy = strategy.policy
    if not (policy.gamma or options.gamma):
        return strategy
    if options.adaptive:
        first = START_SAMPLED if options.temperature else START_GREEDY
        longest = options.gamma or strategy.gamma or LONGEST_ADAPTIVE
        policy = AdaptiveExit(getattr(policy, "threshold", first), longest)
    elif options.draft != "auto" and (options.gamma or options.adaptive is False):
        policy = FixedLength(options.gamma or policy.gamma)
    if options.min_target_confidence is not None:
        policy = ConfidenceGate(policy, options.min_target_confidence)
    return strategy._replace(policy=policy)


def plain(name: str = "plain") -> Strategy:
    """Return plain decoding: an empty draft."""
    return Strategy(name, NoDraft(), FixedLength(0))


def lookup(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy that copies what followed an earlier occurrence of the text's end."""
    drafter = PromptLookup()
    return Strategy("prompt lookup", drafter, FixedLength(GAMMA))


def plan_for(options: Options, folder: Path, layers: int) -> DraftPlan | None:
    """Return the plan under which the target drafts for itself; None where --draft has none.

    Of exit the first layers, by default half of them; of lowbit all layers, by default in four
    bits; of skip and auto the plan of --plan, else that of the model's folder, if any. Raises
    InputError for a plan that cannot be read.
    """
    shipped = folder / "plan.json"
    if options.draft == "exit":
        exit_layer = max(1, layers // 2) if options.exit_layer is None else options.exit_layer
        chosen = DraftPlan(LayerPlan.early_exit(layers, exit_layer))
    elif options.draft == "lowbit":
        plan = LayerPlan.full(layers).in_bits(BITS)
        chosen = DraftPlan(plan, GAMMA_LOW_BITS, alpha=PRIOR_LOW_BITS)
    elif isinstance(options.plan, DraftPlan):
        chosen = options.plan
        if chosen.plan.num_layers != layers:
            raise InputError(f"the plan has {chosen.plan.num_layers} layers, the model {layers}")
    elif options.plan or (options.draft in ("skip", "auto") and shipped.exists()):
        chosen = read_plan(Path(options.plan or shipped), layers, folder)
    else:
        return None
    plan = chosen.plan.in_bits(options.bits) if options.bits else chosen.plan
    return replace(chosen, plan=replace(plan, window=options.window or plan.window))


def optional_plans(options: Options, folder: Path, layers: int) -> dict[str, DraftPlan]:
    """Return the plans by name among which --draft auto chooses."""
    low_bits = plan_for(Options(draft="lowbit"), folder, layers)
    plans = {"low bits": low_bits}
    given = plan_for(options, folder, layers)
    if given and given.gamma != 0 and given.plan != low_bits.plan:
        plans["plan"] = given
    return plans


def by_plan(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the target under the plan of --draft exit, lowbit or skip; plain where a plan file
    says that no draft pays.
    """
    options = sample.options
    possible = session.model.abilities.low_bits
    if options.bits and possible and options.bits not in possible:
        kernels = " and ".join(map(str, possible))
        raise InputError(f"--bits {options.bits}: this device has kernels for {kernels} bits only")
    chosen = plan_for(options, session.folder, session.model.num_layers)
    if chosen is None:
        raise InputError(
            f"{session.folder} has no plan.json: give --plan FILE, or find a plan with"
            " python -m search"
        )
    if chosen.gamma == 0 and options.gamma is None:
        return plain("plain: by the plan, no draft pays")
    if chosen.plan.has_low_bits and not possible and chosen.plan not in session.prepared:
        where = f"{session.model.dtype} on {session.device.type}"
        say(f"drafts in low bits are no faster here: there are no kernels for {where}")
    plan, drafter = self_draft(session, chosen, slot, target)
    return Strategy(plan_in_words(plan), drafter, chosen.new_policy(), chosen.gamma)


def self_draft(
    session: Session, chosen: DraftPlan, slot: Slot, target: Model
) -> tuple[LayerPlan, Drafter]:
    """Return the plan as the device runs it, and a drafter by the target under it.

    A head in eight bits gets four where only four have a kernel: there, on a GPU, it would read the
    checkpoint's own weights.
    """
    plan = chosen.plan
    if plan.head == 8 and session.model.abilities.low_bits == (4,):
        plan = replace(plan, head=4)
    session.prepare(plan)
    session.model.step_of(slot.cache, plan)
    return plan, ModelDrafter(target, slot.cache, plan)


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
        words = f"skipping {len(attention)} attention and {len(mlp)} MLP sublayers"
        words += ", others" if bits else ""
    words += f" in {bits} bits" if bits else ""
    return f"{words}, newest {plan.window} tokens" if plan.window else words


def other_model(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return a smaller model of the same tokens, with a cache of its own, which reads the prompt
    when it first drafts.
    """
    name = sample.options.draft_model
    folder = model_folder(name)
    if name not in session.draft_models:
        if not are_alike(session.tokenizer, Tokenizer(folder)):
            raise InputError(
                f"{folder} has another vocabulary: a draft model must share the target's tokenizer"
            )
        session.draft_models[name] = session.loaded(folder)
    model = session.draft_models[name]
    if name not in slot.draft_caches:
        slot.draft_caches[name] = model.new_cache(slot.cache.capacity)
    cache = slot.draft_caches[name]
    cache.truncate(0)
    model.step_of(cache)
    if target is not session.model:
        from decoding.together import Together

        model = Together(model, target)
    drafter = ModelDrafter(model, cache)
    is_short = model.max_positions < sample.source.longest
    until = f", up to its context of {model.max_positions} tokens" * is_short
    return Strategy(f"draft model {folder.name}{until}", drafter, FixedLength(GAMMA))


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
    drafts are checked.

    Raises InputError where there is no such class. An error in a method of the instance becomes an
    InputError too, whose cause is the original one.
    """
    kind = sample.options.draft
    file, _, name = kind.rpartition(":")
    with blaming(kind):
        found = runpy.run_path(file).get(name)
        if found is None:
            raise InputError(f"--draft {kind}: {file} has no class {name}")
        checked = CheckedDrafter(found(target, slot.cache), target)
    blame = blaming(kind, in_text=True)
    checked.propose = blame(checked.propose)
    checked.rollback = blame(checked.rollback)
    return Strategy(f"{name} of {Path(file).name}", checked, FixedLength(GAMMA))


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
        own = [f", line {each.lineno}" for each in frames if each.filename == file]
        where = "".join([kind, *own[-1:]])
        said = InputError(f"--draft {where}: {typed_line(error)}")
        raise said from (error if in_text else None)


def auto(session: Session, sample: Sample, slot: Slot, target: Model) -> Strategy:
    """Return the strategy that takes the best of lookup, low bits and the plan: see ``Auto``.

    Its estimates serve all texts that no draft length can change; elsewhere a seed repeats its text
    only if each begins anew, and costs are counted in bytes.
    """
    from decoding.auto import Auto, Estimates, measured_costs

    model = session.model
    drafters: dict[str, Drafter] = {}
    plans: dict[str, LayerPlan] = {}
    priors: dict[str, float] = {}
    found = optional_plans(sample.options, session.folder, model.num_layers)
    short = short_sighted(found) if sample.source.longest >= LONG else {}
    found |= short
    for name, chosen in found.items():
        is_fast = model.abilities.low_bits or not chosen.plan.has_low_bits
        # a plan has the same copies with a window and without
        copied = {replace(plan, window=None) for plan in (chosen.plan, *plans.values())}
        if is_fast and has_memory_for(model, copied):
            plans[name], drafters[name] = self_draft(session, chosen, slot, target)
            priors |= {name: chosen.alpha} if chosen.alpha else {}
    drafters["lookup"] = lookup(session, sample, slot, target).drafter
    is_free = draws_alike(sample) and model.abilities.why_rows_vary is None
    if is_free:
        session.estimates = session.estimates or Estimates()
    known = session.costs.setdefault(tuple(plans.values()), {}) if is_free else {}

    def costs(length: int) -> Costs:
        """Return the costs at a length of the text, which count anew where it has doubled."""
        at_most = 1 << (max(SHORT, length) - 1).bit_length()
        if at_most not in known:
            at_hand = {
                name: plan for name, plan in plans.items() if at_most > LONG or name not in short
            }
            known[at_most] = (
                measured_costs(model, slot.cache, at_hand)
                if is_free
                else costs_by_bytes(session, at_hand, at_most)
            )
        return known[at_most]

    chooser = Auto(
        drafters,
        costs,
        session.estimates if is_free else None,
        priors=priors,
        by_confidence=session.device.type == "cpu",  # a GPU would synchronise for each token
        longest=sample.options.gamma,
    )
    return Strategy("auto", chooser, chooser, ready=lambda: costs(len(sample.source.tokens)))


def short_sighted(plans: dict[str, DraftPlan]) -> dict[str, DraftPlan]:
    """Return these plans, but those that have one, with a window."""
    return {
        f"{name}, newest": DraftPlan(replace(chosen.plan, window=WINDOW), alpha=PRIOR_WINDOW)
        for name, chosen in plans.items()
        if not chosen.plan.window
    }


def costs_by_bytes(session: Session, plans: dict[str, LayerPlan], positions: int) -> Costs:
    """Return the costs of draft steps and rows after ``positions``, by the bytes that they read."""
    from decoding.auto import Costs

    def reading(plan: LayerPlan) -> float:
        itemsize = session.model.dtype.itemsize
        return bytes_read(session.config, plan, itemsize, positions) + ROUND_OVERHEAD

    full = reading(LayerPlan.full(session.model.num_layers))
    steps = {name: reading(plan) / full for name, plan in plans.items()}
    return Costs(steps, ROW + ROW_OVERHEAD / full)


DRAFTERS: dict[str, Callable[[Session, Sample, Slot, Model], Strategy]] = {
    "auto": auto,
    "none": lambda *_: plain(),
    "lookup": lookup,
    "skip": by_plan,
    "exit": by_plan,
    "lowbit": by_plan,
    "model": other_model,
}
