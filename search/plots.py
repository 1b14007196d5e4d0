"""Pictures of a search, by matplotlib. Knows nothing of how plans are found."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from app.common.picture import INK, MUTED, RED, SCALE, write_picture
from model.plan import FULL, LOW_BITS, LayerPlan
from search.costs import CostModel
from search.study import Importance, Predict, Prediction, early_exits, thinned_plans

LEVELS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3)  # speed-ups of the lines


def draw_search(
    folder: Path,
    predictions: Mapping[LayerPlan, Prediction],
    importance: Importance,
    predict: Predict,
    costs: CostModel,
) -> None:
    """Write the pictures of a search into a folder: the plans tried, and what can be left out."""
    lines = {
        name: [(costs.step(plan), predict(plan).acceptance) for plan in plans]
        for name, plans in (
            ("early exits", early_exits(importance.num_layers)),
            ("least important sublayers left out", thinned_plans(importance)[:-1]),
        )
    }
    write_picture(lambda: front(predictions, costs), folder / "front.svg")
    write_picture(lambda: importances(importance, lines), folder / "importance.svg")


def front(predictions: Mapping[LayerPlan, Prediction], costs: CostModel) -> Figure:
    """Return the picture of the tried plans, the best first, by draft cost and acceptance, with
    lines of equal speed-up. The colour is the mean number of bits of a plan's sublayers.
    """
    figure = Figure(figsize=(7.5, 5.6))
    axes = figure.subplots()
    steps = [costs.step(plan) for plan in predictions]
    rates = [prediction.acceptance for prediction in predictions.values()]
    grid_cost = np.linspace(0, max(1.05, 1.03 * max(steps)), 80)
    grid_rate = np.linspace(0, 1, 80)
    lines = axes.contour(
        grid_cost,
        grid_rate,
        [[costs.best(rate, step)[0] for step in grid_cost] for rate in grid_rate],
        levels=LEVELS,
        colors=MUTED,
        linewidths=[2.0 if level == 1 else 0.8 for level in LEVELS],
        alpha=0.5,
    )
    axes.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=9, colors=INK)
    dots = axes.scatter(
        steps,
        rates,
        s=30,
        c=[np.mean(plan.attention + plan.mlp) for plan in predictions],
        cmap=SCALE,
        vmin=0,
        vmax=FULL,
        edgecolors="white",
        label="plan tried",
    )
    axes.scatter(
        steps[:1],
        rates[:1],
        s=150,
        marker="*",
        color=RED,
        edgecolors="white",
        label="best expected",
    )
    figure.colorbar(
        dots, ax=axes, label="mean bits of a sublayer", ticks=[0, *LOW_BITS, FULL], pad=0.02
    )
    axes.set(
        xlim=(0, grid_cost[-1]),
        ylim=(0, 1.02),
        xlabel="cost of a draft step, in plain rounds",
        ylabel="acceptance rate α",
    )
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1.01), ncols=2)
    return figure


def importances(
    importance: Importance, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> Figure:
    """Return two rows of bars, the importance of each layer's attention and MLP; below them two
    lines of plans, by name. A plan is a pair of its draft step's cost and its acceptance rate.
    """
    figure = Figure(figsize=(7.5, 7))
    *rows, below = figure.subplots(3, height_ratios=(1, 1, 2))
    layers = range(importance.num_layers)
    for axes, title, shares in zip(rows, ("attention", "MLP"), importance, strict=True):
        axes.bar(layers, shares, color=SCALE(0.7))
        axes.set(ylim=(0, 1.02), xticks=layers[::2], ylabel="rejected without", title=title)
    rows[-1].set_xlabel("layer, counted from 0 as in plan files")
    for (name, points), colour in zip(lines.items(), (SCALE(0.0), SCALE(0.7)), strict=True):
        below.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
    below.set(
        ylim=(0, 1.02), xlabel="cost of a draft step, in plain rounds", ylabel="acceptance rate α"
    )
    below.legend(loc="lower right", bbox_to_anchor=(1, 1.01), ncols=2)
    return figure


def best_values(curves: Mapping[str, Sequence[Sequence[float]]], first: int) -> Figure:
    """Return the best expected speed-up so far, by trial: the mean of each way to search, with the
    range of its seeds. A dashed line shows the best of the ``first`` plans: the first of the curves
    must be of a way that begins with them.
    """
    figure = Figure(figsize=(7.5, 4))
    axes = figure.subplots()
    for (name, runs), colour in zip(curves.items(), np.linspace(0, 1, len(curves)), strict=True):
        trials = range(1, len(runs[0]) + 1)
        axes.plot(trials, np.mean(runs, axis=0), color=SCALE(colour), label=name)
        axes.fill_between(
            trials, np.min(runs, axis=0), np.max(runs, axis=0), color=SCALE(colour), alpha=0.2
        )
    begin_with_them, *_ = curves.values()
    axes.axhline(
        max(begin_with_them[0][:first]), color=MUTED, linestyle="--", label="the first plans alone"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="trial", ylabel="best expected speed-up so far")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1.01), ncols=2)
    return figure
