"""Search for stop strings and banned words at the end of a growing text, in bytes of UTF-8."""

from collections.abc import Sequence


class Patterns:
    """Search for several strings at the end of a growing text.

    It keeps no state between calls, so a rollback of the text needs no rollback here.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = [string.encode() for string in strings]
        self.longest = max(map(len, self.strings), default=0)

    def completed(self, data: bytearray, new: int, floor: int = 0) -> int | None:
        """Offset of the pattern that ends first within the last ``new`` bytes; None if there is none.

        Of several that end at the same byte, the longest counts. It must begin at ``floor`` or later.
        """
        best: tuple[int, int] | None = None
        for string in self.strings:
            begin = data.find(string, max(floor, len(data) - new - len(string) + 1))
            if begin >= 0 and (best is None or (begin + len(string), begin) < best):
                best = (begin + len(string), begin)
        return best[1] if best else None

    def pending(self, data: bytearray, end: int, floor: int = 0) -> int:
        """Offset of the longest suffix of ``data[:end]`` that a pattern begins with; ``end`` if there is none."""
        for begin in range(max(floor, end - self.longest + 1), end):
            tail = bytes(data[begin:end])
            if any(string.startswith(tail) and string != tail for string in self.strings):
                return begin
        return end
