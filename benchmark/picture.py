"""Picture of a report: dots for speed-ups and costs, lines for times. Knows nothing of models."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from app.common.picture import MUTED
from app.common.table import Row

# by section: a title, and the columns of both axes and of the names of lines; names alone have dots
PANELS = {
    "costs": ("Costs of steps", "plain rounds", "step", None),
    "speed": ("Speed-up over plain decoding", "speed-up", "decoder", None),
    "structured": ("Speed-up under JSON schemas", "speed-up", "decoder", None),
    "context": ("Speed-up after long prompts", "context", "speed-up", "decoder"),
    "first-token": ("Time to the first token", "tokens", "ms", "decoder"),
    "together": ("Texts written together", "texts", "tokens/s", "decoder"),
    "adaptive": (
        "Simulated speed-up by the cost of a draft step",
        "draft step",
        "speed-up",
        "decoder",
    ),
    "rounds": ("Speed-up at given acceptance rates", "accepted", "speed-up", "decoder"),
    "shapes": ("Speed-up at α = 0.8, computed", "parameters, 10⁶", "at 0.8", "step"),
}


def picture(report: Mapping[str, list[Row]]) -> Figure:
    """Return a picture with a panel for each section, one below the other."""
    figure = Figure(figsize=(9, 4.5 * len(report)))
    panels = figure.subplots(len(report), squeeze=False)[:, 0]
    for (section, rows), axes in zip(report.items(), panels, strict=True):
        title, x, y, name = PANELS[section]
        rows = [row for row in rows if {x, y} <= row.keys()]
        if name is None:
            for kind in (*rows[0].get("kinds", ()), x):
                axes.plot(column(rows, kind), column(rows, y), "o", label=kind)
            axes.axvline(1, color=MUTED, linestyle="--")
            axes.invert_yaxis()
        for each in dict.fromkeys(row.get(name) for row in rows if name):
            own = [row for row in rows if row[name] == each]
            axes.plot(column(own, x), column(own, y), "o-", label=each)
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def column(rows: list[Row], name: str) -> list[Any]:
    """Return the values of a column, of spreads their medians."""
    values = [row[name] for row in rows]
    return [value["median"] if isinstance(value, dict) else value for value in values]
