"""The search for stop strings and banned words at the end of a growing text, in bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence


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

    def pending(self, data: bytearray, end: int, floor: int = 0) -> int:
        """Where the longest end of ``data[:end]`` begins that may yet grow into a pattern; ``end`` if none may."""
        for begin in range(max(floor, end - self.longest + 1), end):
            tail = bytes(data[begin:end])
            if any(string.startswith(tail) and string != tail for string in self.strings):
                return begin
        return end
