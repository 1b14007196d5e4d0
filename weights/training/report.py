"""Report of a training run: a progress bar, a log of one JSON object per line, and a picture of its losses."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weights.cli.files import atomic_path
from weights.cli.picture import MUTED, SCALE, count_along, legend_below

LOG, PICTURE = "training/log.jsonl", "training/losses.svg"


class Bar(Progress):
    """Progress bar on standard error over the steps of a run, of which ``first`` were done before."""

    def __init__(self, first: int, options: argparse.Namespace, processes: int, disable: bool) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        super().__init__(*columns, console=Console(stderr=True), disable=disable)
        self.tokens_per_step = options.batch * options.context * options.accumulate * processes
        self.first, self.began = first, time.perf_counter()
        self.bar = self.add_task("", total=options.steps, completed=first)

    def show(self, steps: int, loss: float) -> None:
        """Show the number of steps done, the last loss, and tokens per second of all processes."""
        rate = (steps - self.first) * self.tokens_per_step / (time.perf_counter() - self.began)
        self.update(self.bar, completed=steps, description=f"loss {loss:.3f}, {rate:.0f} tokens/s")


def append_log(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a log, as a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Records of a log; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def trim_log(path: Path, step: int) -> None:
    """Drop the records after the saved ``step``, which a continued run writes again."""
    records = [record for record in read_log(path) if record["step"] <= step]
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def losses_of(records: list[dict[str, Any]]) -> Figure:
    """Picture of a log: held-out loss and agreement of every exit by step, and the training loss of the last layer."""
    steps = [record for record in records if "exit_losses" in record]
    judged = [record for record in records if "agreement" in record]
    layers = len(judged[0]["agreement"])
    figure = Figure(figsize=(11, 4.6))
    left, right = figure.subplots(1, 2)
    losses = [record["exit_losses"][str(layers)] for record in steps]
    left.plot(
        [record["step"] for record in steps], losses, color=MUTED, alpha=0.5, lw=0.8, label="training, last layer"
    )
    titles = {"held_out_loss": "Held-out loss, nats per token", "agreement": "Held-out greedy agreement"}
    for axes, (key, title) in zip((left, right), titles.items(), strict=True):
        for layer in range(layers):
            values, colour = [record[key][layer] for record in judged], SCALE(layer / max(1, layers - 1))
            axes.plot([record["step"] for record in judged], values, ".-", color=colour, lw=1.2)
        axes.set(xlim=(0, 1.02 * records[-1]["step"]), xlabel="step", title=title)
        count_along(axes.xaxis)
        axes.grid()
    legend_below(left)
    scale = figure.colorbar(ScalarMappable(Normalize(1, layers), SCALE), ax=[left, right], label="exit after layer")
    count_along(scale.ax.yaxis)
    return figure
