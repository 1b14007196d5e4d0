"""Optuna study of layer plans: its parameters are the bits of each sublayer and of the head, its
value is the predicted speed-up.

The study is kept in a journal file, with the texts and costs of its predictions. Any number of
processes may work on it, on one machine or several that share the file, and a killed search
continues from its last trial.
"""

import random
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, track

from app.chooser import Setting
from app.command_line import say
from app.files import explaining
from decoding.verify import Coupling
from model import FULL, InputError, LayerPlan
from search.acceptance import Calibration
from search.costs import SublayerCosts, measure_sublayers
from search.prediction import Prediction
from search.texts import Continuation, plain_texts, split_texts

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
THINNED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # shares of the sublayers that the first plans skip
NAME = "layer plan"
HEAD = "head"

Space = Mapping[str, Sequence[int]]  # the bits that each parameter may have


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


def open_study(
    path: Path, identity: Mapping[str, Any], sampler: str, seed: int, *, resume: bool
) -> optuna.Study:
    """Study in the journal ``path``; a new one has no trials.

    ``identity`` is a JSON object of model, sampling parameters, bits, version, and "prompts": the
    number of tokens to write after each, and the prompts. Raises InputError when there are trials
    but not to ``resume``, or of another identity, and when the file is no journal.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the log would break the progress bar
    warnings.filterwarnings("ignore", category=FutureWarning)
    wrong = f"{path} is not a search's journal: remove it or give another --out"
    with explaining(wrong, (ValueError, KeyError, TypeError, AssertionError)):
        journal = optuna.storages.journal.JournalFileBackend(str(path))
        study = optuna.create_study(
            study_name=NAME,
            storage=optuna.storages.JournalStorage(journal),
            direction="maximize",
            load_if_exists=True,
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


def texts_and_costs(
    study: optuna.Study, identity: Mapping[str, Any], setting: Setting, coupling: Coupling
) -> tuple[list[Continuation], SublayerCosts]:
    """Texts and costs of the predictions of a study. In a new one they are stored first, with the
    plans to try first.
    """
    if not study.trials:
        prepare_study(study, identity, setting, coupling)
    texts = [Continuation(**text) for text in study.user_attrs["texts"]]
    return texts, SublayerCosts(**study.user_attrs["costs"])


def prepare_study(
    study: optuna.Study, identity: Mapping[str, Any], setting: Setting, coupling: Coupling
) -> None:
    """Store calibration texts, costs and the first plans in a new study.

    Stores nothing when another process has stored its own meanwhile, since all predictions of a
    study should use the same texts and costs. Nothing is locked: of processes that come to this
    check at the same moment each stores its own, and may predict with its own.
    """
    say("writing calibration texts, and measuring the costs of sublayers")
    count, prompts = identity["prompts"]
    texts = plain_texts(setting, prompts, count, coupling)
    searched = split_texts(texts)[0]
    importance = importances(Calibration(setting, searched, depths=1))
    costs = measure_sublayers(setting, texts, sorted({*identity["bits"], FULL} - {0}))
    if not study.get_trials(deepcopy=False):
        study.set_user_attr("identity", identity)
        study.set_user_attr("texts", [asdict(text) for text in texts])
        study.set_user_attr("costs", asdict(costs))
        space = space_of(setting.model.num_layers, identity["bits"])
        for plan in first_plans(importance, space):
            study.enqueue_trial(parameters(plan))


def importances(calibration: Calibration) -> dict[str, float]:
    """Importance of each sublayer: the share of first drafted tokens that the target rejects when
    it alone is skipped.

    Keys are the names of ``parameters``.
    """
    full = parameters(LayerPlan.full(calibration.model.num_layers))
    tokens = calibration.lengths.sum()
    rejected = {}
    for name in track(
        full.keys() - {HEAD}, "importance of each sublayer", console=Console(stderr=True)
    ):
        accept = calibration.acceptance(plan_of({**full, name: 0})).accept
        # 1 - accept is 0 beyond the end of a text
        rejected[name] = ((1 - accept[:, 0]).sum() / tokens).item()
    return rejected


def first_plans(importance: Mapping[str, float], space: Space) -> list[LayerPlan]:
    """Plans of the space to try first: all sublayers in each number of bits, the least important
    sublayers skipped, and every early exit; the latter two also in the fewest bits.

    ``importance`` is that of each sublayer.
    """
    layers = len(importance) // 2
    full = LayerPlan.full(layers)
    order = sorted(importance, key=lambda name: (importance[name], name))
    counts = [max(1, round(share * len(order))) for share in THINNED]
    thinned = [plan_of(parameters(full) | dict.fromkeys(order[:count], 0)) for count in counts]
    exits = [LayerPlan.early_exit(layers, layer) for layer in range(1, layers)]
    low = sorted({*space[HEAD]} - {FULL})
    plans = [full.in_bits(bits, head=low[-1]) for bits in low]
    if low:
        plans += [plan.in_bits(low[0], head=low[-1]) for plan in [*thinned, *exits]]
    plans += [*thinned, *exits]
    return [
        plan
        for plan in dict.fromkeys(plans)
        if plan != full and all(bits in space[name] for name, bits in parameters(plan).items())
    ]


def optimise(
    study: optuna.Study, objective: Callable[[LayerPlan], Prediction], space: Space, trials: int
) -> None:
    """Run trials until the study has ``trials`` finished ones, including those of other processes.

    A plan that was tried here before, or before this call, keeps its value and is not evaluated
    again; a random neighbour of it comes next. Each further process may finish one trial more.
    """
    known = predictions_of(study)
    offered = {name: CategoricalDistribution(choices) for name, choices in space.items()}
    columns = (
        "trying plans",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "best predicted speed-up {task.fields[best]:.2f}",
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        best = max((prediction.speedup for prediction in known.values()), default=0.0)
        bar = progress.add_task("", total=trials, completed=len(finished(study)), best=best)
        while len(finished(study)) < trials:
            trial = study.ask(offered)
            plan = plan_of(trial.params)
            if plan in known:
                rng = random.Random(trial.number)
                name = rng.choice(list(space))
                neighbour = {**trial.params, name: rng.choice(space[name])}
                study.enqueue_trial(neighbour, skip_if_exists=True)
            else:
                known[plan] = objective(plan)
            trial.set_user_attr("prediction", asdict(known[plan]))
            study.tell(trial, known[plan].speedup)
            progress.update(bar, completed=len(finished(study)), best=study.best_value)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials of a study, by all processes."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def predictions_of(study: optuna.Study) -> dict[LayerPlan, Prediction]:
    """Predictions for all plans that were tried, the best first."""
    best_first = sorted(finished(study), key=lambda trial: (-trial.value, trial.number))
    return {
        plan_of(trial.params): Prediction(**trial.user_attrs["prediction"]) for trial in best_first
    }
