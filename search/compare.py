"""Comparison of the ways to propose plans, by searches of their own with several seeds.

Knows nothing of models: what a plan is worth is predicted by a function.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import optuna

from app.common.command_line import say
from app.common.picture import write_picture
from model.plan import LayerPlan
from search.plots import best_values
from search.study import SAMPLERS, Predict, Space, finished, optimise, parameters

# The sampler, and whether the first plans are tried before it is asked
WAYS = {
    "TPE": ("tpe", True),
    "random draws": ("random", True),
    "TPE without the first plans": ("tpe", False),
}


def compare_samplers(
    predict: Predict,
    space: Space,
    first: Sequence[LayerPlan],
    trials: int,
    seeds: int,
    plots: Path | None,
) -> None:
    """Search in each way with several seeds, print the best speed-ups, and draw those so far into
    the folder ``plots``, if there is one.
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
    if plots is not None:
        write_picture(lambda: best_values(curves, len(first)), plots / "samplers.svg")


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
    for plan in first:
        study.enqueue_trial(parameters(plan))
    optimise(study, predict, space, trials)
    return list(accumulate((trial.value for trial in finished(study)), max))
