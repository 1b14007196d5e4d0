"""Compiling and keeping of functions, and arrays by address.

Compiled code is kept in a folder whose name is a hash of the files here, so stale code never runs:
Numba's cache alone notices a change in the file of a function, but not in the files of the
functions that it calls. The settings of Numba here, and one class that is replaced, hold for the
whole process.
"""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import caching

from model.fast.cpu.vectors import I8, Value, instruction, pointer
from model.places import cache_folder, version


class Locator(caching.UserProvidedCacheLocator):
    """Locator of compiled code that is independent of the path of the sources."""

    def get_cache_path(self) -> str:
        return numba.config.CACHE_DIR

    def ensure_cache_path(self) -> None:
        """Do nothing: ``KernelFile`` passes over a folder that cannot be used."""


class KernelFile(caching.IndexDataCacheFile):
    """Kept code of a function: if damaged compiled again, in a read-only folder not kept."""

    def load(self, key: Any) -> Any:
        try:
            return super().load(key)
        except Exception:  # unpickling damaged bytes may raise anything
            with suppress(OSError):
                self.flush()  # else the damaged index would also stop ``save``
            return None

    def save(self, key: Any, data: Any) -> None:
        with suppress(OSError):
            super().save(key, data)


def kernel_folder(sources: Path = Path(__file__).parent) -> Path:
    """Folder for compiled code of these sources; below NUMBA_CACHE_DIR if that is set."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "kernels")
    folder /= version(sources.glob("*.py"))
    with suppress(OSError):  # read-only: every process compiles
        folder.mkdir(parents=True, exist_ok=True)
    return folder


KERNELS = kernel_folder()
# Numba reads both where a function is declared, in the files of this folder.
numba.config.CACHE_DIR = str(KERNELS)
numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
caching.IndexDataCacheFile = KernelFile  # Numba has no setting for it

# Division by zero gives infinity: Python's check for it would prevent vectorisation.
compiled = partial(
    njit, error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@instruction(types.voidptr(types.int64))
def pointer_to(builder: ir.IRBuilder, place: Value) -> Value:
    """Pointer to an address, for ``carray``."""
    return pointer(place, I8)


@compiled()
def array_at(place: int, count: int, dtype: type) -> np.ndarray:
    """Array of ``count`` numbers or records at an address."""
    return carray(pointer_to(place), count, dtype)


@compiled()
def address(array: np.ndarray) -> int:
    """Address of an array's first number, signed as all integers here."""
    return np.int64(array.ctypes.data)
