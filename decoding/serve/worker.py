"""Queue of requests, and the worker that writes their texts, several at once."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from decoding.run.chooser import Drafting, DraftOptions, Setting, make_drafting, plain, with_policy
from decoding.run.options import TextOptions
from decoding.run.together import Conductor, Task
from decoding.serve.requests import Options, Refusal
from decoding.show.labels import Labels
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model.plan import LOW_BITS

MAX_WAITING = 16  # requests in the queue, besides as many as texts are written at once
LOOK = 0.2  # seconds between two looks at whether the client is still there, and whether the server stops


class Job:
    """A request, its texts, and its messages for the client: JSON values, at the end None or a Refusal.

    ``begin(job, worker, drafting)`` submits the texts, whose readers send the messages, all in the worker's thread.
    Unread messages wait in memory: a text is bounded, so are they.
    """

    def __init__(self, asked: Options, ids: list[int], options: TextOptions, begin: Callable[..., object]) -> None:
        self.asked, self.ids, self.options, self.begin = asked, ids, options, begin
        self.tasks: list[Task] = []
        self.gone = False  # whether the client has disconnected
        self.loop, self.messages = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def send(self, message: Any) -> None:
        """Send a message, from any thread."""
        with suppress(RuntimeError):  # the event loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self.messages.put_nowait, message)

    async def respond(self, request: HTTPRequest) -> Response:
        """The response, once there is a message. Raises a Refusal that comes first."""
        message = None
        while message is None:
            if await request.is_disconnected():
                self.gone = True
                raise HTTPException(400, "the client has disconnected")
            with suppress(asyncio.TimeoutError):
                message = await asyncio.wait_for(self.messages.get(), LOOK)
        if isinstance(message, Refusal):
            raise message
        if not self.asked.stream:
            return JSONResponse(message)
        # In the grace period a stopping server ends its streams with a Refusal.
        return EventSourceResponse(self._events(message), sep="\n", send_timeout=30, shutdown_grace_period=30)

    async def _events(self, message: Any) -> AsyncIterator[str]:
        try:
            while message is not None:
                shown = message.data() if isinstance(message, Refusal) else message
                yield shown if isinstance(shown, str) else json.dumps(shown)
                message = None if isinstance(message, Refusal) else await self.messages.get()
        finally:
            self.gone = True


class Worker(Conductor):
    """Conductor of the texts of all jobs, up to ``places`` at a time, in order of arrival."""

    def __init__(self, setting: Setting, options: TextOptions, places: int) -> None:
        """Raises InputError where the command line's draft is not possible."""
        super().__init__(setting.model, setting.positions, places)
        self.setting, self.plain, self.labels = setting, plain(setting.model), Labels.of(setting.tokenizer)
        self.name = setting.folder.resolve().name  # of the model, to clients
        self.made: dict[DraftOptions, Drafting] = {}
        self.jobs: list[Job] = []  # in order of arrival; those with tasks have begun
        self.arrived, self.stopped = threading.Event(), lambda: False
        drafting = self.drafting(options)
        widths = {*drafting.plan.attention, *drafting.plan.mlp}.intersection(LOW_BITS) if drafting.plan else ()
        self.bits = max(widths, default=LOW_BITS[0])  # of the low-bit copies that requests may ask for
        for way in (drafting, self.plain):  # a few tokens, so that no client waits for a compiler
            self.submit(Task(Text([0], Rules(16), self.model), way, setting.params, Coupling("ratio", 0)))
        self.run()

    def enqueue(self, job: Job) -> None:
        """Put a job in the queue, in the thread of the event loop. Raises Refusal where it is full."""
        if sum(not other.gone for other in self.jobs) >= len(self.rows) + MAX_WAITING:
            raise Refusal(f"{MAX_WAITING} requests wait already: try again", status=429, code="queue_full")
        self.jobs.append(job)
        self.arrived.set()

    def work(self, stopped: Callable[[], bool]) -> None:
        """Write the texts of all jobs until ``stopped``, which ends them with an error."""
        self.stopped = stopped
        while self.jobs or not stopped():
            self.arrived.wait(LOOK)
            self.arrived.clear()
            self.run()

    def write(self, job: Job, drafting: Drafting, coupling: Coupling, **more: Any) -> Task:
        """Submit a text of a job; ``more`` are further fields of its task."""
        _, params, rules, _ = job.options
        text = Text(job.ids, rules, self.model, self.setting.tokenizer.token_bytes)
        job.tasks.append(Task(text, drafting, params, coupling, **more))
        self.submit(job.tasks[-1])
        return job.tasks[-1]

    def admit(self) -> bool:
        """Begin waiting jobs, and end those that are written, have failed or lost their client; see ``Conductor``."""
        for job in [*self.jobs]:
            errors = [task.error for task in job.tasks if task.error]
            if self.stopped():
                errors = [Refusal("the server is stopping", status=503)]
            elif not job.tasks and not job.gone and len(self.active) + len(self.waiting) < len(self.rows):
                try:
                    job.begin(job, self, self.drafting(job.options))
                except Exception as error:
                    errors = [error]
            if job.gone or errors or (job.tasks and all(task.ended for task in job.tasks)):
                self.jobs.remove(job)
                for task in job.tasks:
                    task.cancelled = True
                job.send(Refusal.of(errors[0]) if errors else None)
        self.waiting = [task for task in self.waiting if not task.cancelled]
        return super().admit()

    def drafting(self, options: TextOptions) -> Drafting:
        """The drafting of a request, made once for all policies. Raises InputError where it is not possible.

        Its costs are those of the command line's sampling parameters, so that no request waits for a measurement.
        """
        draft = options.draft
        gamma = draft.gamma if draft.kind == "skip" else None  # without one, a plan may say that no draft pays
        made_of = replace(draft, gamma=gamma, adaptive=None, min_target_confidence=None)
        if made_of not in self.made:
            self.made[made_of] = make_drafting(made_of, self.setting)
        return with_policy(self.made[made_of], draft, options.params)
