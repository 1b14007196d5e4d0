"""The text as it can be shown at once: never half a character, never what may yet be taken back."""

from __future__ import annotations

import codecs

from decoding.text import Text


class TextStream:
    """Follows a text that grows, and says what of it has become certain.

    Held back until it is decided: bytes of an unfinished UTF-8 character, an end of the text that may grow into a stop
    string, and the tokens that a banned word may yet take back.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.shown = text.prompt_bytes

    def pull(self) -> str:
        """What has become certain since the last call, perhaps nothing."""
        return self._up_to(self.text.certain, final=self.text.finish is not None)

    def flush(self) -> str:
        """What is still held back, when nothing more will come: of a text that was broken off, say."""
        return self._up_to(len(self.text.data) if self.text.cut is None else self.text.cut, final=True)

    def _up_to(self, end: int, final: bool) -> str:
        piece = self.decoder.decode(bytes(self.text.data[self.shown : end]), final=final)
        self.shown = max(self.shown, end)
        return piece
