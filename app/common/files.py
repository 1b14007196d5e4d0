"""User files: reading of text and JSON with errors of one line, and atomic writing."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import InputError, explaining

LFS_POINTER = b"version https://git-lfs"


def read_text(path: Path | str) -> str:
    """Return the text of a UTF-8 file. Raises InputError with the path when it cannot be read."""
    with explaining(f"{path} cannot be read as UTF-8 text", (OSError, ValueError)):
        return Path(path).read_text(encoding="utf-8")


def check_is_fetched(path: Path) -> None:
    """Raise InputError for a file that Git has not fetched yet, and for one that is missing."""
    with explaining(f"{path} cannot be read"), path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise InputError(
                f"{path} only points to a file that Git LFS keeps: run git lfs pull in its folder"
            )


def read_json(path: Path | str) -> Any:
    """Return the parsed JSON of a file. Raises InputError with the path when it cannot be read or
    parsed.
    """
    return parsed(read_text(path), path)


def parsed(text: str, place: object) -> Any:
    """Return the value of JSON text. Raises InputError with its place."""
    with explaining(f"{place} is not valid JSON", (ValueError, RecursionError)):
        return json.loads(text)


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location ("FILE, line 3") and value of each line of JSON, as of a training text.
    Raises InputError.
    """
    # splitlines would cut at U+2028 too
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        location = f"{path}, line {number}"
        if line.strip():
            value = parsed(line, location)
            with explaining(f"{location} holds half a surrogate pair: remove it", (UnicodeError,)):
                json.dumps(value, ensure_ascii=False).encode()
            yield location, value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, empty when it is absent. Raises InputError for other
    content.
    """
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold one JSON object")
    return value


def check_place(path: Path) -> None:
    """Raise InputError for a path where no file can be written, such as a folder.

    A file whose place a user names is checked before long work. A missing folder is refused here,
    as a mistyped one; ``atomic_path`` makes the folders of places that nobody checked.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is a folder or a device: name another file")
    if not (os.path.isdir(path.parent) and os.access(path.parent, os.W_OK)):
        raise InputError(
            f"{path} cannot be written: the folder {path.parent} does not exist or is read-only"
        )


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, moved onto it after the block, deleted if that fails.
    Folders that are missing are made.

    Where ``path`` is a link, its target is written. The file gets the permissions of a new file,
    even when a library replaces the temporary file. Raises InputError for a folder or a device, and
    OSError where the system refuses, which the caller explains: the block may do more than write.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    check_place(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch()
        permissions = temporary.stat().st_mode
        yield temporary
        temporary.chmod(permissions)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, atomically. Raises InputError when it cannot be written."""
    with explaining(f"{path} cannot be written"), atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. Raises InputError when it cannot be written."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
