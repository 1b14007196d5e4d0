"""Pictures of a search: what a sublayer is worth, what there is to choose from, how it went, and if it was right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from decoding.costs import CostTable, SublayerCosts, predicted_speedup
from model import InputError
from search.confirm import Confirmation
from search.prediction import GAMMAS
from search.study import Candidate
from weights.files import atomic_path

STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "svg.hashsalt": "plots",  # the same picture is the same file
}
DOTS, CHOSEN, LINES = "#8fa8c8", "#d1495b", "#6b7280"


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
        "importance.svg": lambda: importance_map(losses, found[0]),
        "front.svg": lambda: front(found, costs),
        "history.svg": lambda: progress_of(history),
    }
    if confirmed:
        drawings["confirmation.svg"] = lambda: predicted_and_measured(confirmed)
    with plt.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw()
            try:
                with atomic_path(folder / name) as temporary:
                    figure.savefig(temporary, format="svg", bbox_inches="tight", metadata={"Date": None})
            except OSError as error:
                raise InputError(f"{folder / name} cannot be written: {error.strerror}") from None
            finally:
                plt.close(figure)


def importance_map(losses: Mapping[str, list[float]], best: Candidate) -> Figure:
    """One cell a sublayer, dark where skipping it alone loses many drafts; a cross where the best plan skips it."""
    values = 100 * np.array([losses["attn"], losses["mlp"]])
    layers = values.shape[1]
    figure, axes = plt.subplots(figsize=(max(6.0, 0.34 * layers + 2), 2.4))
    image = axes.imshow(values, cmap="Blues", aspect="auto", vmin=0, vmax=max(10.0, float(np.quantile(values, 0.9))))
    for row, skipped in enumerate((best.plan.skipped_attention, best.plan.skipped_mlp)):
        axes.scatter(skipped, [row] * len(skipped), marker="x", color=CHOSEN, s=42, linewidths=2)
    axes.set_xticks(range(0, layers, 1 if layers <= 16 else 2))
    axes.set_yticks([0, 1], ["attention", "MLP"])
    axes.set_xlabel("layer")
    axes.set_title("Drafts lost by skipping one sublayer; × skipped by the best plan", pad=10)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.colorbar(image, ax=axes, extend="max", pad=0.02, label="% of first tokens")
    return figure


def front(found: Sequence[Candidate], costs: SublayerCosts) -> Figure:
    """Acceptance against draft cost: every plan, those that no other beats in both, and lines of equal speed-up."""
    figure, axes = plt.subplots(figsize=(7.5, 5.2))
    cost = np.array([candidate.draft_cost for candidate in found])
    kept = np.array([candidate.prediction.kept_share for candidate in found])
    grid_cost, grid_kept = np.linspace(0, max(1.05, cost.max()), 80), np.linspace(0, 1, 80)
    speedups = [[_best_speedup(share, price, costs) for price in grid_cost] for share in grid_kept]
    levels = [0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0]
    widths = [2.0 if level == 1 else 0.8 for level in levels]
    lines = axes.contour(grid_cost, grid_kept, speedups, levels=levels, colors=LINES, linewidths=widths, alpha=0.6)
    axes.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=9)
    axes.scatter(cost, kept, s=22, color=DOTS, edgecolors="white", linewidths=0.4, label="plans tried", zorder=2)
    edge = pareto(list(zip(cost.tolist(), kept.tolist(), strict=True)))
    axes.step(*zip(*edge, strict=True), where="post", color="#1d3557", linewidth=1.6, label="Pareto front", zorder=3)
    axes.scatter(cost[:1], kept[:1], s=130, marker="*", color=CHOSEN, label="best predicted", zorder=4)
    axes.set_xlabel("cost of a draft step (plain steps)")
    axes.set_ylabel("share of drafted tokens kept, α")
    axes.set_ylim(0, 1)
    axes.set_xlim(0, grid_cost[-1])
    axes.set_title("What there is to choose from; lines: speed-up if drafts were kept independently")
    axes.legend(loc="lower right", framealpha=0.9)
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
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    numbers = np.arange(1, len(history) + 1)
    axes.scatter(numbers, history, s=16, color=DOTS, label="trial")
    axes.step(numbers, np.maximum.accumulate(history), where="post", color=CHOSEN, linewidth=2, label="best so far")
    axes.axhline(1, color=LINES, linewidth=0.9, linestyle="--")
    axes.text(0.995, 1, "plain decoding ", color=LINES, ha="right", va="bottom", transform=axes.get_yaxis_transform())
    axes.set_xlabel("trial")
    axes.set_ylabel("predicted speed-up")
    axes.set_title("How the search went")
    axes.legend(loc="lower right")
    return figure


def predicted_and_measured(confirmed: Sequence[Confirmation]) -> Figure:
    """Speed-up and acceptance rate of the plans that were run, on held-out prompts; on the line: as predicted."""
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 4.2))
    pairs = {
        "speed-up": [(one.predicted.speedup, one.speedup) for one in confirmed],
        "acceptance rate": [(one.predicted.acceptance_rate, one.acceptance_rate) for one in confirmed],
    }
    for axes, (name, points) in zip(panels, pairs.items(), strict=True):
        values = np.array(points)
        middle, reach = values.mean(), max(0.05, 0.65 * float(np.ptp(values)))
        limits = (middle - reach, middle + reach)
        axes.plot(limits, limits, color=LINES, linewidth=0.9, linestyle="--")
        axes.scatter(values[:, 0], values[:, 1], s=70, color=CHOSEN, edgecolors="white")
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="predicted", ylabel="measured", title=name)
    figure.suptitle("The best plans on held-out prompts: on the dashed line, as predicted")
    figure.tight_layout()
    return figure
