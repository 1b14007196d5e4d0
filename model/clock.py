"""Clock of a device, and timing in turns, so that a busy moment of the machine slows all steps alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


def now(device: torch.device) -> float:
    """Seconds, read after all work that was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work`` on the device: on a GPU by its events, to the microsecond."""
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
    """Seconds of ``count`` measurements: their median, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float
    count: int

    @staticmethod
    def of(seconds: list[float]) -> Timing:
        return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


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
