"""A growing file of written texts, one JSON object a line, which survives whatever kills its writer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from model import InputError

KINDS = ("story", "chat")
DISTINCT_CHARACTERS = 200  # two responses that begin with as many equal characters count as the same
FIRST_BYTES = b'{"kind": "'  # of every line


@dataclass(frozen=True)
class WrittenText:
    """A prompt and the model's response; ``finished`` unless the response was cut off at the token limit."""

    kind: str
    prompt: str
    response: str
    finished: bool
    temperature: float


class TextFile:
    """Texts on disk, none twice. Lines are only ever appended, so a writer that is killed tears the last at most.

    ``lines`` is how many texts there are, ``tokens`` how many tokens their responses have, by kind.
    """

    def __init__(self, path: Path, count_tokens: Callable[[str], int]) -> None:
        """Read what is there, create the file if nothing is, and repair a torn last line.

        Raises InputError, and leaves the file as it was, when it cannot be written or holds something else.
        """
        self.path, self.count_tokens = path, count_tokens
        self.lines, self.tokens = 0, dict.fromkeys(KINDS, 0)
        self.beginnings: set[str] = set()
        try:
            if path.exists() and not path.is_file():
                raise InputError(f"{path} is not a regular file: give another --out")
            with path.open("ab"):
                data = path.read_bytes()
            *whole, last = data.split(b"\n")
            for number, line in enumerate(whole, start=1):
                self._note(self._parse(line, path, number))
            if last:
                self._mend(last)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens.values())

    def take(self, path: Path, judge: Callable[[WrittenText], WrittenText | None]) -> None:
        """Add what ``judge`` makes of each text of another such file. Raises InputError when it cannot be read."""
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        texts = [judge(self._parse(line, path, number)) for number, line in enumerate(lines, start=1)]
        self.append([text for text in texts if text])

    def append(self, texts: Sequence[WrittenText]) -> None:
        """Write those texts whose responses are new, in order.

        Raises InputError when the disk is full or fails; then the lines that fitted are kept, whole.
        """
        new = b""
        for text in texts:
            if text.response[:DISTINCT_CHARACTERS] not in self.beginnings:
                new += json.dumps(asdict(text)).encode() + b"\n"  # pure ASCII: no line break but our own
                self._note(text)
        try:
            self._write(new)
        except OSError as error:
            self._drop_torn_line()
            raise InputError(f"{self.path} cannot be written: {error.strerror}; its whole lines are kept") from None

    def _write(self, data: bytes) -> None:
        with self.path.open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]  # a disk that fills up takes a part of it first
            os.fsync(file.fileno())

    def _note(self, text: WrittenText) -> None:
        self.lines += 1
        self.tokens[text.kind] += self.count_tokens(text.response)
        self.beginnings.add(text.response[:DISTINCT_CHARACTERS])

    @staticmethod
    def _parse(line: bytes, path: Path, number: int) -> WrittenText:
        try:
            row = json.loads(line)
            fields = {name: row[name] for name in WrittenText.__annotations__}
            types = [type(value) for value in fields.values()]
            if fields["kind"] in KINDS and types in ([str, str, str, bool, float], [str, str, str, bool, int]):
                return WrittenText(**fields)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise InputError(f"{path}, line {number} is not a text that this command wrote: give another file")

    def _mend(self, last: bytes) -> None:
        """Complete a last line that lacks only its line break, and drop one of which a part is missing."""
        try:
            self._note(self._parse(last, self.path, self.lines + 1))
        except InputError:
            if last[: len(FIRST_BYTES)] != FIRST_BYTES[: len(last)]:  # not the beginning of any line of ours
                raise
            self._drop_torn_line()
        else:
            self._write(b"\n")

    def _drop_torn_line(self) -> None:
        data = self.path.read_bytes()
        os.truncate(self.path, data.rfind(b"\n") + 1)
