"""Clock of a device, its dtypes, and functions of rows that a GPU runs as one launch each."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# by device; each is called with a function and its arguments. ``model.fast`` puts launchers here.
LAUNCHERS: dict[torch.device, Callable[..., Tensor]] = {}


def launch(function: Callable[..., Tensor], rows: Tensor, *more: Any) -> Tensor:
    """Return ``function(rows, *more)``, computed in one launch where the device of the rows has a
    launcher.

    A row of the result may depend on the same row of the tensors only.
    """
    launcher = LAUNCHERS.get(rows.device)
    if launcher is None:
        return function(rows, *more)
    return launcher(function, rows, *more)


def now(device: torch.device) -> float:
    """Return the seconds of a clock, read when the device has finished all its work."""
    if device.type == "cuda":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 itself: all but NVIDIA GPUs below compute
    capability 8.0, such as T4, V100 and RTX 20xx.

    Those emulate it, slower than float16 by far, and torch's compiler and four-bit kernel refuse
    it.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
