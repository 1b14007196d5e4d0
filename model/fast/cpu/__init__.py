"""Short step of a decoder on a CPU, as one compiled function.

Begin with ``step``, which reads like the readable blocks. ``dot`` has its dot products, and ``decoder`` calls it.
Compiled code is kept in a folder whose name is a hash of these files, so stale code never runs: Numba's cache alone
notices a change in the file of a function, but not in the files of the functions that it calls.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import numba
from numba.core.caching import UserProvidedCacheLocator


class Locator(UserProvidedCacheLocator):
    """Locator of compiled code that is independent of the path of the sources."""

    def get_cache_path(self) -> str:
        return numba.config.CACHE_DIR


def kernel_folder(sources: Path = Path(__file__).parent) -> Path:
    """Folder for compiled code of these sources; below NUMBA_CACHE_DIR if that is set."""
    code = b"".join(file.read_bytes() for file in sorted(sources.glob("*.py")))
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "self-speculative-decoding"
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or default) / hashlib.sha256(code).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # read-only: every process compiles
        folder = Path(tempfile.mkdtemp())
    return folder


KERNELS = kernel_folder()
# Numba reads both where a function is declared, in the files of this folder.
numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES = str(KERNELS), f"{__name__}.{Locator.__name__}"
