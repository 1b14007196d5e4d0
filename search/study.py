"""Optuna search; objective: predicted speed-up. A plan's parameters are the bits of each sublayer and of the head.

The study is kept in a journal file, with the texts and costs of its predictions. Any number of processes may work on
it, on one machine or several that share the file, and a killed search continues from its last trial.
"""

import random
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console
from rich.progress import track

from decoding.run.acceptance import Calibration, Continuation
from decoding.run.costs import CostTable, SublayerCosts
from decoding.run.plan_file import DraftPlan
from decoding.run.prediction import GAMMAS, Prediction, predict
from model import InputError, LayerPlan
from model.plan import FULL
from weights.cli.files import one_line


def tpe(seed: int) -> BaseSampler:
    """TPE sampler with one density per sublayer, since a search has too few trials for joint (multivariate) densities.

    Good trials are the best tenth, up to 10. They are few, so the uniform prior gets a small weight.
    """
    return TPESampler(
        seed=seed,
        multivariate=False,
        prior_weight=0.2,
        gamma=lambda trials: min(max(3, trials // 10), 10),
        n_ei_candidates=64,
    )


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {"tpe": tpe, "random": RandomSampler}
THRESHOLDS = (0.0, 0.3, 0.45, 0.6, 0.75, 0.9)  # confidence below which a draft ends; 0: never
NAME = "layer plan"
HEAD = "head"

# Part of the identity, since a journal of a version that stored other fields cannot be continued.
VERSION = [each.name for kind in (Prediction, Continuation, SublayerCosts) for each in fields(kind)]

Space = Mapping[str, Sequence[int]]  # the bits that each parameter may have


@dataclass(frozen=True)
class Objective:
    """Predicted speed-up of a layer plan, on the texts of a calibration and with measured costs."""

    calibration: Calibration
    costs: SublayerCosts

    def __call__(
        self, plan: LayerPlan, gammas: Sequence[int] = GAMMAS, thresholds: Sequence[float] = THRESHOLDS
    ) -> Prediction:
        """Prediction at the best of these draft lengths and thresholds."""
        acceptance, table = self.calibration.acceptance(plan), CostTable(self.costs.draft(plan), self.costs.verify)
        return predict(acceptance, table, gammas, thresholds, confidence=self.costs.confidence)


@dataclass(frozen=True)
class Candidate:
    """A tried plan, with its prediction."""

    plan: LayerPlan
    prediction: Prediction

    @property
    def draft_plan(self) -> DraftPlan:
        """The plan with its draft length and threshold (None: no threshold)."""
        return DraftPlan(self.plan, self.prediction.gamma, self.prediction.threshold or None)


def parameters(plan: LayerPlan) -> dict[str, int]:
    """Optuna's parameters of a plan."""
    runs = {"attn": plan.attention, "mlp": plan.mlp}
    bits = {f"{kind} {layer}": each for kind, layers in runs.items() for layer, each in enumerate(layers)}
    return {**bits, HEAD: plan.head}


def plan_of(params: Mapping[str, int]) -> LayerPlan:
    """Plan of Optuna's parameters: the inverse of ``parameters``."""
    layers = range(len(params) // 2)
    attention, mlp = (tuple(params[f"{kind} {layer}"] for layer in layers) for kind in ("attn", "mlp"))
    return LayerPlan(attention, mlp, params[HEAD])


def space_of(num_layers: int, bits: Collection[int]) -> Space:
    """Space of plans whose sublayers have the checkpoint's bits or any of ``bits`` (0: skipped; not for the head)."""
    choices = [FULL, *sorted(set(bits), reverse=True)]
    sublayers = dict.fromkeys(parameters(LayerPlan.full(num_layers)), choices)
    return {**sublayers, HEAD: [each for each in choices if each]}


def untried_neighbour(
    plan: LayerPlan, space: Space, tried: Collection[LayerPlan], rng: random.Random
) -> LayerPlan | None:
    """A random untried plan that differs in one parameter; None if there is none."""
    params = parameters(plan)
    neighbours = [plan_of({**params, name: bits}) for name, choices in space.items() for bits in choices]
    fresh = [neighbour for neighbour in neighbours if neighbour not in tried]
    return rng.choice(fresh) if fresh else None


def importances(calibration: Calibration) -> dict[str, float]:
    """Importance of each sublayer: the share of first drafted tokens that the target rejects when it alone is skipped.

    Keys are the names of ``parameters``.
    """
    full, lost = parameters(LayerPlan.full(calibration.model.num_layers)), {}
    for name in track(full.keys() - {HEAD}, "importance of each sublayer", console=Console(stderr=True)):
        found = calibration.acceptance(plan_of({**full, name: 0}))
        firsts = zip(found.accept[:, 0], found.lengths, strict=True)
        lost[name] = 1 - float(sum(row[:length].sum() for row, length in firsts) / found.lengths.sum())
    return lost


def starts(lost: Mapping[str, float], space: Space) -> list[LayerPlan]:
    """Plans of the space to try first: all sublayers in each number of bits, early exits, the least important skipped.

    The latter two in the checkpoint's bits and in the fewest. ``lost`` are the importances.
    """
    layers, order = len(lost) // 2, sorted(lost, key=lambda name: (lost[name], name))
    full = LayerPlan.full(layers)
    plans = []
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        skipped = dict.fromkeys(order[: max(1, round(share * len(order)))], 0)
        plans.append(plan_of({**parameters(full), **skipped}))
    plans += [LayerPlan.early_exit(layers, max(1, round(share * layers))) for share in (0.25, 0.4, 0.5, 0.75, 0.9)]
    low = sorted({*space[HEAD]} - {FULL})
    rounded = [full.in_bits(bits, head=low[-1]) for bits in low]
    rounded += [plan.in_bits(low[0], head=low[-1]) for plan in plans if low]
    allowed = [plan for plan in [*rounded, *plans] if all(n in space[name] for name, n in parameters(plan).items())]
    return [plan for plan in dict.fromkeys(allowed) if plan != full]


def open_study(path: Path, identity: Mapping[str, Any], sampler: str, seed: int, *, resume: bool) -> optuna.Study:
    """Study in the journal ``path``; a new one has no trials.

    ``identity`` is a JSON object of model, prompts, sampling parameters, bits and version. Raises InputError when there
    are trials but not to ``resume``, or of another identity, and when the file is no journal.
    """
    try:
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(study_name=NAME, storage=storage, direction="maximize", load_if_exists=True)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a search's journal ({one_line(error)}): remove it or give another --out"
        ) from None
    count, found = len(study.get_trials(deepcopy=False)), study.user_attrs.get("identity", {})
    if count and not resume:
        raise InputError(f"{path} holds an earlier search: give --resume to continue it, or another --out")
    if count and found != identity:
        differ = ", ".join(key for key in identity if found.get(key) != identity[key])
        raise InputError(f"{path} holds another search (other {differ}): give another --out, or remove it")
    study.sampler = SAMPLERS[sampler](seed + count)  # does not repeat the draws of earlier trials
    return study


def begin(
    study: optuna.Study,
    identity: Mapping[str, Any],
    texts: Sequence[Continuation],
    costs: SublayerCosts,
    plans: Iterable[LayerPlan],
) -> None:
    """Store identity, texts and costs in a new study, and these plans as its first trials.

    Does nothing when another process has begun the study meanwhile, so that all predictions use the same texts and
    costs.
    """
    if study.get_trials(deepcopy=False):
        return
    study.set_user_attr("identity", identity)
    study.set_user_attr("texts", [asdict(text) for text in texts])
    study.set_user_attr("costs", asdict(costs))
    for plan in plans:
        study.enqueue_trial(parameters(plan))


def kept(study: optuna.Study) -> tuple[list[Continuation], SublayerCosts]:
    """Texts and costs with which the study was begun."""
    return [Continuation(**text) for text in study.user_attrs["texts"]], SublayerCosts(**study.user_attrs["costs"])


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials of a study, by all processes."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def quiet_optuna() -> None:
    """Switch off Optuna's log, which would break its progress bar, and its warnings of experimental features."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for category in (optuna.exceptions.ExperimentalWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)


def optimise(study: optuna.Study, objective: Callable[[LayerPlan], Prediction], space: Space, trials: int) -> None:
    """Run trials until the study has ``trials`` finished ones, including those of other processes.

    A plan that was tried before keeps its value and is not evaluated again; an untried neighbour of it comes next.
    Each further process may finish one trial more.
    """

    def run(trial: Trial) -> float:
        plan = plan_of({name: trial.suggest_categorical(name, choices) for name, choices in space.items()})
        known = {plan_of(old.params): old.user_attrs for old in finished(study)}
        if plan in known and (neighbour := untried_neighbour(plan, space, known, random.Random(trial.number))):
            study.enqueue_trial(parameters(neighbour), skip_if_exists=True)
        found = known.get(plan) or asdict(objective(plan))
        for name, value in found.items():
            trial.set_user_attr(name, value)
        return found["speedup"]

    if (missing := trials - len(finished(study))) > 0:
        enough = MaxTrialsCallback(trials, states=(TrialState.COMPLETE,))
        study.optimize(run, missing, callbacks=[enough], show_progress_bar=True)


def candidates(study: optuna.Study) -> list[Candidate]:
    """All tried plans, each once, the best first."""
    found: dict[LayerPlan, Candidate] = {}
    for trial in sorted(finished(study), key=lambda trial: (-trial.value, trial.number)):
        plan = plan_of(trial.params)
        found.setdefault(plan, Candidate(plan, Prediction(**trial.user_attrs)))
    return list(found.values())
