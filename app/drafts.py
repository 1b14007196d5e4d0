"""Drafts: from options to a ``Way``, the drafter and the policy of a text.

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
from app.files import explaining, one_line
from app.options import GAMMA_LOW_BITS, LONGEST_ADAPTIVE, Options
from app.plan_file import GAMMA, DraftPlan, read_plan
from decoding.drafters import CheckedDrafter, Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.model_port import Model
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from model.errors import InputError
from model.plan import FULL, LayerPlan
from weights.load import load_model, model_folder
from weights.memory import bytes_read, has_memory_for
from weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.session import Sample, Session, Slot
    from decoding.auto import Costs

BITS = 4  # of a low-bit draft by default
PRIOR_LOW_BITS = 0.85  # acceptance of a draft in four bits before any is observed
START_GREEDY = 0.8  # first threshold of Draft & Verify's adaptive exit
START_SAMPLED = 0.5
# For costs by bytes: work beside the weights, per round or draft step, in bytes read meanwhile;
# what a verified row costs in plain rounds of a large model, and beside that in bytes.
ROUND_OVERHEAD = 20e6
ROW = 0.03
ROW_OVERHEAD = 2e6


class Way(NamedTuple):
    """Way to write a text: a drafter and its policy, with a ``name`` that is shown. ``gamma`` is
    the draft length that a plan names, if it does.
    """

    name: str
    drafter: Drafter
    policy: Policy
    gamma: int | None = None


def draft_of(session: Session, sample: Sample, slot: Slot, target: Model) -> Way:
    """Return the way in which a text is written, on the cache of a slot, which it may share.

    ``target`` is the model as the loop calls it. Raises InputError where the draft is not possible.
    """
    options = sample.options
    if options.gamma == 0:
        return plain(session, "plain: --gamma 0 drafts nothing")
    make = DRAFTERS.get(options.draft, class_of_user)
    with explaining(
        f"--draft {options.draft} lacks a file of this project", (ModuleNotFoundError,)
    ):
        way = with_policy(make(session, sample, slot, target), options)
    drafter = way.drafter
    if target is not session.model and draws_alike(sample):
        from decoding.together import ForFew

        drafter = ForFew(drafter, target)
    if sample.source.constraints:
        from decoding.grammar import ForcedTokens

        known = NoDraft(session.model.vocab_size, session.device)
        drafter = ForcedTokens(sample.source.constraints[0], drafter, known)
    return way._replace(drafter=drafter)


def draws_alike(sample: Sample) -> bool:
    """Return whether a text is the same with drafts of any length."""
    return sample.options.temperature == 0 or sample.rule.name == "race"


def with_policy(way: Way, options: Options) -> Way:
    """Return the way with the policy that the options ask for, if they do, behind the confidence
    gate if asked. A way that is plain stays plain, unless ``--gamma`` asks for drafts.
    """
    policy = way.policy
    if not (policy.gamma or options.gamma):
        return way
    if options.adaptive:
        first = START_SAMPLED if options.temperature else START_GREEDY
        longest = options.gamma or way.gamma or LONGEST_ADAPTIVE
        policy = AdaptiveExit(getattr(policy, "threshold", first), longest)
    elif options.gamma or options.adaptive is False:
        policy = FixedLength(options.gamma or policy.gamma)
    if options.min_target_confidence is not None:
        policy = ConfidenceGate(policy, options.min_target_confidence)
    return way._replace(policy=policy)


def plain(session: Session, name: str = "plain") -> Way:
    """Return plain decoding: an empty draft."""
    return Way(name, NoDraft(session.model.vocab_size, session.device), FixedLength(0))


def lookup(session: Session, sample: Sample, slot: Slot, target: Model) -> Way:
    """Return copies of the tokens that followed an earlier occurrence of the text's end."""
    drafter = PromptLookup(session.model.vocab_size, session.device)
    return Way("prompt lookup", drafter, FixedLength(GAMMA))


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
        chosen = DraftPlan(plan, GAMMA_LOW_BITS, kept_share=PRIOR_LOW_BITS)
    elif isinstance(options.plan, DraftPlan):
        chosen = options.plan
        if chosen.plan.num_layers != layers:
            raise InputError(f"the plan has {chosen.plan.num_layers} layers, the model {layers}")
    elif options.plan or (options.draft in ("skip", "auto") and shipped.exists()):
        chosen = read_plan(Path(options.plan or shipped), layers, folder)
    else:
        return None
    return replace(chosen, plan=chosen.plan.in_bits(options.bits)) if options.bits else chosen


def optional_plans(options: Options, folder: Path, layers: int) -> dict[str, DraftPlan]:
    """Return the plans by name among which --draft auto chooses."""
    low_bits = plan_for(Options(draft="lowbit"), folder, layers)
    plans = {"low bits": low_bits}
    given = plan_for(options, folder, layers)
    if given and given.gamma != 0 and given.plan != low_bits.plan:
        plans["plan"] = given
    return plans


def by_plan(session: Session, sample: Sample, slot: Slot, target: Model) -> Way:
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
            f"{session.folder} has no plan.json: give --plan FILE, or find a plan with python -m"
            " search"
        )
    if chosen.gamma == 0 and options.gamma is None:
        return plain(session, "plain: by the plan, no draft pays")
    if chosen.plan.has_low_bits and not possible and chosen.plan not in session.prepared:
        where = f"{session.model.dtype} on {session.device.type}"
        say(f"drafts in low bits are no faster here: there are no kernels for {where}")
    plan, drafter = self_draft(session, chosen, slot, target)
    return Way(plan_in_words(plan), drafter, chosen.new_policy(), chosen.gamma)


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
    """Return the layer of a plan's exit or its number of skipped sublayers, and the bits of the
    others.
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
    return f"{words} in {bits} bits" if bits else words


def other_model(session: Session, sample: Sample, slot: Slot, target: Model) -> Way:
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
        from app.session import accelerated

        model = load_model(folder, session.dtype, session.device)
        session.draft_models[name] = accelerated(model, session.options)
    model = session.draft_models[name]
    if name not in slot.draft_caches:
        slot.draft_caches[name] = model.new_cache(slot.cache.capacity)
    cache = slot.draft_caches[name]
    cache.truncate(0)
    model.step_of(cache)
    drafter = ModelDrafter(model, cache)
    is_short = model.max_positions < sample.source.longest
    until = f", up to its context of {model.max_positions} tokens" * is_short
    return Way(f"draft model {folder.name}{until}", drafter, FixedLength(GAMMA))


def are_alike(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Return whether the ids that two tokenizers have in common are the same tokens.

    One may have more tokens. A token without bytes, which is reserved or a control token, may have
    another name or be text in the other, but a name has one id.
    """
    pairs = zip(ours.pieces, theirs.pieces, strict=False)
    return all(a == b for a, b in pairs if a and b) and all(
        theirs.special.get(name, number) == number for name, number in ours.special.items()
    )


def class_of_user(session: Session, sample: Sample, slot: Slot, target: Model) -> Way:
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
    with blaming(kind):
        drafter = found(target, slot.cache)
    checked = CheckedDrafter(drafter, target)
    for method in ("propose", "rollback"):
        setattr(checked, method, blaming(kind, in_text=True)(getattr(checked, method)))
    return Way(f"{name} of {Path(file).name}", checked, FixedLength(GAMMA))


@contextmanager
def blaming(kind: str, in_text: bool = False) -> Iterator[None]:
    """Return a context that turns any error of the user's class into an InputError that names its
    line.

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


def auto(session: Session, sample: Sample, slot: Slot, target: Model) -> Way:
    """Return in each round the best of lookup, low bits and the plan, if any: see ``Auto``.

    Its estimates serve all texts that no draft length can change; elsewhere a seed repeats its text
    only if each begins anew, and costs are counted in bytes.
    """
    from decoding.auto import Auto, Estimates, measured_costs

    model = session.model
    drafters: dict[str, Drafter] = {}
    plans: dict[str, LayerPlan] = {}
    priors: dict[str, float] = {}
    found = optional_plans(sample.options, session.folder, model.num_layers)
    for name, chosen in found.items():
        is_fast = model.abilities.low_bits or not chosen.plan.has_low_bits
        if is_fast and has_memory_for(model, [chosen.plan, *plans.values()]):
            plans[name], drafters[name] = self_draft(session, chosen, slot, target)
            priors |= {name: chosen.kept_share} if chosen.kept_share else {}
    drafters["lookup"] = lookup(session, sample, slot, target).drafter
    is_free = draws_alike(sample) and model.abilities.why_rows_vary is None
    if not is_free:
        costs = costs_by_bytes(session, plans)
        estimates = Estimates()
    else:
        if session.estimates is None:
            session.estimates = Estimates()
        estimates = session.estimates
        costs = session.costs.get(tuple(plans.values()))
        if costs is None:
            costs = measured_costs(model, slot.cache, plans)
            session.costs[tuple(plans.values())] = costs
    by_confidence = session.device.type == "cpu"  # a GPU would synchronise for each token
    chooser = Auto(drafters, costs, estimates, priors=priors, by_confidence=by_confidence)
    names = [*map(plan_in_words, plans.values()), "prompt lookup"]
    return Way(f"chosen each round: {'; '.join(names)}", chooser, chooser)


def costs_by_bytes(session: Session, plans: dict[str, LayerPlan]) -> Costs:
    """Return the costs of draft steps and rows by the bytes of weights that they read."""
    from decoding.auto import Costs

    def reading(plan: LayerPlan) -> float:
        return bytes_read(session.config, plan, session.model.dtype.itemsize) + ROUND_OVERHEAD

    full = reading(LayerPlan.full(session.model.num_layers))
    steps = {name: reading(plan) / full for name, plan in plans.items()}
    return Costs(steps, ROW + ROW_OVERHEAD / full)


DRAFTERS: dict[str, Callable[[Session, Sample, Slot, Model], Way]] = {
    "auto": auto,
    "none": lambda session, *_: plain(session),
    "lookup": lookup,
    "skip": by_plan,
    "exit": by_plan,
    "lowbit": by_plan,
    "model": other_model,
}
