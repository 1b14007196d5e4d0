"""Picture of a report: speed-ups above; below, the costs of verification and of a plain step by context."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from search.prompts import PROMPTS
from weights.cli.picture import INK, MUTED, RULE, count_along, legend_below
from weights.cli.table import Row


def picture(report: dict[str, list[Row]]) -> Figure:
    """Picture with a panel for each measured section of ``PANELS``."""
    grid = [[name for name in names if name in report] for names in (["speed"], ["costs", "context"])]
    grid = [names for names in grid if names]
    heights = [1.9 + 0.32 * len(report["speed"]) if "speed" in names else 3.6 for names in grid]
    figure = Figure(figsize=(9, sum(heights)))
    parts = figure.subfigures(len(grid), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, names in zip(parts, grid, strict=True):
        for name, axes in zip(names, part.subplots(1, len(names), squeeze=False)[0], strict=True):
            PANELS[name](axes, report[name])
    return figure


def draw_speed(axes: Axes, rows: list[Row]) -> None:
    """Draw a bar per contender, its median speed-up; on it a dot per kind of prompt, and the predicted median."""
    places, medians = range(len(rows)), [row["speed-up"]["median"] for row in rows]
    axes.barh(places, medians, 0.7, color=RULE, edgecolor=MUTED, label="median of all prompts")
    for kind in filter(rows[0].get, PROMPTS):
        axes.scatter([row[kind] for row in rows], places, s=22, zorder=3, label=kind)
    known = [at for at in places if rows[at]["predicted"]]
    predicted = [rows[at]["predicted"]["median"] for at in known]
    axes.scatter(predicted, known, marker="D", facecolor="none", edgecolor=INK, zorder=4, label="predicted median")
    axes.axvline(1, color=MUTED, linewidth=1, linestyle="--", zorder=2)
    axes.set_yticks(places, [f"{row['decoder']}  {median:.2f}" for row, median in zip(rows, medians, strict=True)])
    axes.invert_yaxis()
    axes.set(title="Speed-up over plain decoding, by kind of prompt", xlabel="times as fast", xlim=(0, None))
    legend_below(axes)


def draw_verification(axes: Axes, rows: list[Row]) -> None:
    """Draw the cost of a verification by its number of tokens."""
    rows = [row for row in rows if row["step"] == "verification"]
    axes.plot([row["tokens"] for row in rows], [row["plain steps"] for row in rows], marker="o")
    axes.set(title="Verifying several tokens at once", xlabel="tokens", ylabel="plain steps", ylim=(0, None))
    count_along(axes.xaxis)


def draw_context(axes: Axes, rows: list[Row]) -> None:
    """Draw the time of a plain step by the length of the text, with its range."""
    tokens, times = [row["tokens"] for row in rows], [row["ms"] for row in rows]
    axes.plot(tokens, [ms["median"] for ms in times], marker="o")
    axes.fill_between(tokens, [ms["lowest"] for ms in times], [ms["highest"] for ms in times], alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.set(title="A plain step as the text grows", xlabel="tokens", ylabel="ms", ylim=(0, None))


PANELS = {"speed": draw_speed, "costs": draw_verification, "context": draw_context}
