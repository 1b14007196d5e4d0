"""Picture of a report: speed-ups, and texts written together."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.picture import MUTED, RULE
from app.table import Row
from search.texts import PROMPTS


def picture(report: dict[str, list[Row]]) -> Figure:
    """Picture with a panel for each measured section of ``PANELS``, one below the other."""
    names = [name for name in PANELS if name in report]
    heights = [1.9 + 0.32 * len(report["speed"]) if name == "speed" else 3.6 for name in names]
    figure = Figure(figsize=(9, sum(heights)))
    panels = figure.subplots(len(names), height_ratios=heights, squeeze=False)[:, 0]
    for name, axes in zip(names, panels, strict=True):
        PANELS[name](axes, report[name])
    return figure


def draw_speed(axes: Axes, rows: list[Row]) -> None:
    """Draw a bar per contender, its median speed-up; on it a dot per kind of prompt."""
    places = range(len(rows))
    medians = [row["speed-up"]["median"] for row in rows]
    axes.barh(places, medians, 0.7, color=RULE, edgecolor=MUTED, label="median of all prompts")
    for kind in filter(rows[0].get, PROMPTS):
        axes.scatter([row[kind] for row in rows], places, s=22, zorder=3, label=kind)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle="--", zorder=2)
    names = [f"{row['decoder']}  {row['speed-up']['median']:.2f}" for row in rows]
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(title="Speed-up over plain decoding", xlabel="times as fast", xlim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_together(axes: Axes, rows: list[Row]) -> None:
    """Draw the tokens per second of all texts by their number, and below that number the speed-ups
    of the drafts.
    """
    names = list(dict.fromkeys(row["decoder"] for row in rows))
    counts = list(dict.fromkeys(row["texts"] for row in rows))
    for name in names:
        axes.plot(
            counts,
            [row["tokens/s"] for row in rows if row["decoder"] == name],
            marker="o",
            label=name,
        )
    ratios = {
        n: [f"×{row['speed-up']:.2f}" for row in rows if row["texts"] == n][1:] for n in counts
    }
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{n}\n{' / '.join(ratios[n])}" for n in counts])
    axes.set(
        title="Texts written together",
        xlabel=f"texts at a time, and the speed-ups of {' / '.join(names[1:])} over plain decoding",
        ylabel="tokens/s of all",
        ylim=(0, None),
    )
    axes.margins(y=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


PANELS = {"speed": draw_speed, "together": draw_together}
