"""Many texts written in shared steps, each the text it would be alone.

Several loops run side by side, each in a greenlet, and a scheduler stands between them and the
model. It waits until each loop has called the model, computes the calls that can share a step, and
returns each loop its logits. A model that shares no steps computes the calls in turn. There is one
thread, since switching threads makes a step half as long again: it runs a text's loop until that
calls the model, or the scheduler. No text depends on the others: the rows of a step do not depend
on each other, prompts are read in the same chunks as alone, and under the ratio rule a draft length
follows from its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from app.prompt import segments_of
from app.writer import Drafting, Task, Writer
from decoding.drafters import BestOf, Drafter, ModelDrafter
from decoding.rounds import Round
from model import Decoder, KVCache, LayerPlan, chunk_at

MOST_TOGETHER = 16  # texts that share steps


class Call(NamedTuple):
    """Call of a model with its arguments; ``is_prompt``: a prefill of one chunk, without logits."""

    model: Decoder
    tokens: Tensor
    cache: KVCache
    start: int
    plan: LayerPlan | None = None
    is_prompt: bool = False


@dataclass(eq=False)
class Entry:
    """Entry of a scheduler: a task, and the state of its writing.

    ``on_draft`` is called with each draft before its verification. Any thread may set
    ``cancelled``, which ends the text where it is. ``error`` is the one that ended it, if any.
    """

    task: Task
    on_draft: Callable[[list[int]], None] | None = None
    cancelled: bool = False
    error: BaseException | None = None
    loop: greenlet | None = None  # in which the text is written
    slot: Slot | None = None
    call: Call | None = None  # of the model, to be computed

    @property
    def ended(self) -> bool:
        """Whether the text has been written to its end, or to its error."""
        return self.loop is not None and self.loop.dead


class ModelProxy:
    """Stand-in for a model in a text's loop (``decoding.model_port``): the scheduler computes its
    calls, or raises their errors there.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_positions = model.max_positions
        self.device = model.device

    def __call__(
        self, tokens: Tensor, cache: KVCache, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        return getcurrent().parent.switch(Call(self.model, tokens, cache, start, plan))

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        """Read the tokens in chunks, between which the other texts take steps."""
        while tokens.shape[1]:
            chunk = tokens[:, : chunk_at(start)]
            getcurrent().parent.switch(Call(self.model, chunk, cache, start, is_prompt=True))
            read = cache.length - start  # the chunk, or all of a prompt that was copied
            tokens = tokens[:, read:]
            start += read


class Slot(Writer):
    """Writer of one of the texts written together; its cache serves one text after another."""

    def __init__(self, scheduler: Scheduler, capacity: int) -> None:
        super().__init__(scheduler.model, capacity)
        self.target = ModelProxy(scheduler.model)
        self.scheduler = scheduler

    def clock(self) -> float:
        """The clock of decoding in seconds, without the time of any text's readers."""
        return super().clock() - self.scheduler.reading

    def tell(self, task: Task, round: Round) -> None:
        """Call the readers of a text with a new round; no text's clock counts their time."""
        began = super().clock()
        super().tell(task, round)
        self.scheduler.reading += super().clock() - began

    def sharers(self) -> int:
        return len(self.scheduler.active)

    def drafter(self, drafting: Drafting) -> Drafter:
        """The drafter of a drafting, with proxies in place of the models that draft."""
        drafter = super().drafter(drafting)
        for each in drafter.drafters.values() if isinstance(drafter, BestOf) else [drafter]:
            if isinstance(each, ModelDrafter) and not isinstance(each.model, ModelProxy):
                each.model = ModelProxy(each.model)
        return drafter


class Scheduler:
    """Scheduler of texts written together, up to ``slots`` at a time, in order of arrival. What it
    keeps of each is in an ``Entry``.
    """

    def __init__(self, model: Decoder, capacity: int, slots: int) -> None:
        """``capacity``: positions of each slot's cache, for the longest prompt with its output."""
        self.model = model
        self.waiting: list[Entry] = []
        self.active: list[Entry] = []  # in order of arrival
        self.reading = 0.0  # seconds that readers took
        self.slots = [Slot(self, capacity) for _ in range(slots)]

    def submit(self, entry: Entry) -> None:
        """Put a text in the queue, from any thread, also while others are written."""
        self.waiting.append(entry)

    @property
    def has_room(self) -> bool:
        """Whether a text that is submitted now begins at once."""
        return len(self.active) + len(self.waiting) < len(self.slots)

    def write_all(self, tasks: Sequence[Task]) -> float:
        """Write texts to their ends, together; returns the seconds without those of readers. Raises
        the first error, when all have ended.
        """
        clock = self.slots[0].clock
        began = clock()
        entries = [Entry(task) for task in tasks]
        self.waiting += entries
        self.run()
        for error in [entry.error for entry in entries if entry.error]:
            raise error
        return clock() - began

    @torch.inference_mode()
    def run(self, before_step: Callable[[], None] = lambda: None) -> None:
        """Write all submitted texts, until none is left. A text that fails ends alone.

        ``before_step`` is called before each step, and may submit and cancel texts. Ctrl-C and a
        closed standard output end all; samples hold the texts so far.
        """
        try:
            before_step()
            while self._admit():
                self._prefill()
                self._take_step()
                before_step()
        finally:
            self.waiting.clear()
            for entry in [entry for entry in self.active if not entry.ended]:
                entry.loop.throw(GreenletExit)
            self.active.clear()

    def _write(self, entry: Entry) -> None:
        """Write a text, in its greenlet. Its errors end it alone; Ctrl-C and those of a reader that
        prints go on to the scheduler's.
        """
        self.active.append(entry)
        try:
            entry.slot.begin(entry.task.text.tokens, entry.task.answers)
            entry.slot.write_all([entry.task])
        except OSError:
            raise
        except Exception as error:
            entry.error = error
            entry.slot.prompt = []  # the cache may hold anything

    def _go_on(self, entry: Entry, result: Tensor | BaseException | None = None) -> None:
        """Run a text's loop until its next call, and tell its new draft, if there is one.

        ``result`` is that of the last call. An exception is raised in the loop.
        """
        go_on = entry.loop.throw if isinstance(result, BaseException) else entry.loop.switch
        entry.call = go_on(result)  # None where the loop has ended
        if entry.ended:
            self.active.remove(entry)
        elif entry.on_draft and self._verifies(entry) and entry.call.tokens.shape[1] > 1:
            entry.on_draft(entry.call.tokens[0, 1:].tolist())

    def _admit(self) -> bool:
        """End cancelled texts, and begin waiting ones; returns whether any is being written."""
        for entry in [entry for entry in self.active if entry.cancelled]:
            self._go_on(entry, GreenletExit())
        while self.waiting and len(self.active) < len(self.slots):
            entry = self.waiting.pop(0)
            if entry.cancelled:
                continue
            taken = [other.slot for other in self.active]
            free = [slot for slot in self.slots if slot not in taken]
            # A conversation goes on where its cache is.
            wanted = segments_of(entry.task.text.tokens, entry.task.answers)
            entry.slot = max(free, key=lambda slot: len(slot.kept_segments(wanted)))
            entry.loop = greenlet(lambda _, entry=entry: self._write(entry))
            self._go_on(entry)
        return bool(self.active)

    def _prefill(self) -> None:
        """Copy prompts that other slots hold, and read one chunk of the oldest that is left."""
        for entry in [entry for entry in self.active if entry.call.is_prompt]:
            if source := self._cache_of_same_prompt(entry):
                entry.call.cache.copy_from(source, len(entry.task.text) - 1)
                self._go_on(entry)
            else:
                self._compute([entry])
                return

    def _cache_of_same_prompt(self, entry: Entry) -> KVCache | None:
        """The cache of another slot that holds the prompt of a text, if there is one and nothing
        has been read yet.
        """
        call = entry.call
        prompt = entry.task.text.tokens
        reads_all = call.cache is entry.slot.cache and not call.start and not entry.task.answers
        # one token has no entries, and its draft may read forced tokens from position 0 on
        if not (reads_all and len(prompt) > 1 and self.model.batches_calls):
            return None
        same = (
            slot.cache
            for slot in self.slots
            if slot.prompt == prompt
            and len(slot.segments) < 2  # read in one segment, as this prompt would be
            and slot.cache.length >= len(prompt) - 1
        )
        return next(same, None)

    def _verifies(self, entry: Entry) -> bool:
        """Whether a text has called the target, to verify its draft."""
        call = entry.call
        return call.model is self.model and call.plan is None and not call.is_prompt

    def _take_step(self) -> None:
        """Compute the calls of one model and plan: drafts first, so that all verifications can
        share a step.
        """
        waiting = [entry for entry in self.active if not entry.call.is_prompt]
        if waiting:
            first = min(waiting, key=self._verifies).call
            group = [
                entry
                for entry in waiting
                if entry.call.model is first.model and entry.call.plan == first.plan
            ]
            self._compute(group)

    def _compute(self, entries: Sequence[Entry]) -> None:
        """Compute the calls of these texts, and let each loop go on with its result."""
        for entry, result in zip(entries, results([entry.call for entry in entries]), strict=True):
            self._go_on(entry, result)


def results(calls: Sequence[Call]) -> list[Tensor | Exception | None]:
    """The logits, or the error, of each call of one model and plan, in one step where that is
    possible. A prompt's only call has the result None.
    """
    first = calls[0]
    try:
        if first.is_prompt:
            return [first.model.prefill(first.tokens, first.cache, first.start)]
        rows = [(call.tokens, call.cache, call.start) for call in calls]
        return first.model.together(rows, first.plan)
    except Exception as error:  # computed one by one, only the failing call has an error
        return [error] if len(calls) == 1 else [results([call])[0] for call in calls]
