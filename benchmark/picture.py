"""Picture of a report: bars of speed-ups and costs, lines of times. Knows nothing of models."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.picture import MUTED, RULE
from app.table import Row
from benchmark.shapes import ACCEPTANCES

# by the section: the columns of names and of values, and a title
BARS = {
    "costs": ("step", "plain rounds", "Costs of steps"),
    "speed": ("decoder", "speed-up", "Speed-up over plain decoding"),
    "structured": ("decoder", "speed-up", "Speed-up under JSON schemas"),
}
# those of the horizontal and the vertical axis and of the names of lines, and a title
LINES = {
    "first-token": ("tokens", "ms", "decoder", "Time to the first token"),
    "together": ("texts", "tokens/s", "decoder", "Texts written together"),
}
SIZE = "parameters, 10⁶"


def picture(report: Mapping[str, list[Row]]) -> Figure:
    """Return a picture with a panel for each section, and for each draft of shapes, one below the
    other.
    """
    panels = [*panels_of(report)]
    heights = [height for height, _ in panels]
    figure = Figure(figsize=(9, sum(heights)))
    axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0]
    for (_, draw), each in zip(panels, axes, strict=True):
        draw(each)
        each.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def panels_of(report: Mapping[str, list[Row]]) -> Iterator[tuple[float, Callable[[Axes], None]]]:
    """Yield the height of each panel in inches, and the function that draws it."""
    for section, rows in report.items():
        if section in BARS:
            yield 1.9 + 0.32 * len(rows), partial(draw_bars, rows, *BARS[section])
        elif section in LINES:
            yield 3.6, partial(draw_lines, rows, *LINES[section])
        else:
            for draft in ("low bits", "exit", "exit in low bits"):
                found = [
                    {SIZE: row[SIZE], "speed-up": row[f"{draft} at {rate}"], "rate": f"α = {rate}"}
                    for rate in ACCEPTANCES
                    for row in rows
                    if draft in row
                ]
                yield 3.6, partial(draw_lines, found, SIZE, "speed-up", "rate", f"Drafts by {draft}")


def draw_bars(rows: list[Row], name: str, value: str, title: str, axes: Axes) -> None:
    """Draw a bar for each row, and on it a dot for each kind of prompt."""
    places = range(len(rows))
    lengths = [middle(row[value]) for row in rows]
    axes.barh(places, lengths, 0.7, color=RULE, edgecolor=MUTED, label="median")
    for kind in rows[0].get("kinds", []):
        axes.scatter([row[kind] for row in rows], places, s=22, zorder=3, label=kind)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle="--", zorder=2)
    names = [f"{row[name]} {row.get('tokens', '') if name == 'step' else ''}" for row in rows]
    axes.set_yticks(places, [f"{each} {at:.2f}" for each, at in zip(names, lengths, strict=True)])
    axes.invert_yaxis()
    axes.set(title=title, xlabel=value, xlim=(0, None))


def draw_lines(rows: list[Row], x: str, y: str, name: str, title: str, axes: Axes) -> None:
    """Draw a line for each name."""
    for each in dict.fromkeys(row[name] for row in rows):
        own = [row for row in rows if row[name] == each]
        axes.plot([row[x] for row in own], [middle(row[y]) for row in own], marker="o", label=each)
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, None))
    axes.margins(y=0.15)


def middle(value: Any) -> float:
    """Return a value, or the median of a spread."""
    return value["median"] if isinstance(value, dict) else value
