"""Queue of jobs, and the worker that writes their texts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from decoding.run.chooser import Drafting, DraftOptions, Setting, make_drafting, with_policy
from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from decoding.serve.requests import Refusal, TextRequest
from decoding.show.labels import Labels
from model import InputError
from model.plan import LOW_BITS
from weights.cli.command_line import say
from weights.cli.files import one_line

SEND_TIMEOUT = 30.0  # seconds for a client to take a message
MAX_WAITING = 16  # jobs in the queue, besides the one being written


class ClientGone(Exception):
    """The client has disconnected."""


class Job:
    """A request in the queue, and its response (ASGI): a stream of JSON messages, or a single one.

    ``write`` writes the texts and sends the messages, in the worker's thread. The response runs in the event loop in
    which the job was made. Unread messages wait in memory: a text is bounded, so are they.
    """

    def __init__(self, request: TextRequest, write: Callable[[Job, Worker, Drafting], None]) -> None:
        self.request, self.write, self.loop = request, write, asyncio.get_running_loop()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()  # the last is None, or an error
        self.gone = threading.Event()

    def check(self) -> None:
        """Raises ClientGone once the client has disconnected."""
        if self.gone.is_set():
            raise ClientGone

    def send(self, message: Any) -> None:
        """Send a message. Raises ClientGone."""
        self.check()
        self.close(message)

    def close(self, message: Any) -> None:
        """Send the last message, also to a client that has disconnected."""
        with suppress(RuntimeError):  # the event loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self.messages.put_nowait, message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond until the client disconnects. Raises an error that comes before any message."""
        response = asyncio.create_task(self._respond(scope, receive, send))
        disconnect = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((response, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                response.result()
        finally:
            self.gone.set()
            response.cancel()
            disconnect.cancel()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self.messages.get()
        if isinstance(first, InputError):
            raise first
        # The grace period lets a stopping server end its streams with an error (Worker.stop).
        timeouts = {"send_timeout": SEND_TIMEOUT, "shutdown_grace_period": SEND_TIMEOUT}
        streams = self.request.asked.stream
        response = EventSourceResponse(self._stream(first), sep="\n", **timeouts) if streams else JSONResponse(first)
        await response(scope, receive, send)

    async def _stream(self, message: Any) -> AsyncIterator[str]:
        while message is not None and not isinstance(message, InputError):
            yield message if isinstance(message, str) else json.dumps(message)
            message = await self.messages.get()
        if message is not None:
            yield json.dumps(Refusal.of(message).data())


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Worker:
    """The writer of all jobs' texts, one job after another in order of arrival."""

    def __init__(self, setting: Setting, draft: DraftOptions) -> None:
        """Raises InputError where the command line's ``draft`` is not possible."""
        self.setting, tokenizer = setting, setting.tokenizer
        self.name = setting.folder.resolve().name  # of the model, to clients
        self.labels = Labels.of(tokenizer)
        self.writer = Writer(setting.model, setting.positions, tokenizer.token_bytes)
        self.made: dict[DraftOptions, Drafting] = {}
        drafting = self.drafting(draft, setting.params)
        widths = {*drafting.plan.attention, *drafting.plan.mlp}.intersection(LOW_BITS) if drafting.plan else ()
        self.bits = max(widths, default=LOW_BITS[0])  # of the low-bit copies that requests may ask for
        self.writer.begin(tokenizer.encode("a")[:1])
        self.writer.warm_up(drafting, setting.params)
        self.jobs: deque[Job] = deque()  # the first is being written
        self.changed, self.open = threading.Condition(), True

    def submit(self, job: Job) -> None:
        """Put a job in the queue. Raises Refusal where it is full. Jobs whose client has disconnected do not count."""
        with self.changed:
            if not self.open:
                raise Refusal("the server is stopping", status=503)
            if sum(not other.gone.is_set() for other in self.jobs) > MAX_WAITING:
                raise Refusal(f"{MAX_WAITING} requests wait already: try again", status=429, code="queue_full")
            self.jobs.append(job)
            self.changed.notify()

    def stop(self) -> None:
        """End all jobs with an error, and ``work`` after the current round."""
        with self.changed:
            self.open = False
            for job in self.jobs:
                job.gone.set()
                job.close(Refusal("the server is stopping", status=503))
            self.changed.notify()

    def work(self) -> None:
        """Write the texts of all submitted jobs, until ``stop``."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs or not self.open)
                if not self.open:
                    return
                job = self.jobs[0]
            job.close(self._outcome(job))
            with self.changed:
                self.jobs.popleft()

    def _outcome(self, job: Job) -> InputError | None:
        """Write the texts of a job. Returns the error that ended it, if any; the server goes on."""
        try:
            job.check()
            drafting = self.drafting(job.request.options.draft, job.request.options.params)
            self.writer.begin(job.request.ids)
            job.write(job, self, drafting)
        except ClientGone:
            return None
        except InputError as error:
            return error
        except Exception as error:  # such as exhausted memory: the next job begins afresh
            say(f"a text could not be written: {type(error).__name__}: {one_line(error)}")
            return Refusal("the text could not be written", status=500)
        return None

    def drafting(self, options: DraftOptions, params: SamplingParams) -> Drafting:
        """The drafting of a request, made once for all policies. Raises InputError where it is not possible.

        Its costs are those of the command line's sampling parameters, so that no request waits for a measurement.
        """
        gamma = options.gamma if options.kind == "skip" else None  # without one, a plan may say that no draft pays
        made_of = replace(options, gamma=gamma, adaptive=None, min_target_confidence=None)
        if made_of not in self.made:
            self.made[made_of] = make_drafting(made_of, self.setting)
        return with_policy(self.made[made_of], options, params)
