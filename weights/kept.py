"""Low-bit copies of checkpoints, kept between runs in the user's cache folder.

Each checkpoint has a folder there, named by the hashes of all that determines its copies. A file is
the bytes of one tensor and a checksum: written atomically, and mapped into memory when it is read.
Copies only save time, so wherever one cannot be read or written, it is made again.
"""

import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor

from app.command_line import say
from app.files import atomic_path, explaining
from model import InputError, cache_folder
from weights.load import bytes_of, model_fingerprint

LARGEST = 4 * 10**9  # bytes of all checkpoints' copies
SUM_BYTES = 4  # of the checksum after a tensor


def copies_folder() -> Path:
    """Folder of all checkpoints' copies."""
    return cache_folder() / "low-bit"


class KeptTensors:
    """Tensors of one checkpoint by name, each a file of one folder.

    The folder's name has the fingerprint of the model in ``folder``, its dtype, and the ``version``
    of the code that makes the tensors. Its time of modification is that of its last use.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, version: str) -> None:
        name = f"{model_fingerprint(folder)}-{str(dtype).removeprefix('torch.')}-{version}"
        self.folder = copies_folder() / name
        self.writable = True
        with suppress(OSError):  # not there yet, or read-only
            os.utime(self.folder)

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
        path = self.folder / name
        content = bytes_of(tensor.contiguous())
        try:
            with (
                explaining(f"{path} cannot be written"),
                atomic_path(path) as temporary,
                temporary.open("wb") as file,
            ):
                file.write(content)
                file.write(self.checksum(name, content))
        except InputError as error:
            self.writable = False
            say(f"low-bit copies are not kept, and made at every start: {error}")

    def checksum(self, name: str, content: np.ndarray) -> bytes:
        """Checksum of a file in its place: a copy of another file does not have it."""
        place = zlib.crc32(f"{self.folder.name}/{name}".encode())
        return zlib.crc32(content, place).to_bytes(SUM_BYTES, "little")

    def drop_oldest(self) -> None:
        """Delete the folders of other checkpoints, those least recently used first, until all
        copies take at most ``LARGEST`` bytes.

        A process that has read a copy keeps it, since the file is mapped.
        """
        with suppress(OSError):  # another process deletes too
            folders = sorted(copies_folder().iterdir(), key=lambda each: each.stat().st_mtime)
            for folder in folders:
                if folder != self.folder and size(copies_folder()) > LARGEST:
                    shutil.rmtree(folder)


def size(folder: Path) -> int:
    """Bytes of the files in a folder and below."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def describe_copies() -> str:
    """Line with the size and the folder of all checkpoints' copies."""
    return f"kept low-bit copies: {decimal(size(copies_folder()))} in {copies_folder()}"
