"""Places of the files that are kept between runs."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Return the folder of kept files: SPECDEC_CACHE, else one in the user's cache folder
    (XDG_CACHE_HOME).
    """
    return Path(os.environ.get("SPECDEC_CACHE") or user_cache_path("self-speculative-decoding"))


def version(sources: Iterable[Path]) -> str:
    """Return the hash of source files, 16 hex digits, to name files that their code has made."""
    return hashlib.sha256(b"".join(map(Path.read_bytes, sorted(sources)))).hexdigest()[:16]
