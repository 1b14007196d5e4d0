"""User files: JSON that is read with one clear line on error, and writes that are never half done."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import InputError


@contextmanager
def explaining(trouble: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn ``errors`` of the system or of a library into an InputError: ``trouble``, then their words."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{trouble}: {one_line(getattr(error, 'strerror', None) or error)}") from None


def one_line(error: object) -> str:
    """A library's error in one line of at most 300 printable characters; the name of its type where it is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(character if character.isprintable() else " " for character in text[:300])


def read_json(path: Path) -> Any:
    """Parsed JSON of a file. Raises InputError naming the file when it cannot be read or parsed."""
    if not path.exists():
        raise InputError(f"{path} does not exist")
    with explaining(f"{path} cannot be read", (OSError, UnicodeDecodeError)):
        text = path.read_text(encoding="utf-8")
    with explaining(f"{path} is not valid JSON", (ValueError, RecursionError)):
        return json.loads(text)


def read_optional_json(path: Path) -> dict[str, Any]:
    """JSON object of a file, empty when there is no such file. Raises InputError when it holds anything else."""
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold one JSON object")
    return value


def check_place(path: Path) -> None:
    """Raises InputError, before a long run, where ``path`` cannot name a file to write."""
    if not path.name:
        raise InputError("the name of a file to write is empty or '.': give the name of a file")
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is a folder or a device: name another file")
    if not (os.path.isdir(path.parent) and os.access(path.parent, os.W_OK)):
        raise InputError(f"{path} cannot be written: the folder {path.parent} does not exist or is read-only")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, moved onto it when the block ends well and deleted when it does not.

    Where ``path`` is a link, its target is written. The file gets the permissions of any new file, also where a library
    replaces the temporary file by one of its own. Raises InputError for a folder or a device.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    check_place(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
        permissions = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        temporary.chmod(permissions)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_utf8(name: str, value: str) -> None:
    """Raises InputError for text that came from bytes which are no UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"the {name} holds bytes that are not UTF-8: {value!a:.80}") from None
