"""The text being written, as tokens and as bytes, and the search for strings in it.

Everything here counts in bytes of UTF-8: a token may end inside a character, a stop string or a banned
word may begin and end inside tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

TokenBytes = Callable[[int], bytes]  # the bytes a token adds to the text


class Transcript:
    """Prompt and output so far, growing at the end and shrinking when tokens are taken back."""

    def __init__(self, prompt: Sequence[int], token_bytes: TokenBytes) -> None:
        self.prompt_length = len(prompt)
        self.token_bytes = token_bytes
        self.tokens: list[int] = []
        self.data = bytearray()
        self.ends: list[int] = []  # the offset in ``data`` where each token's bytes end
        for token in prompt:
            self.append(token)
        self.prompt_bytes = len(self.data)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.data += self.token_bytes(token)
        self.ends.append(len(self.data))

    def truncate(self, length: int) -> None:
        """Take back every token from position ``length`` on."""
        del self.tokens[length:], self.ends[length:]
        del self.data[self.ends[-1] if self.ends else 0 :]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def begin(self, position: int) -> int:
        """The offset where the bytes of the token at ``position`` begin."""
        return self.ends[position - 1] if position else 0

    def position(self, offset: int) -> int:
        """The position of the token that holds the byte at ``offset``."""
        return bisect_right(self.ends, offset)


class Patterns:
    """A few byte strings to be found at the end of a growing text.

    Each call looks only at the last bytes, so taking text back needs no undoing here.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = [string.encode() for string in strings]
        self.longest = max(map(len, self.strings), default=0)

    def completed(self, data: bytearray, new: int, floor: int = 0) -> int | None:
        """Where the pattern begins that ends first within the last ``new`` bytes; None if none does.

        Of several that end at the same byte, the longest counts. None of it may lie before ``floor``.
        """
        best: tuple[int, int] | None = None
        for string in self.strings:
            begin = data.find(string, max(floor, len(data) - new - len(string) + 1))
            if begin >= 0 and (best is None or (begin + len(string), begin) < best):
                best = (begin + len(string), begin)
        return best[1] if best else None

    def pending(self, data: bytearray, floor: int = 0) -> int:
        """Where the longest end of the text begins that may yet grow into a pattern; len(data) if none may."""
        for begin in range(max(floor, len(data) - self.longest + 1), len(data)):
            tail = bytes(data[begin:])
            if any(string.startswith(tail) and string != tail for string in self.strings):
                return begin
        return len(data)
