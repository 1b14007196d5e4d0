"""Rounds -> text that can be shown at once: never half a character, never what may yet be taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from decoding.banned import BannedWords
from decoding.rounds import Round
from decoding.stopping import StopRules
from decoding.text import TokenBytes, Transcript


class TextStream:
    """Follows the rounds of one text and says what of it is certain.

    Held back until it is decided: bytes of an unfinished UTF-8 character, an end of the text that may grow
    into a stop string, and the tokens from the one in which a banned word may have begun.
    """

    def __init__(
        self, prompt: Sequence[int], token_bytes: TokenBytes, stop: StopRules, banned: BannedWords | None = None
    ) -> None:
        self.transcript = Transcript(prompt, token_bytes)
        self.stop, self.banned = stop, banned
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.shown = self.transcript.prompt_bytes
        self.text = ""

    @property
    def tokens(self) -> list[int]:
        """The tokens written so far, the one that ended the text included."""
        return self.transcript.generated

    def push(self, round: Round) -> str:
        """Take in a round; returns the text that has become certain, perhaps none."""
        for token in round.emitted:
            self.transcript.append(token)
        self.transcript.truncate(len(self.transcript.tokens) - round.retracted)
        if round.finish:
            return self._show(self.stop.cut(self.transcript) if round.finish == "stop" else None, final=True)
        safe = self.stop.patterns.pending(self.transcript.data, floor=self.transcript.prompt_bytes)
        if self.banned:
            safe = min(safe, self.banned.safe_end(self.transcript))
        return self._show(safe)

    def flush(self) -> str:
        """What is still held back when the text is broken off before its end."""
        return self._show(None, final=True)

    def _show(self, end: int | None, final: bool = False) -> str:
        end = len(self.transcript.data) if end is None else end
        piece = self.decoder.decode(bytes(self.transcript.data[self.shown : end]), final=final)
        self.shown = max(self.shown, end)
        self.text += piece
        return piece
