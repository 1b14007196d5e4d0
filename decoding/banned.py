"""Banned words: text that must not be written, whatever tokens would spell it.

When a banned word completes, everything from the token in which it began is taken back, that token is
forbidden at that position, and the loop draws again. What is forbidden is a constraint like any other,
so draft and target obey it alike, and the rollback is the cache's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.text import Patterns, Transcript
from model.errors import InputError


class BannedWords:
    """The words, and the tokens forbidden so far at positions of the current text.

    Matching is by substring of the UTF-8 bytes, letter case included, also across tokens. A word begun in
    the prompt forbids the first generated token. What was forbidden after a prefix stays so, and adds up,
    while the text still begins with that prefix.
    """

    def __init__(self, words: Sequence[str], vocab_size: int) -> None:
        """Raises InputError for an empty word."""
        if "" in words:
            raise InputError("a banned word is empty: it would forbid every text; give at least one character")
        self.patterns = Patterns(words)
        self.vocab_size = vocab_size
        self.forbidden: dict[int, list[int]] = {}  # position -> tokens not allowed there

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        """The constraint: bool ``[vocab]`` of what may follow these tokens.

        Positions that a draft reaches lie beyond every forbidden one, since a rollback drops those that it
        passes: the length of the prefix is enough to know it.
        """
        if len(tokens) not in self.forbidden:
            return None
        mask = torch.ones(self.vocab_size, dtype=torch.bool)
        mask[self.forbidden[len(tokens)]] = False
        return mask

    def retract(self, text: Transcript) -> int:
        """If the last token completed a banned word, take it back: returns the number of tokens removed."""
        new = len(text.data) - text.begin(len(text.tokens) - 1)
        begin = self.patterns.completed(text.data, new)
        if begin is None:
            return 0
        position = max(text.position(begin), text.prompt_length)
        removed = len(text.tokens) - position
        self.forbidden = {at: tokens for at, tokens in self.forbidden.items() if at <= position}
        self.forbidden.setdefault(position, []).append(text.tokens[position])
        text.truncate(position)
        return removed

    def safe_end(self, text: Transcript) -> int:
        """Up to which byte the text can no longer be taken back by a word now beginning."""
        begin = self.patterns.pending(text.data)
        if begin == len(text.data):
            return begin
        return text.begin(max(text.position(begin), text.prompt_length))
