"""The compiled step, kept on disk in a folder named by all that it depends on: a stale one is never run.

Numba by itself looks at the file of a function, but neither at the files of the functions that it calls nor at globals;
and it compiles anew for every copy of a file.
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
    """Keeps compiled code in the folder itself, wherever the sources lie."""

    def __init__(self, *function: Any) -> None:
        super().__init__(*function)
        self._cache_path = numba.config.CACHE_DIR


def compiled_functions() -> tuple[Any, Any]:
    """``step.step`` and ``rounding.round_groups``; a line on standard error says when they will first be compiled."""
    folder, config = kernel_folder(), numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    # Both are read where a function is declared, so the import comes behind.
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
    """A folder for these sources, this library and processor; below NUMBA_CACHE_DIR if that is set."""
    code = b"".join(file.read_bytes() for file in sorted(sources.glob("*.py")))
    machine = f"{sys.version} {numba.__version__} {numba.config.CPU_NAME} {sorted(FEATURES)}"
    name = hashlib.sha256(code + machine.encode()).hexdigest()[:16]
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "self-speculative-decoding"
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or default) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no place to keep it: compiled again by every process
        folder = Path(tempfile.mkdtemp())
    return folder
