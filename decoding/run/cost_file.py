"""Cost file: measurements in a model's folder, ``costs.json``, so that each is made once per machine."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from model import Decoder, InputError
from weights.cli.command_line import say
from weights.cli.device import processor
from weights.cli.files import read_optional_json, write_json

FILE = "costs.json"
Kept = TypeVar("Kept")


def load_or_measure(folder: Path, model: Decoder, name: str, kind: type[Kept], measure: Callable[[], Kept]) -> Kept:
    """The measurement kept under this name for this model, dtype and machine, else ``measure()``.

    ``kind`` is its type, a dataclass of numbers. A new measurement is kept unless its ``steady`` is False. Where the
    folder cannot be written or the file is damaged, it is measured again.
    """
    key = f"{machine(model.device)}, {str(model.dtype).removeprefix('torch.')}, {name}"
    found = _parse(_entries(folder).get(key), kind)
    if found is None:
        found = measure()
        if not getattr(found, "steady", True):
            say("not kept: other programs disturbed the measurement or took the memory, so the next run measures again")
        else:
            with suppress(OSError, ValueError, InputError):
                write_json(folder / FILE, {**_entries(folder), key: asdict(found)})
    return found


def _entries(folder: Path) -> dict[str, Any]:
    try:
        return read_optional_json(folder / FILE)
    except InputError:
        return {}


def _parse(entry: Any, kind: type[Kept]) -> Kept | None:
    """The measurement of an entry; None for an entry that is not of this kind."""
    if not isinstance(entry, dict) or entry.keys() != {field.name for field in fields(kind)}:
        return None
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})
    except (TypeError, ValueError):  # from the kind's __post_init__
        return None


def machine(device: torch.device) -> str:
    """Name of the machine as far as costs depend on it: processor or GPU, threads, version of torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
