"""Worker: the queue of requests, whose texts it writes, several in shared steps.

A job's replies are JSON values, then None; an error may be the last one. Knows nothing of sockets
and of how texts are drafted.
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

from greenlet import greenlet
from starlette.exceptions import HTTPException

from app.sample import Sample
from app.server.answers import replies
from app.server.requests import ChatBody, CompletionBody
from app.session import Session
from decoding.text import common_prefix
from decoding.together import Together

TEXTS = 4  # written at once
LONGEST_RETRY = 60  # seconds: clients ignore a longer wish
POLL = 0.02  # seconds between polls of the queue, and of a client's connection


@dataclass(eq=False)
class Job:
    """A request in the queue with its text, and the replies to its client. Unread replies wait in
    memory: a text is bounded, so are they.
    """

    body: CompletionBody | ChatBody
    sample: Sample
    task: asyncio.Task[None]  # of the request
    replies: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    arrived: float = field(default_factory=time.monotonic)
    writing: greenlet | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has disconnected, which ends the request in whatever it does."""
        return self.task.done()

    def send(self, reply: Any) -> None:
        """Send a reply, from any thread."""
        with suppress(RuntimeError):  # the network has ended
            self.task.get_loop().call_soon_threadsafe(self.replies.put_nowait, reply)


class Worker:
    """Worker that writes the texts of all jobs, up to ``TEXTS`` at a time, in order of arrival."""

    def __init__(self, session: Session) -> None:
        """Load the model. Raises InputError where it does not fit, or cannot draft as asked."""
        session.check_memory()
        session.mask_seconds = 1.0  # a grammar that takes longer would keep the others waiting
        session.options = replace(session.options, context=session.capacity())
        session.warm_up([0, 0])  # so that no client waits for low-bit copies or a compiler
        self.session = session
        self.free = [
            session.new_slot(session.context)
            for _ in range(session.slots_for(TEXTS, session.context))
        ]
        self.places = len(self.free) + session.options.queue
        self.passage = 15.0  # seconds from arrival to end of the last text: a guess at first
        self.together = Together(session.model)
        self.jobs: list[Job] = []  # that wait or are written, in order of arrival

    def enqueue(self, job: Job) -> None:
        """Queue a job, in the network's thread. Raises HTTPException where the queue is full.

        The client is told to come back when all texts ahead are likely to be written, or up to
        three times as late: clients who are refused together are not to return together.
        """
        if sum(not each.is_abandoned for each in [*self.jobs]) >= self.places:
            wait = min(self.passage, LONGEST_RETRY / 3) * random.uniform(1, 3)
            retry = {"Retry-After": str(ceil(wait))}
            raise HTTPException(429, "the queue is full: try again", retry)
        self.jobs.append(job)

    def work(self, stopped: Callable[[], bool]) -> None:
        """Write the texts of all jobs until ``stopped``, which ends them with an error."""
        while not stopped():
            for job in [*self.jobs]:
                if job.is_abandoned:
                    self._stop(job)
                elif self.free and not job.writing:
                    job.writing = self.together.start(partial(self.write, job))
            if not self.together.step():
                time.sleep(POLL)
        for job in [*self.jobs]:
            job.send(HTTPException(503, "the server is stopping"))
            self._stop(job)

    def write(self, job: Job) -> None:
        """Write the text of a job, in a greenlet. An error ends it alone."""
        prompt = job.sample.source.tokens
        # The cache that keeps the most entries less those that it loses: a conversation goes on
        # where its own is, and one that merely begins alike leaves it alone. Where each would lose
        # more than it keeps, the one that has been free the longest.
        slot = max(
            self.free,
            key=lambda slot: max(0, 2 * common_prefix(slot.tokens, prompt) - len(slot.tokens)),
        )
        self.free.remove(slot)
        rounds = partial(self.session.rounds, job.sample, slot, self.together)
        try:
            for reply in replies(job.body, job.sample, self.session, rounds):
                job.send(reply)
        except Exception as error:
            job.send(error)
        else:
            self.passage = time.monotonic() - job.arrived
        finally:
            self.free.append(slot)
            self.jobs.remove(job)
            job.send(None)

    def _stop(self, job: Job) -> None:
        """End a job that is written, or that waits."""
        if job.writing:
            self.together.stop(job.writing)
        else:
            self.jobs.remove(job)
