"""What a training run tells: a bar while it trains, its log, and the picture drawn from the log."""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model import Decoder
from weights.cli.device import matmul_rate
from weights.cli.files import atomic_path
from weights.cli.picture import MUTED, SCALE, count_along, legend_below, write_picture
from weights.training.processes import Group

LOG, PICTURE = "training/log.jsonl", "training/losses.svg"


class Bar(Progress):
    """A bar on standard error, from the step ``first`` that the run had come to; only the first process shows it."""

    def __init__(self, options: argparse.Namespace, group: Group, first: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        super().__init__(*columns, console=Console(stderr=True), disable=not group.leads)
        self.options, self.processes, self.first = options, group.size, first
        self.bar = self.add_task("", total=options.steps, completed=first)
        self.began, self.rate = time.perf_counter(), 0.0

    def show(self, record: dict[str, Any]) -> None:
        """Move to the step of ``record``, and say its loss and the tokens a second of all processes."""
        tokens_a_step = self.options.batch * self.options.context * self.options.accumulate * self.processes
        self.rate = (record["step"] - self.first) * tokens_a_step / (time.perf_counter() - self.began)
        loss_and_rate = f"loss {record['loss']:.3f}, {self.rate:.0f} tokens/s"
        self.update(self.bar, completed=record["step"], description=loss_and_rate)

    def print_speed(self, model: Decoder, device: torch.device) -> None:
        """Say which share of the machine's matrix products the steps have used, if there were any."""
        if self.rate:
            size = sum(parameter.numel() for parameter in model.parameters())
            most = matmul_rate(device, torch.bfloat16 if self.options.autocast else torch.float32)
            used = 6 * size * self.rate
            self.console.print(
                f"{size / 1e6:.2f} M parameters, {self.rate:.0f} tokens/s: {used / 1e9:.0f} GFLOP/s at 6 a parameter "
                f"and token, {used / most / self.processes:.0%} of this machine's matrix products "
                f"({most / 1e9:.0f} GFLOP/s)"
            )


def append_log(path: Path, *records: dict[str, Any]) -> None:
    """Add one line of JSON a record."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_log(path: Path, last: float = math.inf) -> list[dict[str, Any]]:
    """The records up to the step ``last``; a line that a kill or a failing disk has left half of is none."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            if record["step"] <= last:
                records.append(record)
    return records


def trim_log(path: Path, step: int) -> None:
    """Forget what a killed run logged after its last checkpoint, at ``step``: it is made again."""
    if path.exists():
        with atomic_path(path) as temporary:
            append_log(temporary, *read_log(path, step))


def plot_losses(log: Path, picture: Path) -> None:
    """Write the picture of a log that has steps in it, atomically."""
    records = read_log(log)
    if any("exit_losses" in record for record in records):
        write_picture(lambda: losses_of(records), picture)


def losses_of(records: list[dict[str, Any]]) -> Figure:
    """Every exit's held-out loss and agreement over the steps, beside the training loss of the last layer."""
    steps = [record for record in records if "exit_losses" in record]
    judged = [record for record in records if "agreement" in record]
    layers = max(int(layer) for layer in steps[0]["exit_losses"])  # the last layer's loss is always on
    figure = Figure(figsize=(11, 4.6))
    left, right = figure.subplots(1, 2)
    at, losses = [row["step"] for row in steps], [row["exit_losses"][str(layers)] for row in steps]
    left.plot(
        at, losses, ".-", color=MUTED, alpha=0.5, lw=0.8, markevery=-(-len(at) // 100), label="training, last layer"
    )
    for axes, key, title in (
        (left, "held_out_loss", "Held-out loss, nats a token"),
        (right, "agreement", "Held-out greedy agreement"),
    ):
        for layer in range(layers):
            colour = SCALE(layer / max(1, layers - 1))
            axes.plot([row["step"] for row in judged], [row[key][layer] for row in judged], ".-", color=colour, lw=1.2)
        axes.set(xlim=(0, 1.02 * records[-1]["step"]), xlabel="step", title=title)
        count_along(axes.xaxis)
        axes.grid()
    legend_below(left)
    scale = figure.colorbar(ScalarMappable(Normalize(1, layers), SCALE), ax=[left, right], label="exit after layer")
    count_along(scale.ax.yaxis)
    return figure
