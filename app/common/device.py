"""Devices: choice by name, the machine in words, and the allocator's settings for training."""

import ctypes
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

from app.common.command_line import say
from model.errors import InputError, one_line

NVIDIA = Path("/proc/driver/nvidia/version")  # of a driver that is loaded
# These have code for older drivers, and for GPUs of compute capability 5.0 to 7.0.
WHEELS = "try pip install torch --index-url https://download.pytorch.org/whl/cu126"
MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 2**28}  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD


def pick_device(name: str | None) -> torch.device:
    """Return the device of this name, which is the current one from then on; None is a GPU where
    there is one. Raises InputError without it.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and NVIDIA.exists():
            cuda = torch.version.cuda and f"CUDA {torch.version.cuda}, which wants a newer driver"
            say(
                "the CPU is used although there is an NVIDIA GPU:"
                f" torch {torch.__version__} is built for {cuda or 'CPUs'}; {WHEELS}"
            )
    try:
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            torch.ones(1, device=device).sum().item()  # an allocation alone runs no kernel
            if device.index is not None and device.type == "cuda":
                torch.cuda.set_device(device)
            return device
    # Torch raises these for an unknown name, a missing GPU, and one that is full or cannot compute.
    except (RuntimeError, AssertionError) as error:
        if torch.cuda.is_available() and name.startswith("cuda"):
            raise InputError(
                f"torch {torch.__version__} cannot compute on {name} ({one_line(error)}): give"
                f" --device cpu or, if this torch has no code for the GPU, {WHEELS}"
            ) from None
    if name.startswith("mps"):
        # Tokens are drawn in float64.
        raise InputError("mps cannot compute in float64: give --device cpu")
    raise InputError(f"device {name!r} is not there: give cpu, or cuda on a machine with a GPU")


def machine(device: torch.device) -> str:
    """Return the machine in words, as speed depends on it: CPU with threads or GPU, and torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        if named := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            processor = named[1]
    return (
        f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads,"
        f" torch {torch.__version__}"
    )


def keep_freed_memory() -> None:
    """Set the C library to keep freed memory for the next step of training, which makes a step on a
    CPU 1.5 times as fast.

    By default large blocks go back to the system, which clears them again page by page.
    """
    with suppress(OSError, AttributeError, TypeError):  # a C library without this setting
        for setting, value in MALLOPT.items():
            ctypes.CDLL(None).mallopt(setting, value)
