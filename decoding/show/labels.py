"""Tokens and text as they can be shown to a person: nothing in them acts on the screen, nothing is invisible."""

from __future__ import annotations

from collections.abc import Mapping

from decoding.text import TokenBytes

JOINERS = "\u200c\u200d"  # parts of words and emoji, harmless
PICTURES = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def visible(text: str, *, lines: bool = False) -> str:
    """``text`` with a sign in place of every control, format and surrogate character.

    With ``lines``, line breaks stay and a tab becomes four spaces: running text instead of a label.
    """
    return "".join(
        character
        if character.isprintable() or character in JOINERS or (lines and character == "\n")
        else " " * 4
        if lines and character == "\t"
        else _picture(character)
        for character in text
    )


def _picture(character: str) -> str:
    if character in PICTURES:
        return PICTURES[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # Unicode's own pictures of the control characters
    return " " if character.isspace() else "\ufffd"


class Labels:
    """Names single tokens."""

    def __init__(self, token_bytes: TokenBytes, control: Mapping[int, str]) -> None:
        """``control``: the names of tokens that add no bytes to the text, such as the end of the text."""
        self.token_bytes, self.control = token_bytes, control

    def __call__(self, token: int) -> str:
        """The token's text; bytes that are no whole character as ``\\xe2``; a control token's name or number.

        A token of spaces alone shows them as ``␣``.
        """
        data = self.token_bytes(token)
        if not data.strip(b" "):
            return "␣" * len(data) or self.name(token)
        return visible(data.decode("utf-8", errors="backslashreplace"))

    def name(self, token: int) -> str:
        """What to show for a token that adds no bytes."""
        return visible(self.control.get(token, f"#{token}"))
