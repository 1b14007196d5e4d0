"""Queue of requests, the worker that writes their texts, several at once, and the messages that go
to clients.
"""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from decoding.rounds import Round
from decoding.run.options import TextOptions
from decoding.run.reading import Spans
from decoding.run.session import Session
from decoding.run.streaming import TextStream
from decoding.run.together import Scheduler, Task
from decoding.run.writer import Drafting, plain
from decoding.serve.requests import Asked, Chat, RequestReader, error_json, refusal
from decoding.show.output import as_json
from decoding.show.page import Recording, heading, render_page
from decoding.text import Rules
from model.plan import LOW_BITS

# the elements that the live page has besides those of --html
FORM = Path(__file__).with_name("live.html")
MAX_WAITING = 16  # requests in the queue, besides as many as texts are written at once
# seconds between two looks at whether the client is still there, and whether the server stops
LOOK = 0.2


@dataclass(eq=False)
class Job:
    """A request, its texts, and its messages for the client: JSON values or an HTTPException, at
    the end None.

    ``begin(job, worker, drafting)`` submits the texts, whose readers send the messages, all in the
    worker's thread. Unread messages wait in memory: a text is bounded, so are they. ``answers`` are
    the positions of earlier answers in the prompt's ``ids``.
    """

    asked: Asked
    ids: list[int]
    answers: Spans
    options: TextOptions
    begin: Callable[..., object]
    tasks: list[Task] = field(default_factory=list)
    error: Exception | None = None  # that the job itself met
    gone: bool = False  # whether the client has disconnected
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    @property
    def failure(self) -> BaseException | None:
        """The first error of the job or of its texts."""
        return next(filter(None, (self.error, *(task.error for task in self.tasks))), None)

    @property
    def ended(self) -> bool:
        """Whether all texts are written, or nothing more will be."""
        written = self.tasks and all(task.ended for task in self.tasks)
        return bool(self.gone or self.failure or written)

    def end(self) -> None:
        """End the texts that are not written, and the messages, with the first error if any."""
        for task in self.tasks:
            task.cancelled = True
        if self.failure:
            self.send(refusal(self.failure))
        self.send(None)

    def send(self, message: Any) -> None:
        """Send a message, from any thread."""
        with suppress(RuntimeError):  # the event loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self.messages.put_nowait, message)

    async def respond(self, request: HTTPRequest) -> Response:
        """The response, once there is a message. Raises an HTTPException that comes first."""
        message = None
        while message is None:
            if await request.is_disconnected():
                self.gone = True
                raise HTTPException(400, "the client has disconnected")
            with suppress(asyncio.TimeoutError):
                message = await asyncio.wait_for(self.messages.get(), LOOK)
        if isinstance(message, HTTPException):
            raise message
        if not self.asked.stream:
            return JSONResponse(message)
        # In the grace period a stopping server ends its streams with an error.
        return EventSourceResponse(
            self._events(message), sep="\n", send_timeout=30, shutdown_grace_period=30
        )

    async def _events(self, message: Any) -> AsyncIterator[str]:
        try:
            while message is not None:
                shown = error_json(message) if isinstance(message, HTTPException) else message
                yield shown if isinstance(shown, str) else json.dumps(shown)
                message = await self.messages.get()
        finally:
            self.gone = True


class Worker:
    """Worker that writes the texts of all jobs, up to ``slots`` at a time, in order of arrival."""

    def __init__(self, session: Session, slots: int) -> None:
        """Raises InputError where the command line's draft is not possible."""
        self.session = session
        self.scheduler = Scheduler(session.model, session.request.capacity, slots)
        self.plain = plain(session.model)
        self.jobs: list[Job] = []  # in order of arrival; those with tasks have begun
        self.arrived = threading.Event()
        self.stopped = lambda: False
        request = session.request
        drafting = session.setting.drafting(request.draft, request.params)
        drafting.preparation.finish()  # no client waits for it
        plan = drafting.plan
        widths = {*plan.attention, *plan.mlp} & {*LOW_BITS} if plan else set()
        # of the low-bit copies that requests may ask for
        self.bits = max(widths, default=LOW_BITS[0])
        # A few tokens, so that no client waits for a compiler.
        self.scheduler.write_all(
            [
                Task(session.new_text([0], Rules(16)), way, request.params, request.coupling)
                for way in (drafting, self.plain)
            ]
        )

    def enqueue(self, job: Job) -> None:
        """Put a job in the queue, in the thread of the event loop. Raises HTTPException where it is
        full.
        """
        if sum(not other.gone for other in self.jobs) >= len(self.scheduler.slots) + MAX_WAITING:
            raise HTTPException(429, f"{MAX_WAITING} requests wait already: try again")
        self.jobs.append(job)
        self.arrived.set()

    def work(self, stopped: Callable[[], bool]) -> None:
        """Write the texts of all jobs until ``stopped``, which ends them with an error."""
        self.stopped = stopped
        while self.jobs or not stopped():
            self.arrived.wait(LOOK)
            self.arrived.clear()
            self.scheduler.run(self.begin_and_end_jobs)

    def write(self, job: Job, drafting: Drafting, **more: Any) -> Task:
        """Submit a text of a job; ``more`` are further fields of its task."""
        _, params, rules, coupling = job.options
        text = self.session.new_text(job.ids, rules)
        task = Task(text, drafting, params, coupling, answers=job.answers, **more)
        job.tasks.append(task)
        self.scheduler.submit(task)
        return task

    def begin_and_end_jobs(self) -> None:
        """Begin waiting jobs where there is room for their texts, and end those that are written,
        have failed or lost their client.
        """
        scheduler = self.scheduler
        for job in [*self.jobs]:
            has_room = len(scheduler.active) + len(scheduler.waiting) < len(scheduler.slots)
            if self.stopped():
                job.error = HTTPException(503, "the server is stopping")
            elif has_room and not job.tasks and not job.gone:
                try:
                    drafting = self.session.setting.drafting(job.options.draft, job.options.params)
                    job.begin(job, self, drafting)
                except Exception as error:
                    job.error = error
            if job.ended:
                self.jobs.remove(job)
                job.end()


def write_completion(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Answer of OpenAI's endpoints: submits the text, and sends it whole or, of a stream, after
    each round.

    With it come statistics of the rounds. A stream sends what a terminal would show.
    """
    streams = bool(job.asked.stream)
    is_chat = isinstance(job.asked, Chat)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {
        "id": secrets.token_hex(12),
        "object": f"{kind}.chunk" if is_chat and streams else kind,
        "created": int(time.time()),
        "model": worker.session.request.name,
    }
    task = worker.write(job, drafting)
    stream = TextStream(task.text)

    def choice(finish: str | None = None, **said: str) -> dict[str, Any]:
        shown = (
            {"delta" if streams else "message": said}
            if is_chat
            else {"text": said.get("content", "")}
        )
        return {"index": 0, **shown, "logprobs": None, "finish_reason": finish}

    def send(*choices: dict[str, Any], **more: Any) -> None:
        job.send({**head, "choices": choices, **more})

    def read(round: Round, seconds: float) -> None:
        if streams and (piece := stream.pull()):
            send(choice(content=piece))
        if round.finish is None:
            return
        said = {} if streams else {"role": "assistant", "content": task.text.written}
        last = choice("length" if round.finish == "length" else "stop", **said)
        last["speculation"] = as_json(
            task.sample, str(task.coupling) if task.params.temperature else ""
        )
        usage = {
            "prompt_tokens": len(job.ids),
            "completion_tokens": len(task.text.generated),
            "total_tokens": len(task.text),
        }
        send(last, **({} if streams else {"usage": usage}))
        if not streams:
            return
        if (job.asked.stream_options or {}).get("include_usage"):
            send(usage=usage)
        job.send("[DONE]")

    task.readers = [read]
    if streams and is_chat:
        send(choice(role="assistant", content=""))


def live_page(reader: RequestReader) -> str:
    """The page before anything is written."""
    options = reader.options
    facts = {
        "prompt": "",
        "facts": [("Model", reader.request.name)],
        "plan": None,
        "greedy": True,
        "race": False,
        "form": {
            "drafts": reader.drafts,
            "draft": options.draft,
            "temperature": options.temperature,
            "seed": options.seed,
            "max_tokens": options.max_new_tokens,
        },
    }
    empty = {"rounds": [], "finish": None, "seconds": 0}
    return render_page(facts, [empty], FORM.read_text(encoding="utf-8"))


def write_live(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Column of the live page: submits the text and, when it has ended, its plain text as a second
    column if asked. Tells the page each draft before its verification, and each round after it.
    """
    ways = [drafting, worker.plain] if job.asked.beside else [drafting]

    def begin(column: int) -> None:
        recording = Recording(job.options.params, worker.session.labels)

        def send(kind: str, **more: Any) -> None:
            job.send({"kind": kind, "column": column, **more})

        def read(round: Round, seconds: float) -> None:
            data = recording.add(round, seconds)
            send("round", round=data, finish=round.finish, seconds=seconds)
            if round.finish and column + 1 < len(ways):
                begin(column + 1)

        worker.write(
            job,
            ways[column],
            readers=[read],
            observer=recording.observe,
            on_draft=lambda tokens: send("draft", tokens=[*map(worker.session.labels, tokens)]),
        )

    request = worker.session.request
    facts = heading("", request.name, drafting, job.options.params, job.options.coupling)
    job.send({"kind": "begin", "columns": [way.name for way in ways], **facts})
    begin(0)
