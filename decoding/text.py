"""Text being written, as tokens and as bytes, with its stop strings, banned words and constraints.

Strings are searched in bytes of UTF-8, since tokens may end inside characters, and strings inside
tokens. Knows nothing of files, options and drafts.

A banned word must not appear in the text, in any tokenization. When one completes, everything from
the token in which it began is retracted, that token is forbidden at that position, and the loop
draws again. Draft and target apply a forbidden token as a mask, like any constraint, and the cache
is rolled back as after a rejection.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.model_port import Model
from decoding.randomness import Place
from model.errors import InputError, explaining

TokenBytes = Callable[[int], bytes]  # the bytes that a token adds to the text

# A function of the tokens so far (prompt included): the mask, bool [vocab], of the tokens that may
# come next, or None for all. It must depend on nothing else, so that a rollback of the tokens needs
# no rollback of the constraint. It is called with texts that its masks allow, drafted tokens
# included, but never with a token after an end-of-text token.
Constraint = Callable[[Sequence[int]], Tensor | None]


@dataclass(frozen=True)
class Conditions:
    """Conditions on a text: where it ends, its banned words and its constraints.

    It ends after ``max_new_tokens``, with any of ``eos_ids``, before a stop string, or where the
    model's context is full. ``banned`` words are matched as substrings of the UTF-8 bytes,
    case-sensitively, also across tokens. Raises InputError for a budget below 1 and for an empty
    string.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_strings: Sequence[str] = ()
    banned: Sequence[str] = ()
    constraints: Sequence[Constraint] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max-new-tokens must be at least 1, found {self.max_new_tokens}")
        for option, strings in (("stop", self.stop_strings), ("ban", self.banned)):
            if isinstance(strings, str) or "" in strings:
                raise InputError(
                    "give stop strings and banned words as lists of strings of at least one"
                    " character each",
                    option,
                )
            with explaining(f"{option} is not UTF-8 text", (UnicodeError,), option):
                "".join(strings).encode()


def completed(strings: Sequence[bytes], data: bytearray, since: int, floor: int = 0) -> int | None:
    """Return the offset in ``data`` of the string that ends first after the offset ``since``, if
    any does.

    Of several that end at the same byte, the longest counts. It must begin at ``floor`` or later.
    """
    begins: dict[int, int] = {}  # by the offset where a string ends, that of the longest
    for string in strings:
        begin = data.find(string, max(floor, since - len(string) + 1))
        if begin >= 0:
            end = begin + len(string)
            begins[end] = min(begin, begins.get(end, begin))
    return begins[min(begins)] if begins else None


def pending(strings: Sequence[bytes], data: bytearray, end: int, floor: int = 0) -> int:
    """Return the offset where the longest unfinished beginning of a string starts, at the end of
    ``data[:end]``; ``end`` if there is none.
    """
    first = end
    for string in strings:
        begin = data.find(string[:1], max(floor, end - len(string) + 1), first)
        while begin >= 0 and not string.startswith(data[begin:end]):
            begin = data.find(string[:1], begin + 1, first)
        if begin >= 0:
            first = begin
    return first


class DeadEnd(InputError):
    """Error of a text whose constraints allow no next token."""


class Text:
    """Prompt and output so far, with their conditions.

    ``tokens`` and ``data`` (their bytes) begin with the prompt. A finished text includes the token
    that ended it (the end-of-text token, or the one that completed the stop string), while
    ``written`` ends before the stop string. ``longest`` is the most tokens that the text can have,
    by the token budget and the model's context. Raises InputError for a prompt without tokens, for
    one that fills the context, and for strings to be found without ``token_bytes``.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        conditions: Conditions,
        target: Model,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        if not 0 < len(prompt) < target.max_positions:
            raise InputError(
                f"the prompt has {len(prompt)} tokens: give one of at least 1, and of fewer than"
                f" the model's context, {target.max_positions}"
            )
        if token_bytes is None and (conditions.stop_strings or conditions.banned):
            raise InputError("stop strings and banned words need `token_bytes`: give the function")
        self.conditions = conditions
        self.token_bytes = token_bytes or (lambda token: b"")
        self.vocab_size = target.vocab_size
        self.device = target.device
        self.stops = [string.encode() for string in conditions.stop_strings]
        self.bans = [string.encode() for string in conditions.banned]
        self.tokens: list[int] = []
        self.data = bytearray()
        self.begins = [0]  # of each token and the next one, the offset of its bytes in ``data``
        # position -> tokens that a banned word forbids there
        self.forbidden: dict[int, list[int]] = {}
        self.retractions = 0
        self.finish: str | None = None
        self.cut: int | None = None  # the offset in ``data`` where a finished text ends
        for token in prompt:
            self._append(token)
        self.prompt_length = len(self.tokens)
        self.prompt_bytes = len(self.data)
        self.longest = min(self.prompt_length + conditions.max_new_tokens, target.max_positions)
        self.buffer = torch.empty(self.longest, dtype=torch.int64, device=self.device)  # of tokens
        self.copied = 0  # the number of tokens that the buffer holds

    def __len__(self) -> int:
        """Return the number of tokens, prompt included."""
        return len(self.tokens)

    @property
    def generated(self) -> list[int]:
        """Output tokens so far, including the one that ended the text."""
        return self.tokens[self.prompt_length :]

    @property
    def written(self) -> str:
        """Output as a string, up to the stop string; bytes that are no UTF-8 become U+FFFD."""
        return self.data[self.prompt_bytes : self.cut].decode("utf-8", errors="replace")

    @property
    def remaining(self) -> int:
        """Number of tokens that the token budget and the model's context still allow."""
        return self.longest - len(self)

    @property
    def certain_end(self) -> int:
        """Offset in ``data`` up to which no later token can change the text.

        With "cat" banned, nothing of "black ca" is certain from the token of the "c" on, since all
        from there may be retracted. The rest may then end in the beginning of another banned word,
        hence the loop. A stop string that has begun may cut the text before it.
        """
        if self.cut is not None:
            return self.cut
        end = len(self.data)
        begin = pending(self.bans, self.data, end)
        while begin < end and end > self.prompt_bytes:
            end = self.begins[self._holder(begin)]
            begin = pending(self.bans, self.data, end)
        return pending(self.stops, self.data, end, self.prompt_bytes)

    def place(self, ahead: int = 0) -> Place:
        """Return the place of the next draw, ``ahead`` drafted tokens behind the text."""
        return Place(len(self) + ahead, self.retractions)

    def tensor(self) -> Tensor:
        """Return the tokens ``[n]`` int64 on the target's device: a view that is valid until the
        text is extended.

        Only the tokens that are new since the last call are copied.
        """
        if self.copied < len(self):
            new = torch.tensor(self.tokens[self.copied :], dtype=torch.int64)
            self.buffer[self.copied : len(self)].copy_(new, non_blocking=True)
            self.copied = len(self)
        return self.buffer[: len(self)]

    def allowed(self, drafted: Tensor, first: int = 0) -> Tensor | None:
        """Return the mask of allowed tokens after the text and the first n drafted ones, for n from
        ``first`` to all ``[k]``.

        bool ``[k + 1 - first, vocab]`` on the draft's device. Where all tokens are allowed it is
        None. That is known without reading the draft where there are neither constraints nor tokens
        that a banned word forbids at the text's end.
        """
        if not self.conditions.constraints and len(self) not in self.forbidden:
            return None
        ids = drafted.tolist()
        rows = [self.allowed_after(ids[:count]) for count in range(first, len(ids) + 1)]
        if all(row is None for row in rows):
            return None
        everything = torch.ones(self.vocab_size, dtype=torch.bool)
        return torch.stack([everything if row is None else row for row in rows]).to(drafted.device)

    def allowed_after(self, drafted: Sequence[int]) -> Tensor | None:
        """Return the mask, bool ``[vocab]``, of allowed tokens after the text and these drafted
        ones; None if all are allowed.

        Every position with forbidden tokens lies in the text or at its end, since a retraction
        drops later ones.
        """
        if not self.conditions.eos_ids.isdisjoint(drafted):
            return None  # no constraint is called with tokens beyond the end of the text
        tokens = [*self.tokens, *drafted]
        masks = [
            mask.cpu()
            for constraint in self.conditions.constraints
            if (mask := constraint(tokens)) is not None
        ]
        if len(tokens) in self.forbidden:
            masks.append(torch.ones(self.vocab_size, dtype=torch.bool))
            masks[-1][self.forbidden[len(tokens)]] = False
        return (torch.stack(masks).all(0) if len(masks) > 1 else masks[0]) if masks else None

    def extend(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Append tokens in order, up to the first that ends the text or completes a banned word.

        Returns the tokens appended, and those then removed from the end because of the banned word.
        A ban is checked before a stop at the same token.
        """
        emitted: list[int] = []
        retracted: list[int] = []
        for token in tokens:
            self._append(token)
            emitted.append(token)
            retracted = self._retract()
            if retracted:
                break
            self._check_end()
            if self.finish:
                break
        return emitted, retracted

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.data += self.token_bytes(token)
        self.begins.append(len(self.data))

    def _retract(self) -> list[int]:
        """Remove the banned word that the last token completed, if any; returns the tokens removed.

        A word begun in the prompt forbids the first generated token. Tokens forbidden after a
        prefix accumulate, and stay forbidden while the text begins with that prefix.
        """
        begin = completed(self.bans, self.data, self.begins[-2])
        if begin is None:
            return []
        position = self._holder(begin)
        removed = self.tokens[position:]
        self.retractions += 1
        self.forbidden = {at: tokens for at, tokens in self.forbidden.items() if at <= position}
        self.forbidden.setdefault(position, []).append(removed[0])
        self.copied = min(self.copied, position)
        del self.tokens[position:], self.begins[position + 1 :]
        del self.data[self.begins[position] :]
        return removed

    def _check_end(self) -> None:
        """Finish the text if the last token ends it: by end-of-text, a stop string or the budget,
        in this order.
        """
        stop = completed(self.stops, self.data, self.begins[-2], self.prompt_bytes)
        if self.tokens[-1] in self.conditions.eos_ids:
            self.finish = "eos"
        elif stop is not None:
            self.finish = "stop"
        elif self.remaining <= 0:
            self.finish = "length"
        if self.finish:
            self.cut = stop if self.finish == "stop" else len(self.data)

    def _holder(self, offset: int) -> int:
        """Return the position of the token with the byte at ``offset``, at least the first
        generated one.
        """
        return max(bisect_right(self.begins, offset) - 1, self.prompt_length)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of both."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # mostly so, and fast
        return shorter
    return next((at for at in range(shorter) if first[at] != second[at]), shorter)
