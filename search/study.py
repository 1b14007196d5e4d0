"""The search: a number of bits for each sublayer, Optuna proposing, the predicted speed-up disposing.

The study lives in a journal file: any number of processes may work on it, on one machine or several that share the
file, and a killed search goes on where it was.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState

from decoding.run.acceptance import Acceptance, Calibration
from decoding.run.costs import CostTable, SublayerCosts
from decoding.run.prediction import GAMMAS, Prediction, predict
from model import InputError, LayerPlan
from model.plan import FULL
from weights.cli.files import one_line


def tpe(seed: int) -> BaseSampler:
    """Each sublayer by itself: with so many choices and so few trials, whole good plans (multivariate) say too little.

    The good ones are the best tenth, so few that the prior, which pulls their shares to a half, must weigh little.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # prior_weight and gamma leave Optuna with version 6
        return TPESampler(
            seed=seed,
            multivariate=False,
            prior_weight=0.2,
            gamma=lambda trials: min(max(3, trials // 10), 10),
            n_ei_candidates=64,
        )


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": tpe,
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=20),
    "random": lambda seed: RandomSampler(seed=seed),
}
THRESHOLDS = (0.0, 0.3, 0.45, 0.6, 0.75, 0.9)  # 0: draft the full length always
NAME = "layer plan"
HEAD = "head"


@dataclass(frozen=True)
class Evaluator:
    """Plan -> predicted speed-up, on given texts and costs."""

    calibration: Calibration
    costs: SublayerCosts

    def __call__(self, plan: LayerPlan) -> Prediction:
        return predict_plan(self.calibration.acceptance(plan), plan, self.costs)


def predict_plan(
    acceptance: Acceptance,
    plan: LayerPlan,
    costs: SublayerCosts,
    gammas: Sequence[int] = GAMMAS,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Prediction:
    """The largest expected speed-up of a plan's drafts."""
    table = CostTable(costs.draft(plan), costs.verify)
    return predict(acceptance, table, gammas, thresholds, confidence=costs.confidence, overhead=costs.overhead)


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried, and what was predicted for it."""

    plan: LayerPlan
    prediction: Prediction
    draft_cost: float


def choices(parameter: str) -> list[int]:
    """The bits to choose from."""
    return [FULL, 8, 4] if parameter == HEAD else [FULL, 8, 4, 0]


def parameters(plan: LayerPlan) -> dict[str, int]:
    """The plan as Optuna's parameters: the bits of each sublayer and of the head."""
    runs = {"attn": plan.attention, "mlp": plan.mlp}
    bits = {f"{kind} {layer}": each for kind, layers in runs.items() for layer, each in enumerate(layers)}
    return {**bits, HEAD: plan.head}


def plan_of(params: Mapping[str, int]) -> LayerPlan:
    """The plan of Optuna's parameters: the inverse of ``parameters``."""
    layers = range(len(params) // 2)
    attention, mlp = (tuple(params[f"{kind} {layer}"] for layer in layers) for kind in ("attn", "mlp"))
    return LayerPlan(attention, mlp, params[HEAD])


def untried_neighbour(plan: LayerPlan, tried: Collection[LayerPlan], rng: random.Random) -> LayerPlan | None:
    """A plan that differs in one sublayer and was not tried yet; None if there is none."""
    params = parameters(plan)
    neighbours = [plan_of({**params, name: bits}) for name in params for bits in choices(name)]
    fresh = [neighbour for neighbour in neighbours if neighbour not in tried]
    return rng.choice(fresh) if fresh else None


def first_token_rate(acceptance: Acceptance) -> float:
    """The mean acceptance of the first drafted token of a round."""
    pairs = zip(acceptance.accept[:, 0], acceptance.lengths, strict=True)
    return float(sum(row[:length].sum() for row, length in pairs) / acceptance.lengths.sum())


def importance(calibration: Calibration, on_sublayer: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """What skipping each sublayer alone costs: the share of first drafted tokens that are no longer accepted."""
    layers = range(calibration.model.num_layers)
    found: dict[str, list[float]] = {"attn": [], "mlp": []}
    for kind, losses in found.items():
        for layer in layers:
            skipped = ([layer], []) if kind == "attn" else ([], [layer])
            losses.append(1 - first_token_rate(calibration.acceptance(LayerPlan.skipping(len(layers), *skipped))))
            on_sublayer()
    return found


def starts(losses: Mapping[str, list[float]], costs: SublayerCosts) -> list[LayerPlan]:
    """Plans worth trying first: without the least important sublayers, evenly thinned out, and early exits.

    Each in the checkpoint's bits and in four; and all sublayers in four and in eight.
    """
    layers = len(losses["attn"])
    price = {"attn": max(costs.attention[-1], 1e-9), "mlp": max(costs.mlp[-1], 1e-9)}
    order = sorted(
        ((kind, layer) for kind in price for layer in range(layers)),
        key=lambda sublayer: losses[sublayer[0]][sublayer[1]] / price[sublayer[0]],
    )
    plans = []
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        skipped = order[: max(1, round(share * len(order)))]
        plans.append(LayerPlan.skipping(layers, *([n for kind, n in skipped if kind == k] for k in ("attn", "mlp"))))
    for every in (2, 3, 4):
        inner = range(1, layers - 1, every)
        plans += [LayerPlan.skipping(layers, inner, which) for which in (inner, ())]
    for share in (0.25, 0.4, 0.5, 0.6, 0.75, 0.9):
        plans.append(LayerPlan.early_exit(layers, max(1, round(share * layers))))
    full = LayerPlan.full(layers)
    plans = [full.in_bits(4), full.in_bits(8), *(plan.in_bits(4) for plan in plans), *plans]
    return [plan for plan in dict.fromkeys(plans) if plan != full]


def open_study(
    path: Path | None, identity: Mapping[str, Any], sampler: str, seed: int, *, resume: bool
) -> optuna.Study:
    """The study kept in the journal ``path`` (None: in memory), made if there is none.

    ``identity`` says what was searched for: model, texts, sampling parameters. Raises InputError when there is a
    study but not to ``resume``, when it is one of something else, and when the file cannot be used.
    """
    if path is None:
        study = optuna.create_study(direction="maximize", sampler=SAMPLERS[sampler](seed))
        study.set_user_attr("identity", dict(identity))
        return study
    exists = path.exists() and path.stat().st_size > 0
    if exists and not resume:
        raise InputError(f"{path} holds an earlier search: give --resume to continue it, or another --out")
    try:
        if exists:
            _drop_torn_line(path)
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(study_name=NAME, storage=storage, direction="maximize", load_if_exists=True)
    except OSError as error:
        raise InputError(f"{path} cannot be used: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a search's journal ({one_line(error)}): remove it or give another --out"
        ) from None
    found = study.user_attrs.get("identity")
    if found is None:
        study.set_user_attr("identity", dict(identity))
    elif found != identity:
        differ = ", ".join(key for key in identity if found.get(key) != identity[key])
        raise InputError(f"{path} holds a search of something else (other {differ}): give another --out, or remove it")
    return _with_sampler(study, sampler, seed)


def _with_sampler(study: optuna.Study, sampler: str, seed: int) -> optuna.Study:
    """With a sampler that does not draw again what was drawn for the study's trials."""
    study.sampler = SAMPLERS[sampler](seed + len(study.get_trials(deepcopy=False)))
    return study


def _drop_torn_line(path: Path) -> None:
    """A process that was killed while it wrote may have left half a line; what follows it would be lost.

    Under the lock that writers take, half a line is nobody's who is still writing.
    """
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
    finally:
        lock.release()


def costs_of(study: optuna.Study, measured: SublayerCosts) -> SublayerCosts:
    """The costs that the study's values are predicted from: those measured by whoever began it, for all to compare."""
    if "costs" not in study.user_attrs:
        study.set_user_attr("costs", asdict(measured))
        return measured
    kept = dict(study.user_attrs["costs"])
    return SublayerCosts(**{name: tuple(cost) if isinstance(cost, list) else cost for name, cost in kept.items()})


def enqueue(study: optuna.Study, plans: Iterable[LayerPlan]) -> None:
    """Have these plans tried first, but none that the study knows."""
    for plan in plans:
        study.enqueue_trial(parameters(plan), skip_if_exists=True)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def quiet_optuna() -> None:
    """Optuna's own lines would break the progress bar; what fails in a trial is raised anyway."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def optimise(
    study: optuna.Study,
    evaluate: Callable[[LayerPlan], Prediction],
    costs: SublayerCosts,
    num_layers: int,
    trials: int,
    on_trial: Callable[[], None] = lambda: None,
) -> None:
    """Work on the study until it has ``trials`` finished trials, whoever else works on it too.

    A plan that was tried before keeps its value and is not evaluated again; instead of it, a neighbour that was not
    tried comes next. Processes side by side may finish one trial more each.
    """
    names = list(parameters(LayerPlan.full(num_layers)))

    def objective(trial: Trial) -> float:
        plan = plan_of({name: trial.suggest_categorical(name, choices(name)) for name in names})
        known = {plan_of(old.params): old for old in finished(study)}
        if plan in known:
            found = known[plan].user_attrs
            neighbour = untried_neighbour(plan, known, random.Random(trial.number))
            enqueue(study, [neighbour] if neighbour else [])
        else:
            found = {**asdict(evaluate(plan)), "draft_cost": costs.draft(plan)}
        for name, value in found.items():
            trial.set_user_attr(name, value)
        return found["speedup"]

    def after(study: optuna.Study, trial: FrozenTrial) -> None:
        on_trial()
        if len(finished(study)) >= trials:
            study.stop()

    if len(finished(study)) < trials:
        study.optimize(objective, callbacks=[after])


def candidates(study: optuna.Study) -> list[Candidate]:
    """Every plan that was tried, once, the best first."""
    best = sorted(finished(study), key=lambda trial: (-trial.value, trial.number))
    found: dict[LayerPlan, Candidate] = {}
    for trial in best:
        values = dict(trial.user_attrs)
        cost, values["kept_by_depth"] = values.pop("draft_cost"), tuple(values["kept_by_depth"])
        found.setdefault(
            plan_of(trial.params),
            Candidate(plan_of(trial.params), Prediction(**values), cost),
        )
    return list(found.values())
