"""Model names: the folders behind them."""

from __future__ import annotations

import os
from pathlib import Path

from model import InputError

WEIGHTS = Path(__file__).parent


def model_folder(name: str) -> Path:
    """Model folder at a path, or of this name under ``weights/``. Raises InputError where there is neither."""
    for folder in (Path(name), WEIGHTS / name):
        if os.path.isdir(folder):
            if not (folder / "config.json").exists():
                raise InputError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
            return folder
    known = sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))
    raise InputError(
        f"no folder {name!r:.200}, and weights/ holds {', '.join(known) or 'no model yet'}: "
        "give a path, or fetch a model with python -m weights.fetch"
    )
