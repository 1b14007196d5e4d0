"""Reading and writing user files: JSON with one clear line on error, writes that are never half done."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import InputError


def read_json(path: Path) -> Any:
    """The parsed JSON of a file. Raises InputError naming the file when it cannot be read or parsed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is a link to what does not exist" if path.is_symlink() else "does not exist"
        raise InputError(f"{path} {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file, or an empty one when there is no such file."""
    if not is_there(path):
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold one JSON object")
    return value


def is_there(path: Path) -> bool:
    """Whether anything has this name, be it a link that leads nowhere or what cannot be read: opening it says why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that no file can have
        return False
    except OSError:
        return True
    return True


def is_file(path: Path) -> bool:
    """Whether there is such a file. A name that no file can have, too long or with a zero byte, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def one_line(error: object) -> str:
    """A library's error as a part of one line: what a file's contents brought into it cannot break the line."""
    return "".join(character if character.isprintable() else " " for character in str(error)[:300])


def check_place(path: Path) -> None:
    """Find out before a long run whether ``atomic_path`` could write here. Raises InputError when it could not."""
    try:
        path = _place(path)
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: the folder {path.parent} does not exist")
        trial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        trial.open("xb").close()
        trial.unlink()
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be written: {one_line(error)}") from None


def _place(path: Path) -> Path:
    """The file that a write to ``path`` makes or replaces: a link's target.

    Raises InputError for a link that leads nowhere, and for what is there and is no regular file.
    """
    place = path
    try:
        if os.path.islink(path):
            place = Path(os.path.realpath(path, strict=True))
        mode = place.stat().st_mode
    except OSError as error:
        if os.path.islink(path) and error.errno in (errno.ENOENT, errno.ELOOP):
            raise InputError(f"{path} is a link that leads nowhere: remove it, or name another file") from None
        if isinstance(error, FileNotFoundError):
            return path
        raise
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}: name another file")
    return place


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, moved onto it when the block ends well and deleted when it does not.

    Where ``path`` is a link, its target is written. The file gets the permissions of any new file (those the umask
    leaves), also where a library replaces the temporary file by one of its own. Raises InputError for a link that leads
    nowhere, and for what is there and is no regular file: a folder, a device, a pipe.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path = _place(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.open("xb").close()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, path)
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
