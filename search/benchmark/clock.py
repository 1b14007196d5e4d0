"""Time, taken in turns: whatever is compared alternates, so that a slow spell of the machine hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from weights.device import now

Report = dict[str, Any]  # what --json writes; the tables and the picture are made from it


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

    def row(self, name: str, unit: Timing, **more: object) -> Report:
        """A row of the report: what was timed, and the ratio to another time."""
        return {"name": name, **asdict(self), "ratio": self.median / unit.median, **more}


@torch.inference_mode()
def take_turns(steps: list[Callable[[], object]], repeats: int, device: torch.device) -> list[Timing]:
    """Each step once as warm-up, then ``repeats`` times all of them, one after another."""
    for step in steps:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, times in zip(steps, seconds, strict=True):
            began = now(device)
            step()
            times.append(now(device) - began)
    return [Timing.of(times) for times in seconds]
