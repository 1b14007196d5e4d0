"""Picture of a search: all plans by cost and acceptance."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from cli.picture import INK, MUTED, RED, SCALE
from model import FULL, LOW_BITS, LayerPlan
from search.costs import CostTable, SublayerCosts, best_speedup
from search.prediction import Prediction

LEVELS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)  # speed-ups that a line joins


def plot_plans(predictions: Mapping[LayerPlan, Prediction], costs: SublayerCosts) -> Figure:
    """Picture of the tried plans, the best first, by draft cost and acceptance, with lines of equal
    speed-up.

    The colour is the mean number of bits of a plan's sublayers; a skipped one has 0.
    """
    figure = Figure(figsize=(7.5, 5.6))
    axes = figure.subplots()
    cost = [costs.table(plan).draft for plan in predictions]
    kept = [prediction.kept_share for prediction in predictions.values()]
    grid_cost = np.linspace(0, max(1.05, 1.03 * max(cost)), 80)
    grid_kept = np.linspace(0, 1, 80)
    tables = [CostTable(price, costs.verify) for price in grid_cost]
    speedups = [[best_speedup(rate, table) for table in tables] for rate in grid_kept]
    lines = axes.contour(
        grid_cost,
        grid_kept,
        speedups,
        levels=LEVELS,
        colors=MUTED,
        linewidths=[2.0 if level == 1 else 0.8 for level in LEVELS],
        alpha=0.5,
    )
    axes.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=9, colors=INK)
    bits = [np.mean(plan.attention + plan.mlp) for plan in predictions]
    dots = axes.scatter(
        cost,
        kept,
        s=30,
        c=bits,
        cmap=SCALE,
        vmin=0,
        vmax=FULL,
        edgecolors="white",
        label="plan tried",
    )
    axes.scatter(
        cost[:1], kept[:1], s=150, marker="*", color=RED, edgecolors="white", label="best predicted"
    )
    figure.colorbar(
        dots, ax=axes, label="mean bits of a sublayer", ticks=[0, *LOW_BITS, FULL], pad=0.02
    )
    axes.set(
        xlim=(0, grid_cost[-1]),
        ylim=(0, 1.02),
        xlabel="cost of a draft step, in plain rounds",
        ylabel="share of drafted tokens kept, α",
        title="The plans tried; lines join equal speed-ups",
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure
