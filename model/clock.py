"""The one clock: time on a device, and comparisons timed in turns, so that a busy moment slows all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch


def now(device: torch.device) -> float:
    """Seconds, read once everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` keeps the device busy: on a GPU by its own events, to the microsecond."""
    if device.type != "cuda":
        began = now(device)
        work()
        return now(device) - began
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1000


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of ``count`` measurements, the fastest and the slowest of them."""

    median: float
    fastest: float
    slowest: float
    count: int

    @staticmethod
    def of(seconds: list[float]) -> Timing:
        return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def row(self, name: str, unit: Timing, **more: object) -> dict[str, Any]:
        """A row of a report: what was timed, and the ratio to another time."""
        return {"name": name, **asdict(self), "ratio": self.median / unit.median, **more}


@torch.inference_mode()
def take_turns(
    steps: list[Callable[[], object]], repeats: int, device: torch.device, patience: float = math.inf
) -> list[Timing]:
    """Each step once as warm-up, then ``repeats`` times all of them, one after another.

    After ``patience`` seconds no further repeat begins, except the first.
    """
    began = now(device)
    for step in steps:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    for repeat in range(repeats):
        if repeat and now(device) - began > patience:
            break
        for step, times in zip(steps, seconds, strict=True):
            times.append(seconds_of(step, device))
    return [Timing.of(times) for times in seconds]
