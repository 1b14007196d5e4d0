"""Corpus file: written texts, one JSON object per line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from model import InputError
from weights.cli.files import atomic_path, explaining

KINDS = ("story", "chat")
DISTINCT_CHARACTERS = 200  # of two responses that begin with the same 200 characters, the first is kept


@dataclass(frozen=True)
class WrittenText:
    """A prompt and the model's response."""

    kind: str
    prompt: str
    response: str


def read_texts(path: Path) -> list[WrittenText]:
    """The texts of a file. Raises InputError naming the first line that is no text."""
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        match row:
            case {"kind": "story" | "chat" as kind, "prompt": str(prompt), "response": str(response)}:
                texts.append(WrittenText(kind, prompt, response))
            case _:
                raise InputError(f"{path}, line {number} is not a text that this command wrote: give another file")
    return texts


class TextFile:
    """A file of texts with distinct responses, and the number of their responses' tokens by kind."""

    def __init__(self, path: Path, count_tokens: Callable[[str], int]) -> None:
        """Read the file, or create it. Raises InputError when it cannot be written or holds anything else."""
        self.path, self.count_tokens = path, count_tokens
        self.texts: dict[str, WrittenText] = {}
        self.tokens: Counter[str] = Counter()
        self.add(read_texts(path) if path.is_file() else [])

    def add(self, texts: Iterable[WrittenText]) -> None:
        """Add the texts whose responses are new, atomically. Raises InputError when the file cannot be written."""
        for text in texts:
            beginning = text.response[:DISTINCT_CHARACTERS]
            if beginning not in self.texts:
                self.texts[beginning] = text
                self.tokens[text.kind] += self.count_tokens(text.response)
        with explaining(f"{self.path} cannot be written"), atomic_path(self.path) as temporary:
            temporary.write_text("".join(json.dumps(asdict(text)) + "\n" for text in self.texts.values()))
