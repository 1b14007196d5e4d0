"""Pictures of a search: what a sublayer is worth, the plans that were tried, how it went, and if it was right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from decoding.run.costs import CostTable, SublayerCosts, predicted_speedup
from decoding.run.prediction import GAMMAS
from model import InputError, LayerPlan
from model.plan import FULL
from search.confirm import Confirmation
from search.study import Candidate
from weights.cli.picture import BLUE, INK, MUTED, RED, SCALE, count_along, legend_below, write_picture

BITS = Normalize(0, FULL)
IN_A_CELL = {0: "×", FULL: ""}  # what is not said by its number of bits


def draw_plots(
    folder: Path,
    losses: Mapping[str, list[float]],
    found: Sequence[Candidate],
    history: Sequence[float],
    confirmed: Sequence[Confirmation],
    costs: SublayerCosts,
) -> None:
    """Write importance.svg, front.svg, history.svg and, if plans were run, confirmation.svg into ``folder``.

    ``found`` is every plan tried, best first; ``history`` the speed-ups in the order of the trials. Raises InputError
    when a file cannot be written.
    """
    drawings: dict[str, Callable[[], Figure]] = {
        "importance.svg": lambda: importance_map(losses, found[0].plan),
        "front.svg": lambda: front(found, costs),
        "history.svg": lambda: progress_of(history),
    }
    if confirmed:
        drawings["confirmation.svg"] = lambda: predicted_and_measured(confirmed)
    for name, draw in drawings.items():
        try:
            write_picture(draw, folder / name)
        except OSError as error:
            raise InputError(f"{folder / name} cannot be written: {error.strerror}") from None


def importance_map(losses: Mapping[str, list[float]], best: LayerPlan) -> Figure:
    """Two maps of one cell a sublayer: dark where skipping it alone loses many drafts; the best plan's bits."""
    values = 100 * np.array([losses["attn"], losses["mlp"]])
    layers = best.num_layers
    figure = Figure(figsize=(max(7.5, 0.34 * layers + 2), 3.6))
    above, below = figure.subplots(2, 1, sharex=True)
    most = max(10.0, float(np.quantile(values, 0.9)))
    lost = above.imshow(values, cmap="Blues", aspect="auto", vmin=0, vmax=most)
    figure.colorbar(lost, ax=above, extend="max", pad=0.02, label="% lost")
    above.set_title("First drafted tokens lost when one sublayer is skipped")
    bits = np.array([best.attention, best.mlp])
    shown = below.imshow(bits, cmap=SCALE, aspect="auto", norm=BITS)
    figure.colorbar(shown, ax=below, pad=0.02, label="bits", ticks=[0, 4, 8, FULL])
    for (row, layer), each in np.ndenumerate(bits):
        below.text(
            layer, row, IN_A_CELL.get(each, str(each)), ha="center", va="center", color="white" if each > 4 else INK
        )
    below.set_title("Bits of each sublayer in the best plan (×: skipped)")
    below.set_xlabel("layer")
    count_along(below.xaxis)
    for axes in (above, below):
        axes.set_yticks([0, 1], ["attention", "MLP"])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def mean_bits(plan: LayerPlan) -> float:
    """Bits of a sublayer of this plan, on average; a skipped one has none."""
    return float(np.mean(plan.attention + plan.mlp))


def front(found: Sequence[Candidate], costs: SublayerCosts) -> Figure:
    """Acceptance against draft cost: every plan, those that no other beats in both, and lines of equal speed-up."""
    figure = Figure(figsize=(7.5, 5.6))
    axes = figure.subplots()
    cost = np.array([candidate.draft_cost for candidate in found])
    kept = np.array([candidate.prediction.kept_share for candidate in found])
    grid_cost, grid_kept = np.linspace(0, max(1.05, 1.03 * cost.max()), 80), np.linspace(0, 1, 80)
    speedups = [[_best_speedup(share, price, costs) for price in grid_cost] for share in grid_kept]
    levels = [0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0]
    widths = [2.0 if level == 1 else 0.8 for level in levels]
    lines = axes.contour(grid_cost, grid_kept, speedups, levels=levels, colors=MUTED, linewidths=widths, alpha=0.5)
    labels = axes.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=9, colors=INK)
    for label in labels:  # readable where dots lie below
        label.set(zorder=5, path_effects=[withStroke(linewidth=3, foreground="white")])
    edge = pareto(list(zip(cost.tolist(), kept.tolist(), strict=True)))
    axes.step(*zip(*edge, strict=True), where="post", color=INK, linewidth=1.4, label="no plan beats these", zorder=2)
    bits = [mean_bits(candidate.plan) for candidate in found]
    look = {"c": bits, "cmap": SCALE, "norm": BITS, "edgecolors": "white", "linewidths": 0.4}
    dots = axes.scatter(cost, kept, s=30, label="plan tried", zorder=3, **look)
    axes.scatter(cost[:1], kept[:1], s=150, marker="*", color=RED, edgecolors="white", label="best predicted", zorder=4)
    figure.colorbar(dots, ax=axes, label="bits of a sublayer, on average", ticks=[0, 4, 8, 12, FULL], pad=0.02)
    axes.set(xlabel="cost of a draft step, in plain steps", ylabel="share of drafted tokens kept, α")
    axes.set(xlim=(0, grid_cost[-1]), ylim=(0, 1.02))
    axes.set_title("The plans tried; lines join equal speed-ups")
    legend_below(axes)
    return figure


def _best_speedup(share: float, price: float, costs: SublayerCosts) -> float:
    """The formula's speed-up at the draft length that suits it, plain decoding (1) not among them."""
    table = CostTable(price, tuple(cost + costs.overhead for cost in costs.verify))
    return (1 + costs.overhead) * max(predicted_speedup(share, gamma, table) for gamma in GAMMAS)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (cost, acceptance) points for which no other is both cheaper and better, by rising cost."""
    edge: list[tuple[float, float]] = []
    for cost, kept in sorted(points, key=lambda point: (point[0], -point[1])):
        if not edge or kept > edge[-1][1]:
            edge.append((cost, kept))
    return edge


def progress_of(history: Sequence[float]) -> Figure:
    """The value of every trial, and the best so far."""
    figure = Figure(figsize=(7.5, 4.2))
    axes = figure.subplots()
    numbers = np.arange(1, len(history) + 1)
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--", label="plain decoding")
    axes.scatter(numbers, history, s=16, color=BLUE, alpha=0.6, linewidths=0, label="trial")
    axes.step(numbers, np.maximum.accumulate(history), where="post", color=RED, linewidth=2, label="best so far")
    axes.set(xlabel="trial", ylabel="predicted speed-up", title="How the search went", xlim=(0, len(history) + 1))
    count_along(axes.xaxis)
    legend_below(axes)
    return figure


def predicted_and_measured(confirmed: Sequence[Confirmation]) -> Figure:
    """Speed-up and acceptance rate of the plans that were run, on held-out prompts; on the line: as predicted."""
    figure = Figure(figsize=(8.6, 4.6))
    pairs = {
        "speed-up": [(one.predicted.speedup, one.speedup) for one in confirmed],
        "acceptance rate": [(one.predicted.acceptance_rate, one.acceptance_rate) for one in confirmed],
    }
    for axes, (name, points) in zip(figure.subplots(1, 2), pairs.items(), strict=True):
        values = np.array(points)
        middle, reach = values.mean(), max(0.05, 0.65 * float(np.ptp(values)))
        limits = (middle - reach, middle + reach)
        axes.plot(limits, limits, color=MUTED, linewidth=1, linestyle="--", label="as predicted")
        axes.scatter(values[:, 0], values[:, 1], s=70, color=RED, edgecolors="white", label="plan, on held-out prompts")
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="predicted", ylabel="measured", title=name)
        axes.locator_params(nbins=5)
    legend_below(axes)
    return figure
