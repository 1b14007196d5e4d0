"""Optuna study of layer plans: its parameters are the bits of each sublayer and of the head, and
the window; its value is the expected speed-up.

The study is kept in Optuna's journal, so that a killed search continues from its last trial.
Studies in memory compare the ways to propose plans. Knows nothing of how acceptance and costs are
found.
"""

import random
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import optuna
from rich.console import Console
from rich.progress import track

from app.common.command_line import say
from model.errors import explaining
from model.plan import FULL, LOW_BITS, LayerPlan

optuna.logging.set_verbosity(optuna.logging.ERROR)  # the log would break the progress bar
# of ``prior_weight`` and ``gamma`` below: Optuna has nothing in their place
warnings.filterwarnings("ignore", category=FutureWarning, module="optuna")

# One density per sublayer, since a search has too few trials for joint (multivariate) densities.
# Good trials are the best tenth, up to 10. They are few, so the uniform prior gets a small weight.
SAMPLERS: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
    "tpe": partial(
        optuna.samplers.TPESampler,
        multivariate=False,
        prior_weight=0.2,
        gamma=lambda trials: min(max(3, trials // 10), 10),
        n_ei_candidates=64,
    ),
    "random": optuna.samplers.RandomSampler,
}
# Ways that are compared: the sampler, and whether the first plans are tried before it is asked
WAYS = {
    "TPE": ("tpe", True),
    "random draws": ("random", True),
    "TPE without the first plans": ("tpe", False),
}
THINNED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # shares of the sublayers that the first plans skip
HEAD_KEY = "head"
WINDOW_KEY = "window"
WINDOWS = (512, 1024)  # keys that a plan may see of a long text

Space = Mapping[str, Sequence[int | None]]  # the values that each parameter may have


class Prediction(NamedTuple):
    """Expected speed-up of a plan, the draft length that has it, and α of its drafts."""

    speedup: float
    gamma: int
    acceptance: float


Predict = Callable[[LayerPlan], Prediction]


class Importance(NamedTuple):
    """Share of drafted tokens that are rejected without a sublayer, for the attention and the MLP
    of each layer.
    """

    attention: Sequence[float]
    mlp: Sequence[float]

    @property
    def num_layers(self) -> int:
        return len(self.attention)


def sublayers(num_layers: int) -> list[str]:
    """Return the names of all attentions, then of all MLPs: "attn 3" is the attention of layer
    3.
    """
    return [f"{kind} {layer}" for kind in ("attn", "mlp") for layer in range(num_layers)]


def parameters(plan: LayerPlan) -> dict[str, int | None]:
    """Return Optuna's parameters of a plan."""
    bits = zip(sublayers(plan.num_layers), plan.attention + plan.mlp, strict=True)
    return {**dict(bits), HEAD_KEY: plan.head, WINDOW_KEY: plan.window}


def plan_of(params: Mapping[str, int | None]) -> LayerPlan:
    """Return the plan of Optuna's parameters: the inverse of ``parameters``."""
    layers = sum(name.startswith("attn ") for name in params)
    bits = tuple(params[name] for name in sublayers(layers))
    return LayerPlan(bits[:layers], bits[layers:], params[HEAD_KEY], params[WINDOW_KEY])


def space_of(num_layers: int, bits: Collection[int], windows: Collection[int]) -> Space:
    """Return the space of plans whose sublayers have the checkpoint's bits or any of ``bits`` (0:
    skipped; not for the head), without a window or with any of ``windows``.
    """
    choices = [FULL, *sorted(set(bits), reverse=True)]
    return {
        **dict.fromkeys(sublayers(num_layers), choices),
        HEAD_KEY: [each for each in choices if each],
        WINDOW_KEY: [None, *windows],
    }


def open_study(path: Path, name: str, sampler: str, seed: int) -> optuna.Study:
    """Return the study of this name in the journal ``path``, with the trials that it has.

    Raises InputError where the file is no journal.
    """
    wrong = f"{path} is not a search's journal: remove it or give another --out"
    with explaining(wrong, (ValueError, KeyError, TypeError, AssertionError)):
        study = optuna.create_study(
            study_name=name,
            storage=optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(path))
            ),
            direction="maximize",
            load_if_exists=True,
        )
        # does not repeat the draws of earlier trials
        study.sampler = SAMPLERS[sampler](seed=seed + len(study.get_trials(deepcopy=False)))
    return study


def measure_importance(num_layers: int, acceptance: Callable[[LayerPlan], float]) -> Importance:
    """Return the importance of each sublayer."""
    full = LayerPlan.full(num_layers)
    shares = [
        1 - acceptance(plan_of(parameters(full) | {name: 0}))
        for name in track(
            sublayers(num_layers), "importance of each sublayer", console=Console(stderr=True)
        )
    ]
    return Importance(shares[:num_layers], shares[num_layers:])


def early_exits(num_layers: int) -> list[LayerPlan]:
    """Return the early exits of a model in the checkpoint's bits, the first layer's first."""
    return [LayerPlan.early_exit(num_layers, layer) for layer in range(1, num_layers)]


def thinned_plans(importance: Importance) -> list[LayerPlan]:
    """Return the plans that skip the least important sublayer, the two least important, and so on
    up to all.
    """
    full = parameters(LayerPlan.full(importance.num_layers))
    shares = [*importance.attention, *importance.mlp]
    order = [name for _, name in sorted(zip(shares, sublayers(importance.num_layers), strict=True))]
    return [plan_of(full | dict.fromkeys(order[:count], 0)) for count in range(1, len(order) + 1)]


def first_plans(importance: Importance, space: Space) -> list[LayerPlan]:
    """Return the plans of the space to try first, one of each kind in turn: early exits, plans
    without the least important sublayers, all sublayers in each number of bits and under each
    window, and the first two kinds in the fewest bits.

    So they begin with the exit after layer 1, a tenth of the sublayers left out, all sublayers in 4
    bits, the same exit in 4 bits, the same tenth left out in 4 bits, and the exit after layer 2.
    """
    low = [bits for bits in LOW_BITS if bits in space[HEAD_KEY]]
    # Sublayers' and head's bits, the fewest first: [(4, 8), (8, 8), (16, 16)]
    widths = [*((bits, max(low)) for bits in low), (FULL, FULL)]
    full = LayerPlan.full(importance.num_layers)
    by_count = thinned_plans(importance)
    exits = early_exits(importance.num_layers)
    thinned = [by_count[max(0, round(share * len(by_count)) - 1)] for share in THINNED]
    whole = [
        replace(full.in_bits(*width), window=window)
        for window in space[WINDOW_KEY]
        for width in widths
    ]
    small_exits, small_thinned = (
        [plan.in_bits(*widths[0]) for plan in plans] for plans in (exits, thinned)
    )
    in_turn = chain(*zip_longest(exits, thinned, whole, small_exits, small_thinned))
    return [
        plan
        for plan in dict.fromkeys(filter(None, in_turn))
        if plan != full and all(bits in space[name] for name, bits in parameters(plan).items())
    ]


def neighbour_of(params: dict[str, Any], space: Space, seed: int) -> dict[str, Any]:
    """Return the parameters of a random neighbour of a plan, which differs in one of them."""
    others = [
        {name: choice}
        for name, choices in space.items()
        for choice in choices
        if choice != params[name]
    ]
    return params | random.Random(seed).choice(others)


def optimise(
    study: optuna.Study, predict: Predict, space: Space, first: Sequence[LayerPlan], trials: int
) -> None:
    """Run trials until the study has ``trials`` finished ones: of the plans ``first``, and then of
    those that the sampler proposes.

    After a plan that the study tried before comes a random neighbour of it. Such a plan keeps its
    value: ``predict`` remembers. Ctrl-C loses no plan.
    """
    tried = {*predictions_of(study)}
    for plan in first:
        study.enqueue_trial(parameters(plan), skip_if_exists=True)

    def speedup(trial: optuna.Trial) -> float:
        for name, choices in space.items():
            trial.suggest_categorical(name, choices)
        plan = plan_of(trial.params)
        if plan in tried:
            neighbour = neighbour_of(trial.params, space, trial.number)
            study.enqueue_trial(neighbour, skip_if_exists=True)
        try:
            prediction = predict(plan)
        except KeyboardInterrupt:
            # The trial fails, and the plan waits behind those in the queue.
            study.enqueue_trial(trial.params)
            raise
        tried.add(plan)
        trial.set_user_attr("prediction", list(prediction))
        return prediction.speedup

    study.optimize(
        speedup,
        max(0, trials - len(finished(study))),
        callbacks=[optuna.study.MaxTrialsCallback(trials)],  # another process may share the study
        show_progress_bar=sys.stderr.isatty(),
    )


def finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Return the finished trials of a study."""
    return study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])


def predictions_of(study: optuna.Study) -> dict[LayerPlan, Prediction]:
    """Return the predictions of the plans tried, the best first."""
    trials = sorted(finished(study), key=lambda trial: -trial.value)
    return {plan_of(trial.params): Prediction(*trial.user_attrs["prediction"]) for trial in trials}


def compare_samplers(
    predict: Predict, space: Space, first: Sequence[LayerPlan], trials: int, seeds: int
) -> dict[str, list[list[float]]]:
    """Search in each of ``WAYS`` with several seeds, and print the best speed-ups; returns the best
    ones so far, a curve for each seed.
    """
    curves: dict[str, list[list[float]]] = {}
    for name, (sampler, tries_first) in WAYS.items():
        plans = first if tries_first else ()
        curves[name] = [
            best_so_far(predict, space, plans, trials, SAMPLERS[sampler](seed=seed))
            for seed in range(seeds)
        ]
        best = [curve[-1] for curve in curves[name]]
        say(f"{name}: {fmean(best):.3f} ({min(best):.3f} to {max(best):.3f})")
    return curves


def best_so_far(
    predict: Predict,
    space: Space,
    first: Sequence[LayerPlan],
    trials: int,
    sampler: optuna.samplers.BaseSampler,
) -> list[float]:
    """Return the best speed-up after each trial of a search in memory, which tries the plans
    ``first`` and then those that the sampler proposes.
    """
    study = optuna.create_study(direction="maximize", sampler=sampler)
    optimise(study, predict, space, first, trials)
    return list(accumulate((trial.value for trial in finished(study)), max))
