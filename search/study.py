"""Optuna search; objective: predicted speed-up. A plan's parameters are the bits of each sublayer
and of the head.

The study is kept in a journal file, with the texts and costs of its predictions. Any number of
processes may work on it, on one machine or several that share the file, and a killed search
continues from its last trial.
"""

import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, track

from cli.command_line import say
from cli.files import explaining
from decoding.policies import AdaptiveExit, FixedLength, Policy
from decoding.run.chooser import Setting
from decoding.run.plan_file import DraftPlan
from decoding.run.prompt import encode_prompt
from decoding.run.writer import GAMMA, Drafting, Writer, model_drafter
from decoding.text import Rules
from decoding.verify import Coupling
from model import InputError, LayerPlan
from model.plan import FULL
from search.acceptance import Calibration, Continuation
from search.costs import CostTable, measure_costs
from search.prediction import GAMMAS, Prediction, predict

SAMPLERS: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
    # One density per sublayer, since a search has too few trials for joint (multivariate)
    # densities. Good trials are the best tenth, up to 10. They are few, so the uniform prior gets a
    # small weight.
    "tpe": partial(
        optuna.samplers.TPESampler,
        multivariate=False,
        prior_weight=0.2,
        gamma=lambda trials: min(max(3, trials // 10), 10),
        n_ei_candidates=64,
    ),
    "random": optuna.samplers.RandomSampler,
}
THRESHOLDS = (0.0, 0.3, 0.45, 0.6, 0.75, 0.9)  # confidence below which a draft ends; 0: never
PARTS = 4  # of the texts: one to search on, two to judge the best plans on, one held out
LEAST_TOKENS = 32  # of all texts together: fewer say nothing about a plan
THINNED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # shares of the sublayers that the first plans skip
EXITS = (0.25, 0.4, 0.5, 0.75, 0.9)  # shares of the layers that the first exits in low bits run
NAME = "layer plan"
HEAD = "head"

Space = Mapping[str, Sequence[int]]  # the bits that each parameter may have


class SublayerCosts(NamedTuple):
    """Costs of the parts of a draft step, for the draft steps of any layer plan, in rounds of plain
    decoding.

    ``parts``: by the names of ``parts_of``. The head's holds all that every draft step does:
    embedding, head, distribution, draw. ``confidence``: reading the confidence of a drafted token;
    ``verify`` as in CostTable.
    """

    parts: Mapping[str, float]
    confidence: float
    verify: tuple[float, ...]

    def table(self, plan: LayerPlan) -> CostTable:
        """Costs of drafts under ``plan``."""
        draft = sum(count * self.parts[part] for part, count in parts_of(plan).items())
        return CostTable(draft, tuple(self.verify))


def parts_of(plan: LayerPlan) -> Counter[str]:
    """Numbers of the parts of a draft step, as in ``{"head 8": 1, "attn 4": 12, "mlp 16": 20}``."""
    sublayers = {"attn": plan.attention, "mlp": plan.mlp, HEAD: (plan.head,)}
    return Counter(f"{kind} {bits}" for kind, each in sublayers.items() for bits in each if bits)


def measured_plans(layers: int, bits: Collection[int]) -> Iterator[LayerPlan]:
    """Plans whose draft steps determine the costs of all parts in each of ``bits``."""
    every = range(layers)
    even = range(0, layers, 2)
    odd = range(1, layers, 2)
    for width in bits:
        for attention, mlp in (((), ()), (every, every), (even, ()), ((), odd), (even, even)):
            yield LayerPlan.skipping(layers, attention, mlp).in_bits(width, width)


def drafting_under(setting: Setting, plan: LayerPlan, policy: Policy) -> Drafting:
    """Drafts of the target under a layer plan. All texts share ``policy``, whose state
    changes nothing."""
    model = setting.model
    model.prepare(plan)
    return Drafting(
        "plan",
        lambda cache: model_drafter(model, cache, plan),
        lambda: policy,
        model,
        DraftPlan(plan),
    )


def measure_sublayers(
    setting: Setting, texts: Sequence[Continuation], bits: Collection[int]
) -> SublayerCosts:
    """Costs of sublayers in each of ``bits``, in the contexts of these texts.

    The cost of a plan's draft step is the sum of the costs of its parts: one equation per measured
    plan, and one unknown per part, such as "attn 4". Solved by least squares.
    """
    plans = list(measured_plans(setting.model.num_layers, bits))
    drafts = [drafting_under(setting, plan, FixedLength(GAMMA)) for plan in plans]
    # The same again where each confidence is read; in the cheapest step that difference shows best.
    cheapest = 1
    drafts.append(drafting_under(setting, plans[cheapest], AdaptiveExit(0.0, GAMMA, step=0.0)))
    *tables, confident = measure_costs(setting, [text.prompt for text in texts], drafts)
    names = sorted(set().union(*map(parts_of, plans)))
    parts_in_plans = [[parts_of(plan)[name] for name in names] for plan in plans]
    draft_steps = [table.draft for table in tables]
    solution = np.linalg.lstsq(parts_in_plans, draft_steps, rcond=None)[0].clip(min=0)
    return SublayerCosts(
        parts=dict(zip(names, solution.tolist(), strict=True)),
        confidence=max(0.0, confident.draft - draft_steps[cheapest]),
        verify=confident.verify,
    )


def predict_plan(calibration: Calibration, costs: SublayerCosts, plan: LayerPlan) -> Prediction:
    """Prediction for a plan on the texts of the calibration, at its best draft length and
    threshold.
    """
    acceptance = calibration.acceptance(plan)
    return predict(acceptance, costs.table(plan), GAMMAS, THRESHOLDS, confidence=costs.confidence)


def parameters(plan: LayerPlan) -> dict[str, int]:
    """Optuna's parameters of a plan."""
    attention = {f"attn {layer}": bits for layer, bits in enumerate(plan.attention)}
    mlp = {f"mlp {layer}": bits for layer, bits in enumerate(plan.mlp)}
    return attention | mlp | {HEAD: plan.head}


def plan_of(params: Mapping[str, int]) -> LayerPlan:
    """Plan of Optuna's parameters: the inverse of ``parameters``."""
    layers = range(len(params) // 2)
    attention = tuple(params[f"attn {layer}"] for layer in layers)
    mlp = tuple(params[f"mlp {layer}"] for layer in layers)
    return LayerPlan(attention, mlp, params[HEAD])


def space_of(num_layers: int, bits: Collection[int]) -> Space:
    """Space of plans whose sublayers have the checkpoint's bits or any of ``bits`` (0: skipped; not
    for the head).
    """
    choices = [FULL, *sorted(set(bits), reverse=True)]
    sublayers = dict.fromkeys(parameters(LayerPlan.full(num_layers)), choices)
    return {**sublayers, HEAD: [each for each in choices if each]}


def importances(calibration: Calibration) -> dict[str, float]:
    """Importance of each sublayer: the share of first drafted tokens that the target rejects when
    it alone is skipped.

    Keys are the names of ``parameters``.
    """
    full = parameters(LayerPlan.full(calibration.model.num_layers))
    rejected = {}
    for name in track(
        full.keys() - {HEAD}, "importance of each sublayer", console=Console(stderr=True)
    ):
        acceptance = calibration.acceptance(plan_of({**full, name: 0}))
        written = torch.arange(acceptance.accept.shape[2]) < acceptance.lengths[:, None]
        rejected[name] = 1 - acceptance.accept[:, 0][written].mean().item()
    return rejected


def first_plans(importance: Mapping[str, float], space: Space) -> list[LayerPlan]:
    """Plans of the space to try first: all sublayers in each number of bits, the least important
    sublayers skipped, and every early exit.

    Some of the latter two also in the fewest bits. ``importance`` is that of each sublayer.
    """
    layers = len(importance) // 2
    full = LayerPlan.full(layers)
    order = sorted(importance, key=lambda name: (importance[name], name))
    counts = [max(1, round(share * len(order))) for share in THINNED]
    thinned = [plan_of(parameters(full) | dict.fromkeys(order[:count], 0)) for count in counts]
    some_exits = [LayerPlan.early_exit(layers, max(1, round(share * layers))) for share in EXITS]
    low = sorted({*space[HEAD]} - {FULL})
    plans = [full.in_bits(bits, head=low[-1]) for bits in low]
    if low:
        plans += [plan.in_bits(low[0], head=low[-1]) for plan in [*thinned, *some_exits]]
    plans += thinned
    plans += [LayerPlan.early_exit(layers, layer) for layer in range(1, layers)]
    return [
        plan
        for plan in dict.fromkeys(plans)
        if plan != full and all(bits in space[name] for name, bits in parameters(plan).items())
    ]


def open_study(
    path: Path, identity: Mapping[str, Any], sampler: str, seed: int, *, resume: bool
) -> optuna.Study:
    """Study in the journal ``path``; a new one has no trials.

    ``identity`` is a JSON object of model, prompts, sampling parameters, bits and version. Raises
    InputError when there are trials but not to ``resume``, or of another identity, and when the
    file is no journal.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the log would break the progress bar
    warnings.filterwarnings("ignore", category=FutureWarning)
    wrong = f"{path} is not a search's journal: remove it or give another --out"
    with explaining(wrong, (ValueError, KeyError, TypeError, AssertionError)):
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        storage = optuna.storages.JournalStorage(backend)
        study = optuna.create_study(
            study_name=NAME, storage=storage, direction="maximize", load_if_exists=True
        )
        count = len(study.get_trials(deepcopy=False))
        earlier = study.user_attrs.get("identity", {})
    if count and not resume:
        raise InputError(
            f"{path} holds an earlier search: give --resume to continue it, or another --out"
        )
    if count and earlier != identity:
        differ = ", ".join(key for key in identity if earlier.get(key) != identity[key])
        raise InputError(
            f"{path} holds another search (other {differ}): give another --out, or remove it"
        )
    # does not repeat the draws of earlier trials
    study.sampler = SAMPLERS[sampler](seed=seed + count)
    return study


def split_texts(
    texts: Sequence[Continuation],
) -> tuple[list[Continuation], list[Continuation], list[Continuation]]:
    """Texts to search on, to judge the best plans on, and held out to decode: a quarter, a half, a
    quarter, each of all kinds of prompts.

    A plan that is the best of hundreds on some texts owes a part of its lead to these texts. On
    others it is judged without it. Raises InputError for too few or too short texts.
    """
    if len(texts) < PARTS or sum(len(text.written) for text in texts) < LEAST_TOKENS:
        raise InputError(
            f"a search needs at least {PARTS} prompts that fit the model's context, and"
            f" {LEAST_TOKENS} tokens after them in all: give more prompts or a larger"
            " --max-new-tokens"
        )
    quarters = [list(texts[part::PARTS]) for part in range(PARTS)]
    return quarters[0], quarters[1] + quarters[2], quarters[3]


def plain_texts(
    setting: Setting, prompts: Sequence[str], count: int, coupling: Coupling
) -> list[Continuation]:
    """Plain texts of up to ``count`` tokens after those prompts that fit the context, as the loop
    writes them.

    A pass over many texts at once would round otherwise, and so write others.
    """
    encoded = [encode_prompt(setting.tokenizer, prompt) for prompt in prompts]
    positions = setting.model.max_positions
    fitting = [ids for ids in encoded if len(ids) < positions]
    rules = Rules(count, setting.tokenizer.eos_ids)
    writer = Writer(setting.model, min(positions, max(map(len, fitting), default=1) + count))
    texts = []
    for ids in fitting:
        writer.begin(ids)
        sample = writer.write(writer.new_text(rules), writer.plain, setting.params, coupling)
        texts.append(Continuation(tuple(ids), tuple(sample.tokens), count - len(sample.tokens)))
    return texts


def prepare_study(
    study: optuna.Study, identity: dict[str, Any], setting: Setting, coupling: Coupling
) -> None:
    """Store calibration texts, costs and the first plans in a new study.

    Stores nothing when another process has prepared the study meanwhile: all predictions use the
    same texts and costs.
    """
    say("writing calibration texts, and measuring the costs of sublayers")
    count, prompts = identity["prompts"]
    texts = plain_texts(setting, prompts, count, coupling)
    searched = split_texts(texts)[0]
    importance = importances(
        Calibration(setting.model, searched, setting.params, coupling.name, depths=1)
    )
    costs = measure_sublayers(setting, texts, sorted({*identity["bits"], FULL} - {0}))
    if not study.get_trials(deepcopy=False):
        study.set_user_attr("identity", identity)
        study.set_user_attr("texts", [asdict(text) for text in texts])
        study.set_user_attr("costs", costs._asdict())
        space = space_of(setting.model.num_layers, identity["bits"])
        for plan in first_plans(importance, space):
            study.enqueue_trial(parameters(plan))


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials of a study, by all processes."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def optimise(
    study: optuna.Study, objective: Callable[[LayerPlan], Prediction], space: Space, trials: int
) -> None:
    """Run trials until the study has ``trials`` finished ones, including those of other processes.

    A plan that was tried here before, or before this call, keeps its value and is not evaluated
    again; a random neighbour of it comes next. Each further process may finish one trial more.
    """
    known = predictions_of(study)

    def run(trial: Trial) -> float:
        params = {name: trial.suggest_categorical(name, choices) for name, choices in space.items()}
        plan = plan_of(params)
        if plan in known:
            rng = random.Random(trial.number)
            name = rng.choice(list(space))
            study.enqueue_trial({**params, name: rng.choice(space[name])}, skip_if_exists=True)
        else:
            known[plan] = objective(plan)
        trial.set_user_attr("prediction", asdict(known[plan]))
        return known[plan].speedup

    done = len(finished(study))
    if done >= trials:
        return
    columns = (
        "trying plans",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "best predicted speed-up {task.fields[best]:.2f}",
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        best = max((prediction.speedup for prediction in known.values()), default=0.0)
        bar = progress.add_task("", total=trials, completed=done, best=best)

        def show(study: optuna.Study, trial: FrozenTrial) -> None:
            progress.update(bar, completed=len(finished(study)), best=study.best_value)

        enough = optuna.study.MaxTrialsCallback(trials, states=(TrialState.COMPLETE,))
        study.optimize(run, trials - done, callbacks=[show, enough])


def predictions_of(study: optuna.Study) -> dict[LayerPlan, Prediction]:
    """Predictions for all plans that were tried, the best first."""
    best_first = sorted(finished(study), key=lambda trial: (-trial.value, trial.number))
    return {
        plan_of(trial.params): Prediction(**trial.user_attrs["prediction"]) for trial in best_first
    }
