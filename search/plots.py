"""Pictures of a search: the best plan with its acceptance by depth, and all plans by cost and acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from decoding.run.costs import CostTable, SublayerCosts, predicted_speedup
from decoding.run.prediction import GAMMAS
from model import LayerPlan
from model.plan import FULL, LOW_BITS
from search.confirm import Confirmation
from search.study import Candidate
from weights.cli.picture import BLUE, INK, MUTED, RED, SCALE, count_along, legend_below, write_picture

BITS = {"cmap": SCALE, "norm": Normalize(0, FULL)}
IN_A_CELL = {0: "×", FULL: ""}  # in place of the number of bits


def draw_plots(
    folder: Path, found: Sequence[Candidate], confirmed: Sequence[Confirmation], costs: SublayerCosts
) -> None:
    """Write plan.svg and front.svg into ``folder``. ``found`` are all tried plans, the best first."""
    best = confirmed[0] if confirmed else None
    write_picture(lambda: plan_and_acceptance(best.candidate if best else found[0], best), folder / "plan.svg")
    write_picture(lambda: front(found, costs), folder / "front.svg")


def plan_and_acceptance(candidate: Candidate, confirmation: Confirmation | None) -> Figure:
    """Picture of a plan by layer and bits; below it the accepted share of drafts by depth, predicted and measured.

    Without a confirmation nothing was measured. With one, the prediction too is for the held-out prompts.
    """
    plan, prediction = candidate.plan, confirmation.predicted if confirmation else candidate.prediction
    figure = Figure(figsize=(max(7.5, 0.34 * plan.num_layers + 2), 5.6))
    above, below = figure.subplots(2, 1, height_ratios=(1, 2))
    bits = np.array([plan.attention, plan.mlp])
    shown = above.imshow(bits, aspect="auto", **BITS)
    figure.colorbar(shown, ax=above, pad=0.02, label="bits", ticks=[0, *LOW_BITS, FULL])
    for (row, layer), each in np.ndenumerate(bits):
        color = "white" if each > min(LOW_BITS) else INK
        above.text(layer, row, IN_A_CELL.get(each, str(each)), ha="center", va="center", color=color)
    above.set(xlabel="layer", title=f"Best plan: bits of each sublayer (×: skipped); head: {plan.head}")
    above.set_yticks([0, 1], ["attention", "MLP"])
    above.tick_params(length=0)
    above.spines[:].set_visible(False)
    depths = np.arange(1, prediction.gamma + 1)
    below.bar(depths, prediction.kept_by_depth, color=BLUE, alpha=0.6, width=0.6, label="predicted")
    if confirmation:
        measured = confirmation.kept_by_depth
        below.scatter(depths, measured, s=70, color=RED, edgecolors="white", zorder=3, label="measured")
    below.set(xlabel="drafted token of a round", ylabel="share kept, of those verified", ylim=(0, 1.05))
    below.set_title(f"Acceptance by depth; predicted speed-up {prediction.speedup:.2f}")
    for axes in (above, below):
        count_along(axes.xaxis)
    legend_below(below)
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
