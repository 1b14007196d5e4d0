"""The text being written, as tokens and as bytes, and the rules that it obeys.

Strings are searched in bytes of UTF-8: a token may end inside a character, a stop string or a banned word may begin
and end inside tokens.

A banned word must not be written, whatever tokens would spell it. When one completes, everything from the token in
which it began is taken back, that token is forbidden at that position, and the loop draws again. Draft and target obey
what is forbidden as they obey any constraint, and the rollback is the cache's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.model_port import Model
from decoding.patterns import Patterns
from decoding.randomness import Place
from model.errors import InputError

TokenBytes = Callable[[int], bytes]  # the bytes a token adds to the text

# The tokens so far (prompt included) -> bool [vocab] of tokens that may come next, or None for all.
# It must depend on nothing else: then rolling back tokens rolls the constraint back with them. It is asked
# about texts that its own answers allow, drafted tokens included, but never about what follows an
# end-of-text token.
Constraint = Callable[[Sequence[int]], Tensor | None]


@dataclass(frozen=True)
class Rules:
    """What is asked of a text: when it ends, and what must not be in it.

    It ends after ``max_new_tokens``, with any of ``eos_ids``, before a stop string, or where the model's context is
    full. ``banned`` words are matched as substrings of the UTF-8 bytes, letter case included, also across tokens.
    Raises InputError for a budget below 1 and an empty string.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_strings: Sequence[str] = ()
    banned: Sequence[str] = ()
    constraints: Sequence[Constraint] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max-new-tokens must be at least 1, found {self.max_new_tokens}")
        if "" in self.stop_strings:
            raise InputError("a stop string is empty: it would stop every text at once; give at least one character")
        if "" in self.banned:
            raise InputError("a banned word is empty: it would forbid every text; give at least one character")


class Extension(NamedTuple):
    """What became of tokens that a text was extended by.

    ``emitted``: those appended, up to the first that ended the text or completed a banned word; ``retracted``: the
    tokens that the banned word then took back from the end of the text; ``finish``: "eos", "stop" or "length" if the
    text has ended, else None.
    """

    emitted: list[int]
    retracted: list[int]
    finish: str | None


class Text:
    """Prompt and output so far, with the rules in force.

    ``tokens`` and ``data`` (their bytes) begin with the prompt. A finished text keeps the token that ended it (the
    end-of-text token, the one that completed the stop string) among its tokens; its text ends before the stop string.
    """

    def __init__(
        self, prompt: Sequence[int], rules: Rules, target: Model, token_bytes: TokenBytes = lambda token: b""
    ) -> None:
        self.rules, self.token_bytes = rules, token_bytes
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        self.stops, self.bans = Patterns(rules.stop_strings), Patterns(rules.banned)
        self.tokens: list[int] = []
        self.data = bytearray()
        self.ends: list[int] = []  # the offset in ``data`` where each token's bytes end
        self.forbidden: dict[int, list[int]] = {}  # position -> tokens that a banned word forbids there
        self.retractions = 0
        self.finish: str | None = None
        self.cut: int | None = None  # where in ``data`` a finished text ends
        self.buffer, self.copied = torch.empty(0, dtype=torch.int64), 0  # the first so many tokens, on a device
        for token in prompt:
            self._append(token)
        self.prompt_length, self.prompt_bytes = len(self.tokens), len(self.data)

    def __len__(self) -> int:
        """Tokens, those of the prompt included."""
        return len(self.tokens)

    @property
    def generated(self) -> list[int]:
        """The tokens written so far, the one that ended the text included."""
        return self.tokens[self.prompt_length :]

    @property
    def written(self) -> str:
        """What these tokens say, up to the stop string; bytes that are no UTF-8 become U+FFFD."""
        return self.data[self.prompt_bytes : self.cut].decode("utf-8", errors="replace")

    @property
    def room(self) -> int:
        """How many more tokens may be written: the smaller of budget and context left."""
        return min(self.rules.max_new_tokens + self.prompt_length, self.max_positions) - len(self)

    @property
    def certain(self) -> int:
        """The offset in ``data`` up to which the text will stay as it is, whatever comes next.

        A banned word that has begun may take back everything from its first token on, and so may one that had begun
        in what is then left; a stop string that has begun may cut the text before it.
        """
        if self.cut is not None:
            return self.cut
        end = len(self.data)
        while end > self.prompt_bytes and (begin := self.bans.pending(self.data, end)) < end:
            end = self._begin(self._holder(begin))
        return self.stops.pending(self.data, end, self.prompt_bytes)

    def place(self, drafted: int = 0) -> Place:
        """Where the next token is drawn, or the one after so many drafted ones."""
        return Place(len(self) + drafted, self.retractions)

    def tensor(self, device: torch.device) -> Tensor:
        """The tokens, ``[n]`` int64. Only those that are new since the last call are copied to the device.

        A view of a buffer: it holds until the text is extended.
        """
        if len(self) > len(self.buffer) or self.buffer.device != device:
            self.buffer, self.copied = torch.empty(len(self) + max(0, self.room), dtype=torch.int64, device=device), 0
        if self.copied < len(self):
            new = torch.tensor(self.tokens[self.copied :], dtype=torch.int64)
            self.buffer[self.copied : len(self)].copy_(new, non_blocking=True)
            self.copied = len(self)
        return self.buffer[: len(self)]

    def allowed(self, drafted: Tensor, first: int = 0) -> Tensor | None:
        """Which tokens may follow the text and the ``first`` drafted ones, and so on to all ``[k]`` of them.

        bool ``[k + 1 - first, vocab]`` on the draft's device; None, without reading it, where nothing is forbidden.
        """
        if self.rules.constraints:
            ids = drafted.tolist()
        elif len(self) in self.forbidden and not first:
            ids = [None] * len(drafted)  # unread: what is forbidden is forbidden at the text's end alone
        else:
            return None
        rows = [self.allowed_after(ids[:count]) for count in range(first, len(ids) + 1)]
        if all(row is None for row in rows):
            return None
        everything = torch.ones(self.vocab_size, dtype=torch.bool)
        return torch.stack([everything if row is None else row for row in rows]).to(drafted.device)

    def allowed_after(self, drafted: Sequence[int]) -> Tensor | None:
        """bool ``[vocab]``: which tokens may follow the text and these drafted ones; None when all may.

        Every forbidden position lies in the text or at its end, since a retraction drops those that it passes.
        """
        if not self.rules.eos_ids.isdisjoint(drafted):
            return None  # beyond the end of the text no constraint is asked
        tokens = [*self.tokens, *drafted]
        masks = [mask.cpu() for constraint in self.rules.constraints if (mask := constraint(tokens)) is not None]
        if len(tokens) in self.forbidden:
            masks.append(torch.ones(self.vocab_size, dtype=torch.bool))
            masks[-1][self.forbidden[len(tokens)]] = False
        return torch.stack(masks).all(0) if masks else None

    def extend(self, tokens: Sequence[int | None]) -> Extension:
        """Append tokens in order, up to the first that ends the text or completes a banned word.

        A ban is checked before a stop at the same token. Raises InputError where a token is None: there the
        constraints allowed none.
        """
        emitted: list[int] = []
        retracted: list[int] = []
        for token in tokens:
            if token is None:
                raise InputError(f"the constraints allow no token at position {len(self)} of the text")
            self._append(token)
            emitted.append(token)
            retracted = self._retract()
            if retracted:
                break
            self._check_end()
            if self.finish:
                break
        return Extension(emitted, retracted, self.finish)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.data += self.token_bytes(token)
        self.ends.append(len(self.data))

    def _retract(self) -> list[int]:
        """If the last token completed a banned word, take it back: returns the tokens removed.

        A word begun in the prompt forbids the first generated token. What was forbidden after a prefix stays so, and
        adds up, while the text still begins with that prefix.
        """
        begin = self.bans.completed(self.data, self._new_bytes())
        if begin is None:
            return []
        position = self._holder(begin)
        removed = self.tokens[position:]
        self.retractions += 1
        self.forbidden = {at: tokens for at, tokens in self.forbidden.items() if at <= position}
        self.forbidden.setdefault(position, []).append(removed[0])
        self.copied = min(self.copied, position)
        del self.tokens[position:], self.ends[position:]
        del self.data[self._begin(position) :]
        return removed

    def _check_end(self) -> None:
        """Whether the last token ends the text: by end-of-text, by a stop string, by the budget, in this order."""
        stop = self.stops.completed(self.data, self._new_bytes(), self.prompt_bytes)
        if self.tokens[-1] in self.rules.eos_ids:
            self.finish, self.cut = "eos", len(self.data)
        elif stop is not None:
            self.finish, self.cut = "stop", stop
        elif self.room <= 0:
            self.finish, self.cut = "length", len(self.data)

    def _new_bytes(self) -> int:
        """How many bytes the last token added."""
        return len(self.data) - self._begin(len(self) - 1)

    def _begin(self, position: int) -> int:
        """The offset where the bytes of the token at ``position`` begin."""
        return self.ends[position - 1] if position else 0

    def _holder(self, offset: int) -> int:
        """The position of the token that holds the byte at ``offset``; of the first generated one if it is earlier."""
        return max(bisect_right(self.ends, offset), self.prompt_length)
