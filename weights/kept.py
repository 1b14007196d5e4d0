"""Low-bit copies of checkpoints, kept between runs in the user's cache folder.

Each checkpoint has a folder there, named by what determines its copies. A file is the bytes of one
tensor, the number of its rows and a checksum: written atomically, and mapped into memory when it is
read. Copies only save time, so wherever one cannot be read or written, it is made again.
"""

import fcntl
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor

from cli.command_line import say
from cli.files import atomic_path, one_line
from model import InputError
from model.places import cache_folder
from weights.load import model_fingerprint

LARGEST = 4 * 10**9  # bytes of all checkpoints' copies
USED = "used"  # file of a folder: locked while a process uses the copies, its time is the last use
ROWS_BYTES = 8  # of the number of rows behind a tensor
SUM_BYTES = 4  # of the checksum behind it


def copies_folder() -> Path:
    """Folder of all checkpoints' copies."""
    return cache_folder() / "low-bit"


class KeptTensors:
    """Tensors of one checkpoint by name, kept in a folder that no process drops while this exists.

    The folder's name has the fingerprint of the model in ``folder``, its dtype, and the ``version``
    of the code that makes the tensors.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, version: str) -> None:
        name = f"{model_fingerprint(folder)}-{str(dtype).removeprefix('torch.')}-{version}"
        self.folder = copies_folder() / name
        self.writable = True
        with suppress(OSError):  # read-only: nobody drops it
            self.folder.mkdir(parents=True, exist_ok=True)
            self.used = (self.folder / USED).open("a")
            fcntl.flock(self.used, fcntl.LOCK_SH)
            os.utime(self.folder / USED)

    def read(self, name: str) -> Tensor | None:
        """Bytes ``[rows, n]`` uint8 of a tensor, mapped privately; None where it is absent or
        damaged.
        """
        with suppress(OSError, ValueError):  # ValueError: of an empty file
            content = np.memmap(self.folder / name, np.uint8, "c")
            tensor, rows, checksum = np.split(content, [-ROWS_BYTES - SUM_BYTES, -SUM_BYTES])
            if len(tensor) and self.checksum(name, tensor, rows) == checksum.tobytes():
                return torch.from_numpy(tensor).view(int.from_bytes(rows, "little"), -1)
        return None

    def write(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor ``[rows, n]``. Where that fails, a line says so, once."""
        if not self.writable:
            return
        content = tensor.contiguous().view(torch.uint8).numpy()
        rows = len(content).to_bytes(ROWS_BYTES, "little")
        try:
            with atomic_path(self.folder / name) as temporary, temporary.open("wb") as file:
                for part in (content, rows, self.checksum(name, content, rows)):
                    file.write(part)
        except (OSError, InputError) as error:
            self.writable = False
            reason = one_line(getattr(error, "strerror", None) or error)
            say(f"low-bit copies are not kept, and made at every start: {self.folder}: {reason}")

    def checksum(self, name: str, *parts: np.ndarray | bytes) -> bytes:
        """Checksum of a file in its place: a copy of another file does not have it."""
        found = zlib.crc32(f"{self.folder.name}/{name}".encode())
        for part in parts:
            found = zlib.crc32(part, found)
        return found.to_bytes(SUM_BYTES, "little")

    def drop_oldest(self, largest: int = LARGEST) -> None:
        """Drop the copies of other checkpoints, those least recently used first, until all take at
        most ``largest`` bytes. Those that are in use stay.
        """
        with suppress(OSError):
            folders = sorted(self.folder.parent.iterdir(), key=last_use)
            total = sum(map(size, folders))
            for folder in folders:
                if total <= largest:
                    break
                with suppress(OSError), (folder / USED).open("a") as used:  # OSError: in use
                    fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    total -= size(folder)
                    shutil.rmtree(folder)


def last_use(folder: Path) -> float:
    """Time at which copies were last used, in seconds; 0 where that is not known."""
    with suppress(OSError):
        return (folder / USED).stat().st_mtime
    return 0.0


def size(folder: Path) -> int:
    """Bytes of the files in a folder and below."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def kept_in_words() -> str:
    """Line of the folder and the size of all checkpoints' copies."""
    return f"kept low-bit copies: {decimal(size(copies_folder()))} in {copies_folder()}"
