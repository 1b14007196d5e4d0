"""Low-bit copies of checkpoints, kept between runs in the user's cache folder.

Each checkpoint has a folder there, named by the hashes of all that determines its copies. A file is
the bytes of one tensor and a checksum: written atomically, and mapped into memory when it is read.
Copies only save time, so wherever one cannot be read or written, it is made again.
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
SUM_BYTES = 4  # of the checksum behind a tensor


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
        """Bytes ``[n]`` uint8 of a tensor, mapped privately; None where it is absent or damaged."""
        with suppress(OSError, ValueError):  # ValueError: of an empty file
            content, checksum = np.split(np.memmap(self.folder / name, mode="c"), [-SUM_BYTES])
            if self.checksum(name, content) == checksum.tobytes():
                return torch.from_numpy(content)
        return None

    def write(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor. Where that fails, a line says so, once."""
        if not self.writable:
            return
        content = tensor.contiguous().view(torch.uint8).numpy()
        try:
            with atomic_path(self.folder / name) as temporary, temporary.open("wb") as file:
                file.write(content)
                file.write(self.checksum(name, content))
        except (OSError, InputError) as error:
            self.writable = False
            reason = one_line(getattr(error, "strerror", None) or error)
            say(f"low-bit copies are not kept, and made at every start: {self.folder}: {reason}")

    def checksum(self, name: str, content: np.ndarray) -> bytes:
        """Checksum of a file in its place: a copy of another file does not have it."""
        place = zlib.crc32(f"{self.folder.name}/{name}".encode())
        return zlib.crc32(content, place).to_bytes(SUM_BYTES, "little")

    def drop_oldest(self, largest: int = LARGEST) -> None:
        """Drop the copies of other checkpoints, those least recently used first, until all take at
        most ``largest`` bytes. Those that are in use stay.
        """
        with suppress(OSError):
            files = copies_folder().glob(f"*/{USED}")
            for file in sorted(files, key=lambda file: file.stat().st_mtime):
                if size(copies_folder()) <= largest:
                    break
                with suppress(OSError), file.open("a") as used:  # OSError: in use
                    fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(file.parent)


def size(folder: Path) -> int:
    """Bytes of the files in a folder and below."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def kept_in_words() -> str:
    """Line of the folder and the size of all checkpoints' copies."""
    return f"kept low-bit copies: {decimal(size(copies_folder()))} in {copies_folder()}"
