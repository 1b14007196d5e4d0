"""Model names -> folders."""

from __future__ import annotations

from pathlib import Path

from model import InputError
from weights.cli.files import is_there

WEIGHTS = Path(__file__).parent


def model_folder(name: str) -> Path:
    """The folder that ``--model`` means: a path, or the name of a folder under ``weights/``.

    Raises InputError, naming what there is, when it is neither.
    """
    for folder in (Path(name), WEIGHTS / name):
        if _is_folder(folder):
            if not is_there(folder / "config.json"):
                raise InputError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
            return folder
    known = sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))
    raise InputError(
        f"no folder {name!r:.200}, and weights/ holds {', '.join(known) or 'no model yet'}: "
        "give a path, or fetch a model with python -m weights.fetch"
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False
