"""Picture of a search, by matplotlib. Knows nothing of how plans are found."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from app.picture import INK, MUTED, RED, SCALE
from model.plan import FULL, LOW_BITS, LayerPlan
from search.costs import Costs
from search.study import Prediction

LEVELS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3)  # speed-ups of the lines


def front(predictions: Mapping[LayerPlan, Prediction], costs: Costs) -> Figure:
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
    bits = [np.mean(plan.attention + plan.mlp) for plan in predictions]
    dots = axes.scatter(
        steps,
        rates,
        s=30,
        c=bits,
        cmap=SCALE,
        vmin=0,
        vmax=FULL,
        edgecolors="white",
        label="plan tried",
    )
    axes.scatter(
        steps[:1], rates[:1], s=150, marker="*", color=RED, edgecolors="white", label="best"
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
