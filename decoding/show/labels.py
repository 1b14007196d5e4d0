"""Printable forms of text and tokens: without control characters and invisible ones."""

from __future__ import annotations

from collections.abc import Mapping

from decoding.text import TokenBytes
from weights.tokenizer import Tokenizer

JOINERS = "\u200c\u200d"  # parts of words and emoji, harmless
SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def visible(text: str, *, lines: bool = False) -> str:
    """``text`` with a visible sign in place of every control, format and surrogate character.

    With ``lines``, for running text, line breaks stay and a tab becomes four spaces.
    """
    if lines:
        return "\n".join(visible(line) for line in text.replace("\t", " " * 4).split("\n"))
    return "".join(each if each.isprintable() or each in JOINERS else _sign(each) for each in text)


def _sign(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # Unicode's signs for control characters
    return " " if character.isspace() else "\ufffd"


class Labels:
    """Names of single tokens."""

    def __init__(self, token_bytes: TokenBytes, control: Mapping[int, str]) -> None:
        """``control``: the names of tokens that add no bytes to the text, such as the end of the text."""
        self.token_bytes, self.control = token_bytes, control

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Labels:
        """Labels of a tokenizer's tokens."""
        return cls(tokenizer.token_bytes, {token: name for name, token in tokenizer.vocabulary.special.items()})

    def __call__(self, token: int) -> str:
        """The token's text, spaces alone as ``␣``, incomplete characters as ``\\xe2``; the name of a control token."""
        data = self.token_bytes(token)
        if not data.strip(b" "):
            return "␣" * len(data) or self.name(token)
        return visible(data.decode("utf-8", errors="backslashreplace"))

    def name(self, token: int) -> str:
        """The name, or else the number, of a token that adds no bytes."""
        return visible(self.control.get(token, f"#{token}"))
