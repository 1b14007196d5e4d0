"""Many texts in one step, each the very text it would be alone.

Several loops run side by side, each in a thread of its own, and a conductor stands between them and the model. It waits
until each loop has asked for something, computes the calls that can share a step, and hands each loop its logits. A
model without ``together`` serves the calls in turn. Only one thread runs at a time: a text's, until it asks again, or
the conductor's. No text depends on its company: the rows of a step do not depend on each other, prompts are read in the
same chunks as alone, and draft lengths follow from a text's own past.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoding.drafters import Drafter
from decoding.policies import Policy
from decoding.rounds import Round
from decoding.run.chooser import Drafting
from decoding.run.writer import Interrupted, Reader, Sample, Writer
from decoding.sampling import SamplingParams
from decoding.speculate import Observer
from decoding.text import Text
from decoding.verify import Coupling
from model import Decoder, KVCache, LayerPlan
from model.clock import now
from model.decoder import chunk_at


class Call(NamedTuple):
    """A model and the arguments of its call; of a prompt only the cache entries are wanted."""

    model: Decoder
    tokens: Tensor
    cache: KVCache
    start: int
    plan: LayerPlan | None = None
    is_prompt: bool = False


@dataclass(eq=False)
class Task:
    """A text to be written from its prompt to its end, by the arguments of ``Writer.write``.

    The conductor's thread calls ``readers`` and at the end ``on_end``, the text's own thread ``observer``. Once
    ``ended``, there is a ``sample`` or an ``error``. Any thread may set ``cancelled``: the sample is then interrupted.
    """

    text: Text
    drafting: Drafting
    params: SamplingParams
    coupling: Coupling
    policy: Policy | None = None
    readers: Sequence[Reader] = ()
    observer: Observer | None = None
    on_end: Callable[[Task], None] = lambda task: None
    sample: Sample | None = None
    error: BaseException | None = None
    ended: bool = False
    cancelled: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    row: Row | None = None
    call: Call | None = None  # for which the text waits
    answer: Tensor | Exception | None = None
    unread: list[tuple[Round, float]] = field(default_factory=list)


class Port:
    """A model as a text's thread sees it: the conductor computes its calls."""

    def __init__(self, model: Decoder, conductor: Conductor) -> None:
        self.model, self.conductor = model, conductor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, cache: KVCache, start: int = 0, plan: LayerPlan | None = None) -> Tensor:
        return self.conductor.ask(Call(self.model, tokens, cache, start, plan))

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        self.conductor.ask(Call(self.model, tokens, cache, start, is_prompt=True))


class Row(Writer):
    """The writer of one text among others; its cache is made once and serves one text after another."""

    def __init__(self, conductor: Conductor) -> None:
        super().__init__(Port(conductor.model, conductor), conductor.capacity)
        self.conductor = conductor

    def clock(self) -> float:
        """Seconds, without those that readers took, of whichever text."""
        return super().clock() - self.conductor.reading

    def drafter(self, drafting: Drafting) -> Drafter:
        """A fresh drafter, whose models, and those of the ``drafters`` that it holds, are behind ports."""
        drafter = drafting.new_drafter(self.cache)
        for each in (drafter, *getattr(drafter, "drafters", {}).values()):
            if getattr(each, "model", None) is not None:
                each.model = Port(each.model, self.conductor)
        return drafter


class Conductor:
    """Writes texts together, up to ``places`` at a time, in order of their arrival."""

    def __init__(self, model: Decoder, capacity: int, places: int) -> None:
        """``capacity``: positions of each text's cache, for the longest prompt with its output."""
        self.model, self.capacity = model, capacity
        self.rows = [Row(self) for _ in range(places)]
        self.waiting: list[Task] = []
        self.active: list[Task] = []  # in order of arrival
        self.running: Task | None = None  # the text whose thread runs; None: the conductor's
        self.paused = threading.Semaphore(0)
        self.reading = 0.0  # seconds that readers took

    def submit(self, task: Task) -> None:
        """Let a text wait for a place, from any thread; also while others are written."""
        self.waiting.append(task)

    @torch.inference_mode()
    def run(self) -> None:
        """Write everything submitted; returns when nothing is left. A text that fails ends alone.

        Ctrl-C, and whatever a reader raises, ends all; texts that had begun have their samples then.
        """
        try:
            while self._admit():
                self._read()
                self._take_step()
        finally:
            while self.running:  # Ctrl-C came upon it
                self.paused.acquire()
            self.waiting.clear()
            for task in [task for task in self.active if not task.ended]:
                task.cancelled = True
                self._switch(task)
            self.active.clear()

    def ask(self, call: Call) -> Any:
        """In a text's thread: wait for the answer. Raises what the call raised, and KeyboardInterrupt if cancelled."""
        task = self.running
        task.call, self.running = call, None
        self.paused.release()
        task.turn.acquire()
        if task.cancelled:
            raise KeyboardInterrupt
        if isinstance(task.answer, Exception):
            raise task.answer
        return task.answer

    def _write(self, task: Task) -> None:
        """The life of a text, in its own thread."""
        task.turn.acquire()
        # Sampling takes one thread: idle ones of many texts would keep the cores from the steps.
        torch.set_num_threads(1)
        text, notes = task.text, [lambda *round: task.unread.append(round)]
        shown = {"policy": task.policy, "readers": notes, "observer": task.observer}
        try:
            task.row.begin(text.tokens[: text.prompt_length])
            task.sample = task.row.write(text, task.drafting, task.params, task.coupling, **shown)
        except KeyboardInterrupt as stopped:
            task.sample = stopped.sample if isinstance(stopped, Interrupted) else Sample(text, interrupted=True)
        except BaseException as error:
            task.error = error
            task.row.prompt = []  # finding out why numbers are broken uses the cache
        task.ended, self.running = True, None
        self.paused.release()

    def _switch(self, task: Task) -> None:
        """Let a text's thread run until it asks for something or ends."""
        self.running = task
        task.turn.release()
        while self.running:
            self.paused.acquire()

    def _go_on(self, task: Task, answer: Tensor | Exception | None = None) -> None:
        """Give a text its answer, and tell of its rounds."""
        task.answer, task.unread = answer, []
        self._switch(task)
        began = now(self.model.device)
        for round, seconds in task.unread:
            for read in task.readers:
                read(round, seconds)
        if task.ended:
            self.active.remove(task)
            task.on_end(task)
        self.reading += now(self.model.device) - began

    def _admit(self) -> bool:
        """Let texts go that are cancelled, and others begin; returns whether any is being written."""
        for task in [task for task in self.active if task.cancelled]:
            self._go_on(task)
        while self.waiting and len(self.active) < len(self.rows):
            task, taken = self.waiting.pop(0), [task.row for task in self.active]
            task.row, threads = next(row for row in self.rows if row not in taken), torch.get_num_threads()
            threading.Thread(target=self._write, args=(task,), daemon=True).start()
            self.active.append(task)
            self._go_on(task)
            torch.set_num_threads(threads)  # the text's thread has set it for those to come
        return bool(self.active)

    def _read(self) -> None:
        """Copy the prompts that other rows hold, and read one chunk of the oldest that is left."""
        for task in [task for task in self.active if task.call.is_prompt]:
            call, count = task.call, chunk_at(task.call.start)
            if source := self._holder(task):
                call.cache.copy(source, call.tokens.shape[1])
                self._go_on(task)
                continue
            try:
                call.model.prefill(call.tokens[:, :count], call.cache, call.start)
            except Exception as error:
                self._go_on(task, error)
                return
            task.call = call._replace(tokens=call.tokens[:, count:], start=call.start + count)
            if not task.call.tokens.shape[1]:
                self._go_on(task)
            return

    def _holder(self, task: Task) -> KVCache | None:
        """The cache of another row that holds the whole prompt which a text begins to read."""
        if task.call.cache is not task.row.cache or task.call.start or not hasattr(self.model, "together"):
            return None
        same = (row.cache for row in self.rows if row is not task.row and row.prompt == task.row.prompt)
        return next((cache for cache in same if cache.length >= task.call.tokens.shape[1]), None)

    def _take_step(self) -> None:
        """Compute the calls of one model and plan; verifications when no draft waits, so that they can be joined."""
        waiting = [task for task in self.active if not task.call.is_prompt]
        if waiting:
            first = min(waiting, key=lambda task: task.call.model is self.model and task.call.plan is None).call
            group = [task for task in waiting if task.call.model is first.model and task.call.plan == first.plan]
            for task, answer in zip(group, answers([task.call for task in group]), strict=True):
                self._go_on(task, answer)


def answers(calls: Sequence[Call]) -> list[Tensor | Exception]:
    """The logits of calls of one model and plan, in one step where that is possible; or what a call raises."""
    model = calls[0].model
    try:
        if hasattr(model, "together"):
            return model.together([call[1:4] for call in calls], calls[0].plan)
        return [model(*call[1:5]) for call in calls]
    except Exception as error:  # each by itself shows whose it is
        return [error] if len(calls) == 1 else [answers([call])[0] for call in calls]
