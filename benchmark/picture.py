"""Picture of a report: dots for speed-ups and costs, lines for times. Knows nothing of models."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from app.common.picture import MUTED
from app.common.table import Row

# Title, the columns of both axes, and that of the names of lines; without lines a row is a dot,
# whose name is on the y axis
Panel = tuple[str, str, str, str | None]


def picture(report: Mapping[Panel, list[Row]]) -> Figure:
    """Return a picture with each panel of some rows, one below the other."""
    figure = Figure(figsize=(9, 4.5 * len(report)))
    panels = figure.subplots(len(report), squeeze=False)[:, 0]
    for ((title, x, y, name), rows), axes in zip(report.items(), panels, strict=True):
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
