"""Devices: choice by name, the name of the CPU, and settings of the CPU's memory allocator."""

import ctypes
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

from model import InputError

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # numbers of mallopt's settings


def pick_device(name: str | None) -> torch.device:
    """Device of this name; None is a GPU where there is one. Raises InputError when the device is not available."""
    with suppress(RuntimeError, AssertionError):  # torch's for an unknown name and for a missing GPU
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type in ("cpu", "cuda"):
            torch.empty(1, device=device)
            return device
    raise InputError(f"device {name!r} is not there: give cpu, or cuda on a machine with a GPU")


def processor() -> str:
    """Name of the CPU."""
    with suppress(OSError):
        if named := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return named[1]
    return platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Set the C library to keep freed memory for the next step, which makes a step on a CPU half as fast again.

    By default large blocks go back to the system, which clears them again page by page.
    """
    with suppress(OSError, AttributeError, TypeError):  # a C library without this setting
        for setting, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**28)):
            ctypes.CDLL(None).mallopt(setting, value)
