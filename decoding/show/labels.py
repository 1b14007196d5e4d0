"""Printable forms of text and tokens: without control characters and invisible ones."""

from __future__ import annotations

from collections.abc import Mapping

from decoding.text import TokenBytes
from weights.tokenizer import Tokenizer

JOINERS = "\u200c\u200d"  # parts of words and emoji, harmless
SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {9: "⇥", 10: "↵", 127: "␡"}  # of control characters


def visible(text: str, *, lines: bool = False) -> str:
    """``text`` with a visible sign in place of every control, format and surrogate character.

    With ``lines``, for running text, line breaks stay and a tab becomes four spaces.
    """
    signs = {**SIGNS, 9: " " * 4, 10: "\n"} if lines else SIGNS
    text = text.translate(signs)
    return "".join(
        each if each.isprintable() or each in JOINERS + "\n" else " " if each.isspace() else "\ufffd" for each in text
    )


class Labels:
    """Names of single tokens."""

    def __init__(self, token_bytes: TokenBytes, control: Mapping[int, str]) -> None:
        """``control``: the names of tokens that add no bytes to the text, such as the end of the text."""
        self.token_bytes, self.control = token_bytes, control

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Labels:
        """Labels of a tokenizer's tokens."""
        return cls(tokenizer.token_bytes, {token: name for name, token in tokenizer.special.items()})

    def __call__(self, token: int) -> str:
        """The token's text, spaces alone as ``␣``, incomplete characters as ``\\xe2``; the name of a control token."""
        data = self.token_bytes(token)
        if not data.strip(b" "):
            return "␣" * len(data) or self.name(token)
        return visible(data.decode("utf-8", errors="backslashreplace"))

    def name(self, token: int) -> str:
        """The name, or else the number, of a token that adds no bytes."""
        return visible(self.control.get(token, f"#{token}"))
