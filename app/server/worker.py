"""Worker: the queue of requests, whose texts it writes, several in shared steps.

A job's replies are JSON values, then None; an error may be the last one. Knows nothing of sockets
and of how texts are drafted.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
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
    began: float = inf  # when its text was begun; inf: it waits
    writing: greenlet | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has disconnected, which ends the request in whatever it does."""
        return self.task.done()

    def send(self, reply: Any) -> None:
        """Send a reply, from any thread."""
        with suppress(RuntimeError):  # the network has ended
            self.task.get_loop().call_soon_threadsafe(self.replies.put_nowait, reply)


@dataclass
class Returns:
    """Times at which refused clients are told to come back: when the texts ahead are likely to be
    written. Each later client gets a later time, so that clients who are refused together do not
    return together.
    """

    slots: int  # texts written at once
    places: int  # of jobs that are written or wait
    pace: float = 5.0  # seconds that the last text took: a guess at first
    last: float = 0.0  # when the client that was refused last is to come back

    def wait(self, now: float, ahead: int, began: float) -> int:
        """Return the seconds to wait behind ``ahead`` jobs, the oldest of which ``began`` then.

        Take 4 slots, 16 places and texts of 8 seconds: a text ends every 2 seconds, which is a
        ``turn``. So behind 16 jobs a client waits 16 turns, and one more until its own place is
        free: 34 seconds. A second one that is refused at that moment comes a turn later, after 36.
        Texts of 0.1 seconds would end faster than clients return, who count whole seconds: the
        turn is then 1/16 of a second, so that each second brings as many clients as fit.
        """
        pace = max(self.pace, now - began)
        turn = max(pace / self.slots, 1 / self.places)
        seconds = min(LONGEST_RETRY, max(ahead * turn, self.last - now) + turn)
        self.last = now + seconds
        return ceil(seconds)


class Worker:
    """Worker that writes the texts of all jobs, up to ``TEXTS`` at a time, in order of arrival."""

    def __init__(self, session: Session) -> None:
        """Load the model. Raises InputError where it does not fit, or cannot draft as asked."""
        session.check_memory()
        session.mask_seconds = 1.0  # a grammar that takes longer would keep the others waiting
        session.options = replace(session.options, context=session.capacity())
        # So that no client waits for low-bit copies or a compiler. Any ids do, since the texts are
        # dropped. There are two, so that one is read before the last one begins the loop.
        session.warm_up([0, 0])
        self.session = session
        self.free = [
            session.new_slot(session.context)
            for _ in range(session.slots_for(TEXTS, session.context))
        ]
        self.returns = Returns(len(self.free), len(self.free) + session.options.queue)
        self.together = Together(session.model)
        self.jobs: list[Job] = []  # that wait or are written, in order of arrival

    def enqueue(self, job: Job) -> None:
        """Queue a job, in the network's thread. Raises HTTPException where the queue is full."""
        jobs = [each for each in [*self.jobs] if not each.is_abandoned]
        if len(jobs) >= self.returns.places:
            wait = self.returns.wait(time.monotonic(), len(jobs), jobs[0].began)
            raise HTTPException(429, "the queue is full: try again", {"Retry-After": str(wait)})
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
        # Where no cache gains, the one that has been free the longest: it comes first.
        slot = max(self.free, key=lambda slot: gain(slot.tokens, job.sample.source.tokens))
        self.free.remove(slot)
        job.began = time.monotonic()
        rounds = partial(self.session.rounds, job.sample, slot, self.together)
        try:
            for reply in replies(job.body, job.sample, self.session, rounds):
                job.send(reply)
        except Exception as error:
            job.send(error)
        else:
            self.returns.pace = time.monotonic() - job.began
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


def gain(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many more tokens of a cache a prompt keeps than it drops; 0 where it drops more.

    So a conversation goes on where its own cache is: of 100 tokens it keeps all, which is a gain of
    100. A prompt that has only the first 30 in common would keep 30 and drop 70. It gains nothing,
    and leaves the cache to its conversation where another is free.
    """
    kept = common_prefix(cached, prompt)
    dropped = len(cached) - kept
    return max(0, kept - dropped)
