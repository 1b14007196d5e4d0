"""A report as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from benchmark import Report
from benchmark.sections import START
from decoding.run.costs import CONTEXT
from weights.memory import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = ("speed", "costs", "context")


def tables(report: Report) -> list[Table | str]:
    """Everything measured, as it is printed."""
    shown: list[Table | str] = []
    if "speed" in report:
        tokens = report["about"]["tokens"]
        shown += [f"\n{tokens} greedy tokens a prompt, prefill included", speed_table(report["speed"])]
    if "stories" in report:
        shown += ["\nstories, as long as the model makes them", story_table(report["stories"])]
    costs = report.get("costs", {"verify": [], "draft": [], "kept": []})
    for title, unit, rows in (
        (f"steps after {CONTEXT} tokens", "plain steps", costs["verify"] + costs["draft"] + costs["kept"]),
        ("a plain step as the text grows", "ratio", report.get("context")),
        ("time to first token (a library's ratio: to ours)", "ratio", report.get("first-token")),
    ):
        if rows:
            shown += [f"\n{title}", time_table(rows, unit)]
    if "memory" in report:
        rows = [[row["part"], in_words(row["measured"]), in_words(row["estimated"])] for row in report["memory"]]
        shown += ["\nmemory", table_of(["", "measured", "estimated"], rows)]
    if floor := report.get("floor"):
        shown.append(
            f"\nfloor: {in_words(floor['weight_bytes'])} of weights a token, read at "
            f"{floor['bytes_per_second'] / 1e9:.0f} GB/s, take {floor['seconds_per_token'] * 1e3:.2f} ms: "
            f"at most {1 / floor['seconds_per_token']:.0f} plain tokens/s"
        )
    return [*shown, *report["notes"]]


def table_of(headings: list[str], rows: list[list[str]]) -> Table:
    """The first column to the left, numbers to the right."""
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def time_table(rows: list[Report], unit: str) -> Table:
    """Named times with their range and ratio; a draft step's also with its excess over what it keeps."""
    lines = []
    for row in rows:
        median, fastest, slowest = (f"{row[which] * 1e3:.2f}" for which in ("median", "fastest", "slowest"))
        excess = f" (excess {row['excess']:.2f})" if "excess" in row else ""
        lines.append([row["name"] + excess, f"{median} ({fastest}-{slowest})", number(row["ratio"])])
    return table_of(["", "ms", unit], lines)


def speed_table(rows: list[Report]) -> Table:
    """Medians over the prompts; speed-ups also by kind of prompt. "equal" counts whole texts, then beginnings."""
    kinds = list(rows[0]["speed_up_by_kind"])
    headings = ["decoder", "tokens/s", "speed-up", "predicted", "accepted", "a round", "equal", f"first {START}"]
    lines = []
    for row in rows:
        rate, acceptance, of = row["tokens_per_second"], row["acceptance_rate"], row["texts"]
        lines.append(
            [
                row["name"],
                f"{rate['median']:.1f} ({rate['lowest']:.1f}-{rate['highest']:.1f})",
                number(row["speed_up"]["median"]),
                number(row["predicted"] and row["predicted"]["median"]),
                "" if acceptance is None else f"{acceptance:.0%}",
                number(row["tokens_per_round"]),
                f"{row['equal']}/{of}",
                f"{row['equal_start']}/{of}",
                *(number(row["speed_up_by_kind"][kind]) for kind in kinds),
            ]
        )
    return table_of([*headings, *kinds], lines)


def story_table(rows: list[Report]) -> Table:
    """Medians over the stories, of the speed-up with its range; "about it" counts those that name what was asked."""
    headings = ["temperature", "decoder", "speed-up", "accepted", "a round", "equal", "tokens", "repeated", "about it"]
    lines = []
    for row in rows:
        speed, acceptance = row["speed_up"], row["acceptance_rate"]
        lines.append(
            [
                f"{row['temperature']:g}",
                row["name"],
                f"{speed['median']:.2f} ({speed['lowest']:.2f}-{speed['highest']:.2f})",
                "" if acceptance is None else f"{acceptance:.0%}",
                number(row["tokens_per_round"]),
                f"{row['equal']}/{row['texts']}",
                f"{row['tokens']:.0f}",
                f"{row['repeated']:.0%}",
                f"{row['mentions']:.0%}",
            ]
        )
    return table_of(headings, lines)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(report: Report, path: Path) -> None:
    """A picture of what has one: speed-ups above, costs of verification and of a growing text below."""
    from weights.cli.picture import write_picture

    write_picture(lambda: picture(report), path)


def picture(report: Report) -> Figure:
    """One row for each of the sections that was measured: the speeds; what steps cost."""
    from matplotlib.figure import Figure

    panels = {"speed": draw_speed, "costs": draw_verification, "context": draw_context}
    rows = [[name for name in row if name in report] for row in (["speed"], ["costs", "context"])]
    rows = [row for row in rows if row]
    figure = Figure(figsize=(11, 4.6 * len(rows)))
    parts = np.atleast_1d(figure.subfigures(len(rows), 1))
    for part, row in zip(parts, rows, strict=True):
        for name, axes in zip(row, np.atleast_1d(part.subplots(1, len(row))), strict=True):
            panels[name](axes, report[name])
    return figure


def draw_speed(axes: Any, rows: list[Report]) -> None:
    """A group of bars for each contender, one for each kind of prompt; over them their median and the prediction."""
    from weights.cli.picture import INK, MUTED, legend_below

    kinds = list(rows[0]["speed_up_by_kind"])
    width = 0.8 / len(kinds)
    for place, kind in enumerate(kinds):
        where = [at + (place + 0.5) * width - 0.4 for at in range(len(rows))]
        axes.bar(where, [row["speed_up_by_kind"][kind] for row in rows], width, label=kind)
    middle = [row["speed_up"]["median"] for row in rows]
    ends = [at - 0.42 for at in range(len(rows))], [at + 0.42 for at in range(len(rows))]
    axes.hlines(middle, *ends, INK, label="median of all")
    known = [at for at, row in enumerate(rows) if row["predicted"]]
    predicted = [rows[at]["predicted"]["median"] for at in known]
    axes.scatter(known, predicted, marker="D", facecolor="white", edgecolor=INK, zorder=3, label="predicted median")
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--", zorder=0, label="plain decoding")
    axes.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=25, ha="right", rotation_mode="anchor")
    axes.set(title="Speed-up over plain decoding, by kind of prompt", ylabel="times as fast")
    legend_below(axes, columns=5)


def draw_verification(axes: Any, costs: Report) -> None:
    """The cost of verifying one to sixteen tokens."""
    from weights.cli.picture import count_along

    axes.plot([row["tokens"] for row in costs["verify"]], [row["ratio"] for row in costs["verify"]], marker="o")
    axes.set(title="Verifying several tokens at once", xlabel="tokens", ylabel="plain steps", ylim=(0, None))
    count_along(axes.xaxis)


def draw_context(axes: Any, rows: list[Report]) -> None:
    """The time of a plain step over the tokens before it, with its range."""
    tokens, middle = [row["tokens"] for row in rows], [row["median"] * 1e3 for row in rows]
    axes.plot(tokens, middle, marker="o")
    axes.fill_between(tokens, [row["fastest"] * 1e3 for row in rows], [row["slowest"] * 1e3 for row in rows], alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.set(title="A plain step as the text grows", xlabel="tokens before it", ylabel="ms", ylim=(0, None))
