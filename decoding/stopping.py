"""When a text ends: end-of-text tokens, stop strings, token budget, full context."""

from __future__ import annotations

from collections.abc import Sequence

from decoding.text import Patterns, Transcript
from model.errors import InputError


class StopRules:
    """The rules in force, checked after every token in order of position, whichever round it came from.

    A finished text keeps the token that ended it (the end-of-text token, the one that completed the stop
    string) among its tokens; its text ends before the stop string. Nothing after it exists.
    """

    def __init__(
        self, max_new_tokens: int, eos_ids: frozenset[int] = frozenset(), stop_strings: Sequence[str] = ()
    ) -> None:
        """Raises InputError for a budget below 1 and an empty stop string."""
        if max_new_tokens < 1:
            raise InputError(f"max-new-tokens must be at least 1, found {max_new_tokens}")
        if "" in stop_strings:
            raise InputError("a stop string is empty: it would stop every text at once; give at least one character")
        self.max_new_tokens = max_new_tokens
        self.eos_ids = eos_ids
        self.patterns = Patterns(stop_strings)

    def room(self, text: Transcript, max_positions: int) -> int:
        """How many more tokens may be written: the smaller of budget and context left."""
        return min(self.max_new_tokens + text.prompt_length, max_positions) - len(text.tokens)

    def check(self, text: Transcript, max_positions: int) -> str | None:
        """Why the text ends with its last token, "eos", "stop" or "length"; None while it goes on."""
        if text.tokens[-1] in self.eos_ids:
            return "eos"
        if self.cut(text) is not None:
            return "stop"
        return None if self.room(text, max_positions) > 0 else "length"

    def cut(self, text: Transcript) -> int | None:
        """Where the stop string begins that the last token completed; None if it completed none."""
        new = len(text.data) - text.begin(len(text.tokens) - 1)
        return self.patterns.completed(text.data, new, floor=text.prompt_bytes)
