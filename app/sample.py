"""A text that is being written, and the cache that it is written on.

Makes no draft, and runs no step but the reading of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from reprlib import repr as shortened
from typing import TYPE_CHECKING

import torch

from app.characters import TextStream
from decoding.model_port import Model
from decoding.rounds import Round, Statistics
from decoding.text import Text, common_prefix
from decoding.verify import Rule
from model.cache import KVCache
from model.decoder import PREFILL_CHUNK, Decoder

if TYPE_CHECKING:
    from app.options import Options
    from decoding.grammar import GrammarConstraint


@dataclass
class Sample:
    """A text that is being written or is finished, as its ``options`` ask.

    ``source`` is the text as the loop writes it, prompt included; ``text`` is the output's string.
    The caller of the loop gives the times, and adds the rounds.
    """

    source: Text
    options: Options
    rule: Rule
    grammar: GrammarConstraint | None = None  # that constrains it, if any
    draft: str = ""  # name of the draft
    is_plain: bool = False  # whether nothing can be drafted
    prompt_seconds: float = 0.0  # in which the prompt was read
    wait: float = 0.0  # seconds from the call to the first round, with the making of copies
    timeline: list[tuple[Round, float]] = field(default_factory=list)  # rounds, seconds so far
    statistics: Statistics = field(default_factory=Statistics)
    continues: bool = False  # goes on with whatever its cache holds, as a conversation does
    trouble: str | None = None  # why steps fell back to the readable blocks, if so

    def add(self, round: Round, seconds: float) -> None:
        """Add a round that took these seconds."""
        self.timeline.append((round, self.seconds + seconds))
        self.statistics.add(round)

    def __repr__(self) -> str:
        return f"Sample({shortened(self.text)}, {self.finish}, {self.speed:.1f} tokens/s)"

    @property
    def text(self) -> str:
        """The output, up to the stop string; bytes that are no UTF-8 become U+FFFD."""
        return self.source.written

    @property
    def tokens(self) -> list[int]:
        """Ids of the output, including the token that ended it."""
        return self.source.generated

    @property
    def prompt_tokens(self) -> int:
        """Number of the prompt's tokens."""
        return self.source.prompt_length

    @property
    def finish(self) -> str:
        """Why the text ended: "eos", "stop", "length", or "interrupted"."""
        return self.source.finish or "interrupted"

    @property
    def rounds(self) -> list[Round]:
        """The rounds in which the text was written."""
        return [round for round, _ in self.timeline]

    @property
    def seconds(self) -> float:
        """Seconds from the end of the prompt to the last token, without those that the reader of a
        stream took between two rounds.
        """
        return self.timeline[-1][1] if self.timeline else 0.0

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the call to the first token, the reading of the prompt included."""
        return self.wait + self.timeline[0][1] if self.timeline else 0.0

    @property
    def repeat_with(self) -> str:
        """The options that repeat a sampled text; none of a greedy one.

        One of several texts is the last that they write, after the same prompt.
        """
        count = f" --num-samples {self.rule.sample + 1}" if self.rule.sample else ""
        options = f"--seed {self.rule.seed} --coupling {self.rule.name}{count}"
        return options if self.options.temperature else ""

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.statistics.tokens / self.seconds if self.seconds else 0.0


def pieces(sample: Sample, rounds: Iterator[Round]) -> Iterator[str]:
    """Yield the pieces of a text as its rounds write them."""
    stream = TextStream(sample.source)
    for _ in rounds:
        if piece := stream.pull():
            yield piece


@dataclass
class Slot:
    """KV cache for one text at a time (llama.cpp's name), the ``source`` of this text, and the
    tokens whose entries it holds.

    The first ``in_chunks`` of them were read in the chunks of a whole prompt, from its beginning
    on; later ones in short steps. ``draft_caches`` are those of draft models.
    """

    cache: KVCache
    source: Text | None = None
    tokens: list[int] = field(default_factory=list)
    in_chunks: int = 0
    draft_caches: dict[Decoder, KVCache] = field(default_factory=dict)

    @torch.inference_mode()
    def read(self, sample: Sample, target: Model) -> None:
        """Read the prompt of a text, all but its last token, from the first token on that the cache
        does not hold. All entries but those of this common prefix are forgotten.

        Kept are entries that a fresh reading would have, bit for bit: whole chunks, since rows are
        rounded together, or those of the whole prompt. Only a text that ``continues`` goes on
        behind entries of short steps too, which round otherwise. So it may differ in rounding from
        one whose prompt is read anew.

        Say a prompt of 700 tokens was read in chunks of 256, and 40 tokens were written after it:
        ``in_chunks`` is 700. A new prompt that shares 710 tokens keeps the whole chunks of these
        700, which are 512 tokens. The same prompt keeps all 700, and one that ``continues`` 710.
        """
        prompt = sample.source.tokens[:-1]
        start = common_prefix(self.tokens[: self.cache.length], prompt)
        is_same_prompt = start == self.in_chunks == len(prompt)
        if not (sample.continues or is_same_prompt):
            start = min(start, self.in_chunks) // PREFILL_CHUNK * PREFILL_CHUNK
        self.tokens = prompt[:start]  # now: Ctrl-C may end the reading
        self.in_chunks = min(self.in_chunks, start)
        self.cache.truncate(start)
        if unread := prompt[start:]:
            target.prefill(torch.tensor([unread], device=target.device), self.cache, start)
            # Chunks behind whole chunks are those of a fresh reading.
            if start == self.in_chunks and start % PREFILL_CHUNK == 0:
                self.in_chunks = len(prompt)
        self.tokens = prompt

    def copy_from(self, other: Slot) -> None:
        """Hold the entries of another slot, into whose cache a prompt was just read."""
        self.cache.copy_from(other.cache, len(other.tokens))
        self.tokens = other.tokens
        self.in_chunks = other.in_chunks
