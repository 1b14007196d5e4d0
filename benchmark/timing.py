"""Timer of all measurements, and turns of ways to do something, in random order.

Texts and steps take turns, so that a busy moment of the machine slows all alike. The prompts and
rounds of shapes are timed one after another. Only ratios can be compared. Beside the timer, the
bandwidth of the device's memory. Knows nothing of models.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from model.device import now

Run = tuple[Any, float]  # the result of some work, and its seconds
COPIED = 1 << 28  # bytes, by whose copies the bandwidth is measured
COPIES = 20


def timed(device: torch.device, work: Callable[..., Any], *given: Any) -> Run:
    """Return the result of some work on the device, and its seconds."""
    began = now(device)
    result = work(*given)
    return result, now(device) - began


def take_turns(
    ways: Mapping[Any, Callable[[Any], Any]], inputs: Sequence[Any], device: torch.device
) -> dict[Any, list[Run]]:
    """Return the runs of each way, one for each input.

    First each way runs once on the first input, untimed, since it may compile. Then each input has
    its turn with all ways, in random order, before the next one.
    """
    for way in ways.values():
        way(inputs[0])
    runs: dict[Any, list[Run]] = {name: [] for name in ways}
    rng = random.Random(0)
    for each in track(inputs, "measuring", console=Console(stderr=True), transient=True):
        for name in rng.sample([*ways], len(ways)):
            runs[name].append(timed(device, ways[name], each))
    return runs


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median and the range of some values."""
    values = [float(value) for value in values]
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the device reads and writes in copies."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = source.clone()
    _, seconds = timed(device, lambda: [target.copy_(source) for _ in range(COPIES)])
    return 2 * COPIED * COPIES / seconds
