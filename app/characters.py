"""Characters of a text: those of a growing one that will stay (``TextStream``), and the names of
single tokens (``Labels``).
"""

import codecs
from collections.abc import Mapping, Sequence

from decoding.text import Text, TokenBytes

JOINERS = "\u200c\u200d"  # parts of words and emoji, harmless


def new_decoder() -> codecs.IncrementalDecoder:
    """Return a decoder of the bytes of a growing text, in which a character may spread over tokens.
    After tokens that are taken back it is to be ``reset``.
    """
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


class TextStream:
    """Stream of a growing text's new characters.

    It holds back unfinished characters, beginnings of a stop string, and tokens that a banned word
    may take back.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.decoder = new_decoder()
        self.shown = text.prompt_bytes

    def pull(self, *, at_end: bool = False) -> str:
        """Return the characters that have become certain since the last call.

        ``at_end``, when no more tokens will come, as after Ctrl-C: also those that were held back.
        """
        ended = self.text.finish is not None
        end = len(self.text.data) if at_end and not ended else self.text.certain_end
        begin = self.shown
        self.shown = max(begin, end)
        return self.decoder.decode(bytes(self.text.data[begin:end]), final=at_end or ended)


def visible(text: str) -> str:
    """Return ``text`` in one line, with U+FFFD in place of control, format and surrogate
    characters.
    """
    text = text.replace("\n", "↵").replace("\t", "⇥")
    return "".join(
        c if c.isprintable() or c in JOINERS else " " if c.isspace() else "\ufffd" for c in text
    )


class Labels:
    """Names of single tokens; ``special`` has the ids of those that add no bytes to the text."""

    def __init__(self, token_bytes: TokenBytes, special: Mapping[str, int]) -> None:
        self.token_bytes = token_bytes
        self.names = {token: visible(name) for name, token in special.items()}

    def __call__(self, token: int) -> str:
        """Return the token's text, spaces alone as ``␣``, incomplete characters as ``\\xe2``; the
        name or number of others.
        """
        data = self.token_bytes(token)
        if not data.strip(b" "):
            return "␣" * len(data) or self.names.get(token, f"#{token}")
        return visible(data.decode("utf-8", errors="backslashreplace"))

    def spelled(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens, with the names of those that have none."""
        return b"".join(self.token_bytes(token) or self(token).encode() for token in tokens)
