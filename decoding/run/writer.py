"""The writer of texts: a prepared target with its cache, which begins a prompt and writes texts after it.

``generate.py``, the benchmark and the search's confirmation all write through it, so what they time is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch

from decoding.drafters import Drafter
from decoding.policies import Policy
from decoding.rounds import Round, Statistics
from decoding.run.chooser import Drafting, make_steps, plain
from decoding.sampling import SamplingParams
from decoding.speculate import Observer, speculate
from decoding.text import Rules, Text, TokenBytes
from decoding.verify import Coupling
from model import Decoder, KVCache
from model.clock import now

WARM_UP_TOKENS = 4  # written and thrown away before anything is timed, at least

Reader = Callable[[Round, float], None]  # takes a round as it comes in, and the seconds decoding has taken so far


@dataclass
class Sample:
    """A text with its rounds, and the seconds that decoding took; the prompt's prefill is not in them."""

    text: Text
    rounds: list[Round] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0
    interrupted: bool = False  # by Ctrl-C, perhaps after its last token
    trouble: str | None = None  # why the model continues without what makes it fast

    @property
    def finish(self) -> str:
        """Why the text ended: "eos", "stop", "length", or "interrupted" by Ctrl-C."""
        return self.text.finish or "interrupted"

    @property
    def tokens_per_second(self) -> float:
        return self.statistics.tokens / self.seconds if self.seconds else 0.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a text was written; ``sample`` holds what was written so far."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample


class Writer:
    """A target and the cache of the text that it writes.

    All prompts share one cache, and each drafting keeps one drafter: what was prepared for them, such as CUDA graphs,
    serves every text.
    """

    # On several processes rank 0 decides: ``decoding.run.ranks`` replaces this.
    decide = staticmethod(lambda policy, randomness, verify: (randomness, verify))

    def __init__(self, model: Decoder, capacity: int, token_bytes: TokenBytes = lambda token: b"") -> None:
        """``capacity``: positions of the cache, for the longest prompt with its output."""
        self.model, self.capacity, self.token_bytes = model, capacity, token_bytes
        self.cache: KVCache = model.new_cache(capacity)
        make_steps(model, self.cache)
        self.drafters: dict[Callable[[KVCache], Drafter], Drafter] = {}
        self.prompt: list[int] = []
        self.plain = plain(model)

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int]) -> float:
        """Read a prompt afresh, all but its last token, and return the seconds that took.

        A draft model with a cache of its own reads it when it first drafts.
        """
        began = self.clock()
        self.prompt = list(prompt)
        self.cache.truncate(0)
        for drafter in self.drafters.values():
            drafter.rollback(0)
        ids = torch.tensor([self.prompt[:-1]], dtype=torch.int64, device=self.model.device)
        self.model.prefill(ids, self.cache)
        return self.clock() - began

    def new_text(self, rules: Rules) -> Text:
        """A text that holds the prompt and nothing more."""
        return Text(self.prompt, rules, self.model, self.token_bytes)

    def clock(self) -> float:
        """Seconds: what decoding is timed by."""
        return now(self.model.device)

    def drafter(self, drafting: Drafting) -> Drafter:
        """The drafter of a drafting: one for all texts."""
        if drafting.new_drafter not in self.drafters:
            self.drafters[drafting.new_drafter] = drafting.new_drafter(self.cache)
        return self.drafters[drafting.new_drafter]

    def write(
        self,
        text: Text,
        drafting: Drafting,
        params: SamplingParams,
        coupling: Coupling,
        *,
        policy: Policy | None = None,
        readers: Sequence[Reader] = (),
        observer: Observer | None = None,
        drafter: Drafter | None = None,
    ) -> Sample:
        """Write a text that holds the prompt to its end. Raises Interrupted on Ctrl-C.

        ``policy`` and ``drafter`` are the drafting's by default. What the ``readers`` take is not decoding time.
        """
        sample, policy = Sample(text), policy or drafting.new_policy()
        drafter = drafter or self.drafter(drafting)
        drawn = self.decide(policy, coupling.randomness(self.model.device), coupling.verify)
        rounds = speculate(self.model, self.cache, text, drafter, policy, params, *drawn, observer=observer)
        try:
            with closing(rounds):
                began = self.clock()
                for round in rounds:
                    sample.seconds += self.clock() - began
                    sample.rounds.append(round)
                    sample.statistics.add(round)
                    for read in readers:
                        read(round, sample.seconds)
                    began = self.clock()
        except KeyboardInterrupt:
            sample.interrupted = True
            raise Interrupted(sample) from None
        finally:
            sample.trouble = getattr(self.model, "trouble", None)
        return sample

    def write_plainly(self, rules: Rules, params: SamplingParams, coupling: Coupling) -> Sample:
        """The same request without a draft: what speculation is compared with."""
        return self.write(self.new_text(rules), self.plain, params, coupling)

    def warm_up(self, drafting: Drafting, params: SamplingParams) -> None:
        """Write a few tokens, with the draft and without, to be thrown away before anything is timed.

        As many as a draft of full length and the token after it, but no more than the cache has room for.
        """
        wanted = max(WARM_UP_TOKENS, drafting.new_policy().gamma + 2)
        rules = Rules(min(wanted, self.capacity - len(self.prompt)))
        for way in (drafting, self.plain):
            self.write(self.new_text(rules), way, params, Coupling("ratio", 0))
