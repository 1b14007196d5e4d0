"""Clock of a device."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock, read when the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
