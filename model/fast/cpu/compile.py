"""Disk cache of the compiled step, in a folder whose name is a hash of all that the code depends on.

So stale code never runs. Numba's cache alone notices a change in the file of a function, but neither in the files of
the functions that it calls nor in globals. It also compiles again for every copy of a file.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import UserProvidedCacheLocator

from model.fast.cpu.dot import FEATURES


class Locator(UserProvidedCacheLocator):
    """Locator of compiled code: the folder itself, independent of the path of the sources."""

    def __init__(self, *function: Any) -> None:
        super().__init__(*function)
        self._cache_path = numba.config.CACHE_DIR


def compiled_functions() -> tuple[Any, Any]:
    """``step.step`` and ``rounding.round_groups``; a line on standard error announces their first compilation."""
    folder, config = kernel_folder(), numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    # Numba reads both where a function is declared, so the import comes after them.
    config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(folder), f"{__name__}.{Locator.__name__}"
    try:
        from model.fast.cpu.rounding import round_groups
        from model.fast.cpu.step import step
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before
    if not step.signatures and not any(folder.rglob("*.nbc")):
        print("compiling the decoding step for this machine, once: about 15 s", file=sys.stderr)
    return step, round_groups


def kernel_folder(sources: Path = Path(__file__).parent) -> Path:
    """Folder for code of these sources, this Numba and this processor; below NUMBA_CACHE_DIR if that is set."""
    code = b"".join(file.read_bytes() for file in sorted(sources.glob("*.py")))
    machine = f"{sys.version} {numba.__version__} {numba.config.CPU_NAME} {sorted(FEATURES)}"
    name = hashlib.sha256(code + machine.encode()).hexdigest()[:16]
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "self-speculative-decoding"
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or default) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # read-only: every process compiles
        folder = Path(tempfile.mkdtemp())
    return folder
