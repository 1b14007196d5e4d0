"""Writer of texts: a prepared target with its cache, which reads a prompt and writes on.

A ``Drafting`` is the way a text is written, a drafter with its policy; a ``Sample`` is the result.
``generate.py``, the server, the benchmark and the search's confirmation write through ``Writer``,
and so time the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from reprlib import repr as shortened
from time import perf_counter

import torch

from app.plan_file import GAMMA, DraftPlan
from app.prompt import Segment, Spans, segments_of, steps
from decoding.break_even import Past
from decoding.drafters import Drafter, ModelDrafter, NoDraft
from decoding.model_port import Model
from decoding.policies import FixedLength, Policy
from decoding.randomness import Randomness
from decoding.rounds import Round, Statistics, common_prefix
from decoding.sampling import SamplingParams
from decoding.speculate import Observer, speculate
from decoding.text import Rules, Text, TokenBytes
from decoding.verify import Coupling, Verify
from model import Decoder, KVCache, LayerPlan, now

PREPARING = 0.1  # share of a round's time for the preparation of drafts after it
LEAST_WARM_UP = 4  # tokens written before anything is timed

Reader = Callable[[Round, float], None]  # called with each round and the seconds of decoding so far


@dataclass
class Preparation:
    """Work before a model can draft, in pieces that may be done between the rounds of a text: its
    low-bit copies are read, or made. After an error, such as Ctrl-C, ``begin`` begins the rest.
    """

    begin: Callable[[], Iterator[None]] = lambda: iter(())
    is_done: bool = False

    def __post_init__(self) -> None:
        self.pieces = self.begin()

    def work(self, seconds: float = math.inf) -> None:
        """Do pieces for this long, or until none is left; at least one."""
        end = perf_counter() + seconds
        while not self.is_done:
            try:
                self.is_done = next(self.pieces, self) is self
            except BaseException:  # which would be the iterator's end
                self.pieces = self.begin()
                raise
            if perf_counter() >= end:
                return


@dataclass(frozen=True)
class Drafting:
    """A drafter and its policy.

    ``name`` is shown; ``new_drafter`` takes the target's cache, which the drafter may share;
    ``new_policy`` makes a fresh policy for a text. ``chosen`` is the plan under which the target
    drafts for itself, if it does. Texts that no draft length can change may be written before the
    ``preparation`` is done. ``past`` has the estimates from all texts whose policy has a clock.
    """

    name: str
    new_drafter: Callable[[KVCache], Drafter]
    new_policy: Callable[[], Policy] = lambda: FixedLength(GAMMA)
    chosen: DraftPlan | None = None
    preparation: Preparation = field(default_factory=Preparation)
    past: Past = field(default_factory=Past)

    @property
    def plan(self) -> LayerPlan | None:
        """The layer plan under which the target drafts for itself; None where it does not."""
        return self.chosen and self.chosen.plan


def plain(model: Decoder, name: str = "plain") -> Drafting:
    """Plain decoding: an empty draft."""
    return Drafting(
        name, lambda cache: NoDraft(model.vocab_size, model.device), lambda: FixedLength(0)
    )


def model_drafter(model: Decoder, cache: KVCache, plan: LayerPlan | None = None) -> ModelDrafter:
    """A drafter whose static step, if its model has any, is made before a text is timed."""
    model.step_of(cache, plan)
    return ModelDrafter(model, cache, plan)


@dataclass
class Sample:
    """A written text; ``draft`` is the name of its drafting.

    ``timeline`` has each round with the seconds of decoding so far, without the prompt.
    ``trouble`` is the reason why steps fell back to the readable blocks, if they did.
    """

    source: Text
    draft: str
    timeline: list[tuple[Round, float]] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    trouble: str | None = None

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
    def finish(self) -> str:
        """Why the text ended: "eos", "stop", "length", or "interrupted"."""
        return self.source.finish or "interrupted"

    @property
    def rounds(self) -> list[Round]:
        """The rounds in which the text was written."""
        return [round for round, _ in self.timeline]

    @property
    def seconds(self) -> float:
        """Seconds of decoding."""
        return self.timeline[-1][1] if self.timeline else 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.statistics.tokens / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class Task:
    """A text to be written, at first its prompt alone, with its way of drafting and its readers.

    ``observer`` is the loop's. ``answers`` are the positions of earlier answers in the prompt of a
    conversation. ``sample`` holds the text so far.
    """

    text: Text
    drafting: Drafting
    params: SamplingParams
    coupling: Coupling
    readers: list[Reader] = field(default_factory=list)
    observer: Observer | None = None
    answers: Spans = ()

    def __post_init__(self) -> None:
        self.sample = Sample(self.text, self.drafting.name)


# Policy, randomness and rule of a text, which several processes make the same.
Decisions = tuple[Policy, Randomness, Verify]


class Writer:
    """A target with one cache for all prompts, and one drafter per drafting.

    So steps that were made for them, such as CUDA graphs, serve every text.
    """

    def __init__(
        self,
        model: Decoder,
        capacity: int,
        token_bytes: TokenBytes = lambda token: b"",
        decide: Callable[[Decisions], Decisions] = lambda decisions: decisions,
    ) -> None:
        """``capacity``: positions of the cache, for the longest prompt with its output.

        ``decide`` makes the decisions of a text those of rank 0 (``app.ranks``).
        """
        self.model = model
        self.target: Model = model  # as the loop calls it
        self.capacity = capacity
        self.token_bytes = token_bytes
        self.decide = decide
        self.cache: KVCache = model.new_cache(capacity)
        model.step_of(self.cache)
        self.drafters: dict[Callable[[KVCache], Drafter], Drafter] = {}
        self.prompt: list[int] = []
        self.segments: list[Segment] = []
        self.text: Text | None = None  # the last one written after the prompt
        self.plain = plain(model)

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int], answers: Spans = ()) -> float:
        """Read a prompt, all but its last token, into the cache; returns the seconds this took.

        ``answers`` are the positions of earlier answers in it (``app.prompt``): if there
        are any, the entries of the text before stay where they are those of this prompt. A draft
        model reads the prompt into its cache when it first drafts.
        """
        began = self.clock()
        segments = segments_of(prompt, answers)
        kept = self.kept_segments(segments)
        at = sum(len(segment.tokens) for segment in kept)
        self.prompt = []
        self.text = None
        for drafter in self.drafters.values():
            drafter.rollback(at + 1 if at else 0)
        self.cache.truncate(at)
        for by_step, group in groupby(segments[len(kept) :], key=attrgetter("by_step")):
            tokens = [token for segment in group for token in segment.tokens]
            read = self.target if by_step else self.target.prefill
            read(torch.tensor([tokens], device=self.model.device), self.cache, at)
            at += len(tokens)
        self.prompt = list(prompt)
        self.segments = segments
        return self.clock() - began

    def kept_segments(self, wanted: list[Segment]) -> list[Segment]:
        """Segments at the beginning of a conversation whose entries the cache holds.

        A prompt without answers, which is one segment, is always read anew.
        """
        if len(wanted) < 2 or not self.prompt:
            return []
        read = self.segments
        if self.text is not None:
            # Behind the prompt is its last text, written in steps. An interrupted round may have
            # left entries of its draft after those.
            end = min(self.cache.length, len(self.text) - 1)
            read = [*read, *steps(self.text.tokens[self.text.prompt_length - 1 : end])]
        return wanted[: common_prefix(read, wanted)]

    def new_text(self, rules: Rules) -> Text:
        """A text that holds only the prompt."""
        return Text(self.prompt, rules, self.model, self.token_bytes)

    def clock(self) -> float:
        """The clock of decoding, in seconds."""
        return now(self.model.device)

    def drafter(self, drafting: Drafting) -> Drafter:
        """The drafter of a drafting, one for all texts."""
        if drafting.new_drafter not in self.drafters:
            self.drafters[drafting.new_drafter] = drafting.new_drafter(self.cache)
        return self.drafters[drafting.new_drafter]

    def write(
        self, text: Text, drafting: Drafting, params: SamplingParams, coupling: Coupling
    ) -> Sample:
        """Write a text, which holds the prompt, to its end: see ``rounds``."""
        task = Task(text, drafting, params, coupling)
        self.write_all([task])
        return task.sample

    def again(self, task: Task, drafting: Drafting, rules: Rules | None = None) -> Sample:
        """Write the text of a task anew, with another drafting or other rules."""
        text = self.new_text(rules or task.text.rules)
        return self.write(text, drafting, task.params, task.coupling)

    def write_all(self, tasks: Sequence[Task]) -> float:
        """Write texts to their ends, one after another; returns the seconds of decoding."""
        for task in tasks:
            list(self.rounds(task))
        return sum(task.sample.seconds for task in tasks)

    def rounds(self, task: Task) -> Iterator[Round]:
        """The rounds of a text, each added to its sample. The time of its ``readers``, and that
        between two rounds, is not counted.

        The policy has a clock where no text can change by a draft's length. Under the ratio rule a
        length decides which random numbers a token is drawn with, and where rows depend on each
        other it decides how logits are rounded.
        """
        self.text = task.text
        sample = task.sample
        policy = task.drafting.new_policy()
        draws_alike = task.params.temperature == 0 or task.coupling.name == "race"
        has_clock = task.observer is None and draws_alike and self.model.why_rows_vary is None
        if has_clock:
            policy.grant_clock(task.drafting.past, self.sharers)
        else:
            task.drafting.preparation.work()
        policy, randomness, verify = self.decide(
            (policy, task.coupling.randomness(self.model.device), task.coupling.verify)
        )
        rounds = speculate(
            self.target,
            self.cache,
            self.text,
            self.drafter(task.drafting),
            policy,
            task.params,
            randomness,
            verify,
            observer=task.observer,
        )
        began = self.clock()
        for round in rounds:
            seconds = self.clock() - began
            sample.timeline.append((round, sample.seconds + seconds))
            sample.trouble = self.model.trouble  # a step may have fallen back
            sample.statistics.add(round)
            self.tell(task, round)
            yield round
            # No text changes where its drafts begin later, so none waits for the copies.
            task.drafting.preparation.work(PREPARING * seconds)
            began = self.clock()

    def tell(self, task: Task, round: Round) -> None:
        """Call the readers of a text with a new round."""
        for read in task.readers:
            read(round, task.sample.seconds)

    def sharers(self) -> int:
        """Number of texts that share the model's steps now, with this one."""
        return 1

    def warm_up(self, task: Task) -> None:
        """Write a few tokens of a text, with its draft and without, before anything is timed.

        There are enough for a draft of full length and the token after it, as far as the cache
        reaches. Low-bit copies are made first.
        """
        task.drafting.preparation.work()
        wanted = max(LEAST_WARM_UP, task.drafting.new_policy().gamma + 2)
        rules = Rules(min(wanted, self.capacity - len(self.prompt)))
        for way in (task.drafting, self.plain):
            self.again(task, way, rules)
