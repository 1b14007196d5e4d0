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


def kept(folder: Path, model: Decoder, name: str, kind: type[Kept], measure: Callable[[], Kept]) -> Kept:
    """The measurement kept under this name for this model, dtype and machine, else ``measure()``.

    ``kind`` is its type, a dataclass of numbers. A new measurement is kept unless its ``steady`` is False. Where the
    folder cannot be written or the file is damaged, it is measured again.
    """
    key = f"{machine(model.device)}, {str(model.dtype).removeprefix('torch.')}, {name}"
    try:
        entries = read_optional_json(folder / FILE)
    except InputError:
        entries = {}
    found = _parse(entries.get(key), kind)
    if found is None:
        found = measure()
        if not getattr(found, "steady", True):
            say("the measurement is not kept: other programs disturbed it or took the memory")
        else:
            with suppress(OSError, ValueError, InputError):
                write_json(folder / FILE, {**entries, key: asdict(found)})
    return found


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
