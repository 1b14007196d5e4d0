"""Streamed text: the characters of a growing text that are certain to stay."""

import codecs

from decoding.text import Text


class TextStream:
    """Stream of a growing text's new characters.

    It holds back unfinished UTF-8 characters, possible beginnings of a stop string, and tokens that a banned word may
    still take back.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.shown = text.prompt_bytes

    def pull(self) -> str:
        """The characters that have become certain since the last call."""
        return self._up_to(self.text.certain, final=self.text.finish is not None)

    def flush(self) -> str:
        """The characters that are still held back, when no more tokens will come, as after Ctrl-C."""
        return self._up_to(len(self.text.data) if self.text.cut is None else self.text.cut, final=True)

    def _up_to(self, end: int, final: bool) -> str:
        piece = self.decoder.decode(bytes(self.text.data[self.shown : end]), final=final)
        self.shown = max(self.shown, end)
        return piece
