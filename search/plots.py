"""Pictures of a search: the best plan, and all plans by cost and acceptance."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from decoding.run.costs import CostTable, SublayerCosts, predicted_speedup
from decoding.run.prediction import GAMMAS
from model import LayerPlan
from model.plan import FULL, LOW_BITS
from search.study import Candidate
from weights.cli.picture import INK, MUTED, RED, SCALE, count_along, legend_below, write_picture

BITS = {"cmap": SCALE, "norm": Normalize(0, FULL)}
IN_A_CELL = {0: "×", FULL: ""}  # in place of the number of bits


def draw_plots(folder: Path, best: LayerPlan, found: Sequence[Candidate], costs: SublayerCosts) -> None:
    """Write plan.svg and front.svg into ``folder``. ``found`` are all tried plans, the best predicted first."""
    write_picture(lambda: plan_map(best), folder / "plan.svg")
    write_picture(lambda: front(found, costs), folder / "front.svg")


def plan_map(plan: LayerPlan) -> Figure:
    """Picture of a plan: a cell per sublayer with its bits."""
    figure = Figure(figsize=(max(7.5, 0.34 * plan.num_layers + 2), 2.4))
    axes, bits = figure.subplots(), np.array([plan.attention, plan.mlp])
    shown = axes.imshow(bits, aspect="auto", **BITS)
    figure.colorbar(shown, ax=axes, pad=0.02, label="bits", ticks=[0, *LOW_BITS, FULL])
    for (row, layer), each in np.ndenumerate(bits):
        color = "white" if each > min(LOW_BITS) else INK
        axes.text(layer, row, IN_A_CELL.get(each, str(each)), ha="center", va="center", color=color)
    axes.set(xlabel="layer", title=f"Best plan: bits of each sublayer (×: skipped); head: {plan.head}")
    axes.set_yticks([0, 1], ["attention", "MLP"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    count_along(axes.xaxis)
    return figure


def mean_bits(plan: LayerPlan) -> float:
    """Mean bits of the plan's sublayers; a skipped one has 0 bits."""
    return float(np.mean(plan.attention + plan.mlp))


def front(found: Sequence[Candidate], costs: SublayerCosts) -> Figure:
    """Picture of the plans by draft cost and acceptance, with lines of equal speed-up."""
    figure = Figure(figsize=(7.5, 5.6))
    axes = figure.subplots()
    cost = np.array([costs.draft(candidate.plan) for candidate in found])
    kept = np.array([candidate.prediction.kept_share for candidate in found])
    grid_cost, grid_kept = np.linspace(0, max(1.05, 1.03 * cost.max()), 80), np.linspace(0, 1, 80)
    tables = [CostTable(price, costs.verify) for price in grid_cost]
    speedups = [[max(predicted_speedup(a, gamma, table) for gamma in GAMMAS) for table in tables] for a in grid_kept]
    levels = [0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0]
    widths = [2.0 if level == 1 else 0.8 for level in levels]
    lines = axes.contour(grid_cost, grid_kept, speedups, levels=levels, colors=MUTED, linewidths=widths, alpha=0.5)
    axes.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=9, colors=INK)
    bits = [mean_bits(candidate.plan) for candidate in found]
    dots = axes.scatter(cost, kept, c=bits, s=30, edgecolors="white", linewidths=0.4, label="plan tried", **BITS)
    axes.scatter(cost[:1], kept[:1], s=150, marker="*", color=RED, edgecolors="white", label="best predicted")
    figure.colorbar(dots, ax=axes, label="mean bits of a sublayer", ticks=[0, *LOW_BITS, FULL], pad=0.02)
    axes.set(xlabel="cost of a draft step, in plain steps", ylabel="share of drafted tokens kept, α")
    axes.set(xlim=(0, grid_cost[-1]), ylim=(0, 1.02))
    axes.set_title("The plans tried; lines join equal speed-ups")
    legend_below(axes)
    return figure
