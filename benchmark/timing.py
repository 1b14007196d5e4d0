"""Times of work on a device, and the floor of a step: the time to read its weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from app.table import Row
from model import Decoder, LayerPlan, now
from weights.memory import bytes_read

POSITION = 128  # of the steps of a shape that are timed
REPEATS = 7  # of such a step, and of reading the memory
# enough that the time to read them can be measured
BANDWIDTH_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result of some work on the device, and its seconds."""
    began = now(device)
    result = work()
    return result, now(device) - began


@torch.inference_mode()
def take_turns(
    steps: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each repeat of each step: each runs once as warm-up, then all in turn, ``repeats``
    times.
    """
    for step in steps.values():
        step()
    turns = [{name: timed(step, device)[1] for name, step in steps.items()} for _ in range(repeats)]
    return {name: [seconds[name] for seconds in turns] for name in steps}


def floor_of(model: Decoder) -> Row:
    """Bytes of the weights that a step reads, the speed of the memory, and their quotient."""
    block = torch.ones(BANDWIDTH_BYTES.get(model.device.type, 1 << 28) // 4, device=model.device)
    seconds = take_turns({"read": block.sum}, REPEATS, model.device)["read"]
    speed = block.nbytes / min(seconds)
    size = bytes_read(model.config, LayerPlan.full(model.num_layers), model.dtype.itemsize)
    return {
        "MB": size / 1e6,
        "GB/s": speed / 1e9,
        "ms": 1e3 * size / speed,
        "tokens/s": speed / size,
    }
