"""Picture of a report: dots for speed-ups and costs, lines for times. ``PANELS`` has the panel of
each section. Knows nothing of models.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from app.common.picture import MUTED
from app.common.table import Row


class Panel(NamedTuple):
    """Title of a panel, the columns of both axes, and those that name a line. Without lines a row
    is a dot, whose name is on the y axis.
    """

    title: str
    x: str
    y: str
    lines: tuple[str, ...] = ()


PANELS = {
    "shapes": Panel("Speed-up at α = 0.8, computed", "parameters, 10⁶", "at 0.8", ("step",)),
    "rounds": Panel(
        "Speed-up at given acceptance rates", "accepted", "speed-up", ("shape", "decoder")
    ),
    "costs": Panel("Costs of steps", "plain rounds", "step"),
    "speed": Panel("Speed-up over plain decoding", "speed-up", "decoder"),
    "first-token": Panel("Time to the first token", "tokens", "ms", ("decoder",)),
    "structured": Panel("Speed-up under JSON schemas", "speed-up", "decoder"),
    "context": Panel("Speed-up after long prompts", "context", "speed-up", ("decoder",)),
    "together": Panel("Texts written together", "texts", "tokens/s", ("decoder",)),
    "adaptive": Panel(
        "Simulated speed-up by the cost of a draft step", "draft step", "speed-up", ("decoder",)
    ),
}


def picture(report: Mapping[str, list[Row]]) -> Figure:
    """Return a picture of the rows of each section: their panels, one below the other."""
    figure = Figure(figsize=(9, 4.5 * len(report)))
    panels = figure.subplots(len(report), squeeze=False)[:, 0]
    for (section, rows), axes in zip(report.items(), panels, strict=True):
        panel = PANELS[section]
        rows = [row for row in rows if {panel.x, panel.y} <= row.keys()]
        if panel.lines:
            lines = [", ".join(row[name] for name in panel.lines) for row in rows]
            for line in dict.fromkeys(lines):
                own = [row for row, its in zip(rows, lines, strict=True) if its == line]
                axes.plot(column(own, panel.x), column(own, panel.y), "o-", label=line)
        else:
            for kind in (*rows[0].get("kinds", ()), panel.x):
                axes.plot(column(rows, kind), column(rows, panel.y), "o", label=kind)
            axes.axvline(1, color=MUTED, linestyle="--")
            axes.invert_yaxis()
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def column(rows: list[Row], name: str) -> list[Any]:
    """Return the values of a column, of spreads their medians."""
    values = [row[name] for row in rows]
    return [value["median"] if isinstance(value, dict) else value for value in values]
