"""One model and one writer, and the jobs that wait for them in order."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from decoding.rounds import Round
from decoding.run.chooser import Drafting, DraftOptions, Setting, make_drafting, with_policy
from decoding.run.writer import Sample, Writer
from decoding.sampling import SamplingParams
from decoding.serve.live import Watch, WatchedDrafter, opening
from decoding.serve.orders import Defaults, Order, Refusal
from decoding.show.labels import Labels
from decoding.show.streaming import TextStream
from decoding.verify import Coupling
from model import Decoder, InputError
from weights.cli.command_line import say
from weights.cli.files import one_line
from weights.tokenizer import Tokenizer

PLACES = 16  # jobs that may wait; one more is being written
MOST_UNREAD = 1000  # rounds that may wait for a page to read them


@dataclass(frozen=True)
class Piece:
    """More of a text: what has become certain of it."""

    choice: int
    text: str


@dataclass(frozen=True)
class Shown:
    """Something for the live page to show, as it will read it."""

    data: dict[str, Any]


@dataclass(frozen=True)
class Written:
    """A text is complete."""

    choice: int
    sample: Sample


@dataclass(frozen=True)
class Ended:
    """The last event of a job: it is done, or this went wrong."""

    error: InputError | None = None


Event = Piece | Shown | Written | Ended


class Gone(Exception):
    """Nobody waits for this text any more."""


class Job:
    """An order, and what has happened to it that its client has not been told.

    ``tell`` and ``check`` are for the thread that writes; everything else happens in the event loop it was made in.
    What is unread is bounded: pieces of a text join up, and a page that falls too far behind is given up.
    """

    def __init__(self, order: Order) -> None:
        self.order, self.loop = order, asyncio.get_running_loop()
        self.gone = threading.Event()
        self.unread: deque[Event] = deque()
        self.news = asyncio.Event()

    def check(self) -> None:
        """Raises Gone once nobody waits any more."""
        if self.gone.is_set():
            raise Gone

    def tell(self, event: Event) -> None:
        """Let the client know. Raises Gone."""
        self.check()
        self.end_with(event)

    def end_with(self, event: Event) -> None:
        """Let the client know, if there still is one."""
        with suppress(RuntimeError):  # the event loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self.take_in, event)

    def take_in(self, event: Event) -> None:
        last = self.unread[-1] if self.unread else None
        if isinstance(event, Piece) and isinstance(last, Piece) and event.choice == last.choice:
            self.unread[-1] = Piece(event.choice, last.text + event.text)
        elif isinstance(event, Shown) and len(self.unread) >= MOST_UNREAD:
            self.gone.set()
            self.unread = deque([Ended(Refusal("the page does not read what it asked for"))])
        elif not (isinstance(last, Ended)):
            self.unread.append(event)
        self.news.set()

    async def read(self) -> list[Event]:
        """All that is unread, once there is something."""
        await self.news.wait()
        self.news.clear()
        events = list(self.unread)
        self.unread.clear()
        return events


class Worker:
    """Writes job after job, in the order in which they came."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, defaults: Defaults, capacity: int) -> None:
        """Raises InputError where the drafting of the command line is not possible."""
        control = {token: name for name, token in tokenizer.vocabulary.special.items()}
        self.name, self.labels = defaults.name, Labels(tokenizer.token_bytes, control)
        self.setting = Setting(defaults.folder, model, tokenizer, defaults.params, capacity)
        self.writer = Writer(model, capacity, tokenizer.token_bytes)
        self.made: dict[DraftOptions, Drafting] = {}
        drafting = self.drafting(defaults.draft, defaults.params)
        self.writer.begin(tokenizer.encode("a")[:1])
        self.writer.warm_up(drafting, defaults.params)
        self.waiting: deque[Job] = deque()
        self.current: Job | None = None
        self.changed, self.open = threading.Condition(), True

    def submit(self, job: Job) -> int:
        """Let a job wait; returns how many are before it. Raises Refusal when too many wait."""
        with self.changed:
            if not self.open:
                raise Refusal("the server is stopping", status=503)
            if len(self.waiting) >= PLACES:
                raise Refusal(f"{PLACES} requests wait already: try again", status=429, code="queue_full")
            self.waiting.append(job)
            self.changed.notify()
            return len(self.waiting) - (self.current is None)

    def leave(self, job: Job) -> None:
        """Nobody waits for this job any more: its text ends with the round that is being written."""
        job.gone.set()
        with self.changed, suppress(ValueError):
            self.waiting.remove(job)

    def stop(self) -> None:
        """Write nothing more. Those who wait are told so."""
        with self.changed:
            self.open = False
            stopped = [*self.waiting, *([self.current] if self.current else [])]
            self.waiting.clear()
            self.changed.notify()
        for job in stopped:
            job.gone.set()
            job.end_with(Ended(Refusal("the server is stopping", status=503)))

    def work(self) -> None:
        """Write what is submitted, until told to stop."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or not self.open)
                if not self.open:
                    return
                self.current = self.waiting.popleft()
            self.current.end_with(Ended(self._outcome(self.current)))
            with self.changed:
                self.current = None

    def _outcome(self, job: Job) -> InputError | None:
        """Do the job; returns what went wrong, which must not end the server."""
        try:
            self._write(job)
        except Gone:
            return None
        except InputError as error:
            return error
        except Exception as error:  # memory that ran out, say: the next job begins afresh
            say(f"a text could not be written: {type(error).__name__}: {one_line(error)}")
            return Refusal("the text could not be written", status=500)
        return None

    def _write(self, job: Job) -> None:
        job.check()
        order = job.order
        drafting = self.drafting(order.draft, order.params)
        self.writer.begin(order.ids)
        if order.watched:
            job.tell(Shown(opening(self.name, order, drafting)))
        runs = [(drafting, number) for number in range(order.samples)]
        if order.beside:
            runs.append((self.writer.plain, 0))
        for choice, (way, number) in enumerate(runs):
            write = self._write_watched if order.watched else self._write_text
            write(job, choice, way, replace(order.coupling, sample=number))

    def _write_text(self, job: Job, choice: int, drafting: Drafting, coupling: Coupling) -> None:
        """A text, of which the client is told what a terminal would show after each round."""
        text = self.writer.new_text(job.order.rules)
        stream = TextStream(text)

        def read(round: Round, seconds: float) -> None:
            job.check()
            if job.order.streams and (piece := stream.pull()):
                job.tell(Piece(choice, piece))

        sample = self.writer.write(text, drafting, job.order.params, coupling, readers=[read])
        job.tell(Written(choice, sample))

    def _write_watched(self, job: Job, choice: int, drafting: Drafting, coupling: Coupling) -> None:
        """A text, of which the page is shown everything."""
        order, policy, device = job.order, drafting.new_policy(), self.setting.model.device
        watch = Watch(lambda data: job.tell(Shown(data)), self.labels, choice, policy, order.params, device)
        drafter = WatchedDrafter(self.writer.drafter(drafting), watch.drafted)
        watched = replace(drafting, new_drafter=lambda cache: drafter)
        shown = {"policy": policy, "readers": [watch.add], "observer": watch.observe}
        try:
            sample = self.writer.write(self.writer.new_text(order.rules), watched, order.params, coupling, **shown)
        finally:
            self.writer.drafters.pop(watched.new_drafter, None)
        watch.close(sample)

    def drafting(self, options: DraftOptions, params: SamplingParams) -> Drafting:
        """What a request drafts with. Raises InputError where that is not possible.

        What may be large is made once. Costs are those of the command line's sampling, so that no request need wait
        for another measurement.
        """
        made_of = replace(options, min_target_confidence=None)
        if options.kind not in ("auto", "skip"):  # these alone look at the draft length before the policy does
            made_of = replace(made_of, gamma=None, adaptive=None)
        if made_of not in self.made:
            self.made[made_of] = make_drafting(made_of, self.setting)
        return with_policy(self.made[made_of], options, params)
