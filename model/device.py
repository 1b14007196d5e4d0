"""Clock of a device, its dtypes, and code that torch compiles for it."""

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# versions of a function that torch compiles, over all models, plans and filters
RECOMPILES = 64


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the code of a function, compiled as one graph for each kind of arguments when it is
    called. What is marked as dynamic is not part of the kind.
    """
    import torch._dynamo  # takes a second

    logging.getLogger(__name__).warning(
        "[compiling %s for the GPU: up to a minute, once]", function.__name__
    )
    torch._dynamo.config.recompile_limit = RECOMPILES
    return torch.compile(function, fullgraph=True, dynamic=False)


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
