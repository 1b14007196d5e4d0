"""Devices by name, the processor's name, and the allocator's settings."""

from __future__ import annotations

import ctypes
import platform
import re
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from model import InputError
from weights.cli.files import one_line

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # numbers of mallopt's settings


def pick_device(name: str | None) -> torch.device:
    """The named device, by default a GPU where there is one. Raises InputError when it is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says enough
            device = torch.device(name)
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise InputError(f"device {name!r} is not there: {one_line(error):.120}") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported: give cpu or cuda")
    return device


def processor() -> str:
    """The name of the CPU."""
    with suppress(OSError):
        if named := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return named[1]
    return platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next step: half as fast again on a CPU.

    It would give large blocks back to the system, which then clears them anew, page by page.
    """
    with suppress(OSError, AttributeError, TypeError):  # a C library without this setting
        for setting, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**28)):
            ctypes.CDLL(None).mallopt(setting, value)
