"""Grammars: JSON schemas, regular expressions and Lark grammars as constraints, by llguidance.

A grammar is a constraint like any other: its mask is a function of the tokens so far. The library's
matcher has a state, though, which moves with every token. ``GrammarConstraint`` hides it: asked for
any text, it rolls the matcher back to the longest common prefix and consumes the rest. So a
rejected draft needs no care, and a draft's masks are those of its verification.

Bytes that the grammar forces must be written in the tokens that the tokenizer gives them: a model
has seen no other. There the mask has one token, which ``ForcedTokens`` drafts without a model. No
other file of this folder knows of grammars.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import llguidance
import numpy as np
import torch
from torch import Tensor

from decoding.drafters import Draft, Wrapper, draft_of
from decoding.text import Text, common_prefix
from model.errors import InputError, explaining

# kinds of grammars, as errors call them
TITLES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}

# the one style of JSON: without it a model may fill its budget with spaces
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT_MASKS = 64  # of the last places asked for, more than any default draft has


class Vocabulary:
    """Tokens of a tokenizer as llguidance reads them.

    ``tokens``: the bytes of each id of the model's vocabulary, none for control tokens;
    ``eos_ids`` end a text; ``encode`` gives the ids of a text that continues another one.
    """

    # llguidance reads these names
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_ids: frozenset[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """Raises InputError where no token ends a text, as every grammar must."""
        eos_ids = eos_ids.intersection(range(len(tokens)))
        if not eos_ids:
            raise InputError("a grammar needs a model with an end-of-text token: this one has none")
        self.encode = encode
        # The token after a whole text adds no bytes to it, and one within it must not end it.
        self.eos_ids = {token for token in eos_ids if not tokens[token]} or eos_ids
        self.tokens = [b"" if token in eos_ids else data for token, data in enumerate(tokens)]
        self.special_token_ids = [token for token, data in enumerate(self.tokens) if not data]
        self.eos_token_id = min(self.eos_ids)
        self.library = llguidance.LLTokenizer(self, len(tokens), sorted(self.eos_ids))

    def __call__(self, text: str) -> list[int]:
        """Return the token ids with exactly the bytes of ``text``: the longest matches, where the
        tokenizer gives other bytes, as one that normalises does.
        """
        for encode in (self.encode, self.library.greedy_tokenize):
            ids = list(encode(text))
            if b"".join(self.tokens[token] for token in ids) == text.encode():
                return ids
        raise InputError(f"no token of the model writes a byte of {text!r:.80}")


@dataclass(frozen=True)
class Grammar:
    """Grammar of the output. Called with the length of a prompt, it makes a text's constraint.

    ``source`` is, by its ``kind``, a JSON schema as JSON, a regular expression in the syntax of
    Rust, which the whole output must match, or a Lark grammar whose start is ``start``.
    ``seconds``: the longest that the masks of a text may compute in all. Raises InputError for a
    source that is wrong, not supported or that no text satisfies.
    """

    kind: str
    source: str
    vocabulary: Vocabulary
    seconds: float = math.inf

    def __post_init__(self) -> None:
        first, trouble = self(0).compute(())  # some grammars that nothing satisfies fail only here
        if trouble:
            raise InputError(trouble)
        first[list(self.vocabulary.eos_ids)] = False
        if not first.any():
            raise InputError(f"the {self.title}: only the empty text satisfies it")

    @property
    def title(self) -> str:
        """The name of the kind in an error."""
        return TITLES[self.kind]

    @cached_property
    def pristine(self) -> llguidance.LLMatcher:
        """A matcher at the beginning of the output. It is only copied, since an error never leaves
        a matcher.
        """
        limits = llguidance.LLParserLimits(verbose_errors=False)
        return llguidance.LLMatcher(
            self.vocabulary.library, self._compiled(), log_level=0, limits=limits
        )

    def _compiled(self) -> str:
        """Return the source in the library's format. Its errors are ValueErrors, as are those of
        text that is not UTF-8.
        """
        with explaining(f"the {self.title}", (ValueError,)):
            if self.kind == "json_schema":
                return llguidance.LLMatcher.grammar_from_json_schema(
                    self.source, overrides=JSON_STYLE
                )
            if self.kind == "lark":
                return llguidance.LLMatcher.grammar_from_lark(self.source)
            if (len(self.source) - len(self.source.rstrip("\\"))) % 2:
                raise ValueError("it ends in a backslash that escapes nothing")
            return llguidance.LLMatcher.grammar_from_regex(self.source)

    def __call__(self, prompt_length: int) -> "GrammarConstraint":
        return GrammarConstraint(self, prompt_length)


class GrammarConstraint:
    """Constraint of one text by a grammar: a mask that depends on the tokens after the prompt only.

    The matcher has consumed ``consumed``. The last ``masks`` are kept by what was written, so that
    verification finds those of the draft. ``seconds`` is the time that all have taken.
    """

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self.grammar = grammar
        self.prompt_length = prompt_length
        self.matcher = grammar.pristine.deep_copy()
        self.consumed: tuple[int, ...] = ()
        self.masks: dict[tuple[int, ...], Tensor] = {}
        self.seconds = 0.0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Return the mask, bool ``[vocab]``, of the tokens that may follow: none where the library
        fails.

        Raises InputError where the masks of the text have taken too long.
        """
        written = tuple(tokens[self.prompt_length :])
        if written not in self.masks:
            if len(self.masks) == KEPT_MASKS:
                del self.masks[next(iter(self.masks))]  # the oldest
            self.masks[written] = self.compute(written)[0]
        return self.masks[written]

    def trouble_after(self, tokens: Sequence[int]) -> str | None:
        """Return the library's reason why no token may follow; None where it does not fail."""
        return self.compute(tuple(tokens[self.prompt_length :]))[1]

    def guess(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that the tokenizer gives to the bytes which the grammar forces next."""
        began = time.thread_time()
        self._move_to(tuple(tokens[self.prompt_length :]))
        forced = self.matcher.compute_ff_bytes()
        found = self.grammar.vocabulary.library.tokenize_bytes(forced) if forced else []
        self.seconds += time.thread_time() - began
        return found

    def compute(self, written: tuple[int, ...]) -> tuple[Tensor, str | None]:
        """Return the mask after these tokens, by the matcher, and the reason of its failure, if it
        fails.
        """
        began = time.thread_time()
        self._move_to(written)
        bits = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            # A matcher never leaves an error. Other branches may have used up a limit: once more.
            self.matcher = self.grammar.pristine.deep_copy()
            self.consumed = ()
            self._move_to(written)
            bits = self.matcher.compute_bitmask()
        trouble = None
        if self.matcher.is_error():
            trouble = f"the {self.grammar.title}: {reason(self.matcher)}"
            bits = bytes(len(bits))
        self.seconds += time.thread_time() - began
        if self.seconds > self.grammar.seconds:
            raise InputError(
                f"the {self.grammar.title}: its masks took more than {self.grammar.seconds:g} s:"
                " simplify it"
            )
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        mask = torch.from_numpy(allowed[: len(self.grammar.vocabulary.tokens)]).view(torch.bool)
        return mask, trouble

    def _move_to(self, written: tuple[int, ...]) -> None:
        """Let the matcher have consumed these tokens, from the common prefix on."""
        kept = common_prefix(self.consumed, written)
        self.matcher.rollback(len(self.consumed) - kept)
        self.matcher.consume_tokens(list(written[kept:]))
        self.consumed = written


@dataclass
class ForcedTokens(Wrapper):
    """Drafter of the tokens that a grammar forces: where it allows one only, they are the round's
    draft, and elsewhere the ``inner`` drafter drafts.

    After them come the tokens that the tokenizer gives to the bytes that the grammar forces. These
    are guesses, since other tokens that begin with the same bytes are allowed there.
    """

    constraint: GrammarConstraint

    def instead(self, text: Text, limit: int) -> Draft | None:
        """Return the draft of forced tokens, if there are any."""
        forced = self.forced(text, limit)
        return draft_of(text, forced) if forced else None

    def forced(self, text: Text, limit: int) -> list[int]:
        """Return up to ``limit`` tokens that must, or probably will, follow the text."""
        found: list[int] = []
        while len(found) < limit and text.conditions.eos_ids.isdisjoint(found):
            allowed = text.allowed_after(found).numpy()
            possible = np.count_nonzero(allowed)
            if possible > 1:  # where nothing is possible, the library may have failed
                found += self.constraint.guess([*text.tokens, *found])
            if possible != 1:
                break
            found.append(int(allowed.argmax()))
        return found[:limit]


def reason(matcher: llguidance.LLMatcher) -> str:
    """Return the library's reason for an error in one line, without its state."""
    lines = matcher.get_error().splitlines()
    if "no token of the model" in lines[0]:  # raised by the vocabulary, within the library
        return "it forces a byte that no token of the model writes"
    found = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error:")), None
    )
    return "no text satisfies it" if lines[0].startswith("NoExtension") else found or lines[0]
