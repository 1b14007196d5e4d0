"""Timing of steps on a device: in turns, so that a busy moment of the machine slows all of them
alike.
"""

import time
from collections.abc import Callable

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock, read when the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def take_turns(
    steps: list[Callable[[], object]], repeats: int, device: torch.device
) -> list[list[float]]:
    """Seconds of each repeat of steps: each runs once as warm-up, then all in turn, ``repeats``
    times.
    """
    for step in steps:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, times in zip(steps, seconds, strict=True):
            start = now(device)
            step()
            times.append(now(device) - start)
    return seconds
