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
from functools import partial
from pathlib import Path
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from decoding.rounds import Round
from decoding.run.chooser import Draftings, Setting
from decoding.run.options import TextOptions
from decoding.run.reading import Spans
from decoding.run.streaming import Labels, TextStream
from decoding.run.together import Scheduler, Task
from decoding.run.writer import Drafting, plain
from decoding.serve.requests import Asked, Chat, RequestReader, error_json, refusal
from decoding.show.output import as_json
from decoding.show.page import Recording, heading, render_page
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model.plan import LOW_BITS

# the elements that the live page has besides those of --html
FORM = Path(__file__).with_name("live.html")
MAX_WAITING = 16  # requests in the queue, besides as many as texts are written at once
# seconds between two looks at whether the client is still there, and whether the server stops
LOOK = 0.2


class Job:
    """A request, its texts, and its messages for the client: JSON values or an HTTPException, at
    the end None.

    ``begin(job, worker, drafting)`` submits the texts, whose readers send the messages, all in the
    worker's thread. Unread messages wait in memory: a text is bounded, so are they.
    """

    def __init__(
        self,
        asked: Asked,
        ids: list[int],
        answers: Spans,
        options: TextOptions,
        begin: Callable[..., object],
    ) -> None:
        self.asked = asked
        self.ids = ids
        self.answers = answers
        self.options = options
        self.begin = begin
        self.tasks: list[Task] = []
        self.gone = False  # whether the client has disconnected
        self.loop, self.messages = asyncio.get_running_loop(), asyncio.Queue[Any]()

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


class Worker(Scheduler):
    """Scheduler of the texts of all jobs, up to ``slots`` at a time, in order of arrival."""

    def __init__(self, setting: Setting, options: TextOptions, slots: int) -> None:
        """Raises InputError where the command line's draft is not possible."""
        super().__init__(setting.model, setting.positions, slots)
        self.setting, self.plain, tokenizer = setting, plain(setting.model), setting.tokenizer
        self.labels = Labels(tokenizer.token_bytes, tokenizer.special)
        self.name = setting.folder.resolve().name  # of the model, to clients
        self.draftings = Draftings(setting)
        self.jobs: list[Job] = []  # in order of arrival; those with tasks have begun
        self.arrived, self.stopped = threading.Event(), lambda: False
        drafting = self.drafting(options)
        drafting.preparation.finish()  # no client waits for it
        widths = (
            {*drafting.plan.attention, *drafting.plan.mlp}.intersection(LOW_BITS)
            if drafting.plan
            else ()
        )
        # of the low-bit copies that requests may ask for
        self.bits = max(widths, default=LOW_BITS[0])
        text, coupling = partial(Text, [0], Rules(16), self.model), Coupling("ratio", 0)
        # A few tokens, so that no client waits for a compiler.
        self.write_all(
            [Task(text(), way, setting.params, coupling) for way in (drafting, self.plain)]
        )

    def enqueue(self, job: Job) -> None:
        """Put a job in the queue, in the thread of the event loop. Raises HTTPException where it is
        full.
        """
        if sum(not other.gone for other in self.jobs) >= len(self.slots) + MAX_WAITING:
            raise HTTPException(429, f"{MAX_WAITING} requests wait already: try again")
        self.jobs.append(job)
        self.arrived.set()

    def work(self, stopped: Callable[[], bool]) -> None:
        """Write the texts of all jobs until ``stopped``, which ends them with an error."""
        self.stopped = stopped
        while self.jobs or not stopped():
            self.arrived.wait(LOOK)
            self.arrived.clear()
            self.run()

    def write(self, job: Job, drafting: Drafting, **more: Any) -> Task:
        """Submit a text of a job; ``more`` are further fields of its task."""
        _, params, rules, coupling = job.options
        more |= {"answers": job.answers}
        text = Text(job.ids, rules, self.model, self.setting.tokenizer.token_bytes)
        job.tasks.append(Task(text, drafting, params, coupling, **more))
        self.submit(job.tasks[-1])
        return job.tasks[-1]

    def admit(self) -> bool:
        """Begin waiting jobs, and end those that are written, have failed or lost their client; see
        ``Scheduler``.
        """
        for job in [*self.jobs]:
            errors = [task.error for task in job.tasks if task.error]
            if self.stopped():
                errors = [HTTPException(503, "the server is stopping")]
            elif (
                not job.tasks
                and not job.gone
                and len(self.active) + len(self.waiting) < len(self.slots)
            ):
                try:
                    job.begin(job, self, self.drafting(job.options))
                except Exception as error:
                    errors = [error]
            if job.gone or errors or (job.tasks and all(task.ended for task in job.tasks)):
                self.jobs.remove(job)
                for task in job.tasks:
                    task.cancelled = True
                for message in [*map(refusal, errors[:1]), None]:
                    job.send(message)
        self.waiting = [task for task in self.waiting if not task.cancelled]
        return super().admit()

    def drafting(self, options: TextOptions) -> Drafting:
        """The drafting of a request. Raises InputError where it is not possible."""
        return self.draftings.of(options.draft, options.params)


def write_completion(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Answer of OpenAI's endpoints: submits the text, and sends it whole or, of a stream, after
    each round.

    With it come statistics of the rounds. A stream sends what a terminal would show.
    """
    streams, is_chat = bool(job.asked.stream), isinstance(job.asked, Chat)
    kind = "chat.completion" if is_chat else "text_completion"
    kind += ".chunk" if is_chat and streams else ""
    head = {
        "id": secrets.token_hex(12),
        "object": kind,
        "created": int(time.time()),
        "model": worker.name,
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
        prompt, output = len(job.ids), len(task.text.generated)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
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
    form = {"drafts": reader.drafts, "draft": options.draft, "temperature": options.temperature}
    form |= {"seed": options.seed, "max_tokens": options.max_new_tokens}
    facts = {
        "prompt": "",
        "facts": [("Model", reader.name)],
        "plan": None,
        "greedy": True,
        "race": False,
    }
    empty = {"rounds": [], "finish": None, "seconds": 0}
    return render_page({**facts, "form": form}, [empty], FORM.read_text(encoding="utf-8"))


def write_live(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Submit the text of the live page and, when it has ended, its plain text if asked.

    The page gets each draft before its verification, and each round after it.
    """
    _, params, _, coupling = job.options
    ways = [drafting, worker.plain] if job.asked.beside else [drafting]
    facts = heading("", worker.name, drafting, params, coupling)
    job.send({"kind": "begin", "columns": [way.name for way in ways], **facts})

    def write(column: int) -> None:
        recording = Recording(params, worker.labels)

        def draft(tokens: list[int]) -> None:
            job.send(
                {
                    "kind": "draft",
                    "column": column,
                    "tokens": [worker.labels(token) for token in tokens],
                }
            )

        def read(round: Round, seconds: float) -> None:
            recording.add(round, seconds)
            *_, added = recording.sample["rounds"]
            seconds = recording.sample["seconds"]  # without observing
            job.send(
                {
                    "kind": "round",
                    "column": column,
                    "round": added,
                    "finish": round.finish,
                    "seconds": seconds,
                }
            )
            if round.finish and column + 1 < len(ways):
                write(column + 1)

        worker.write(job, ways[column], readers=[read], observer=recording.observe, on_draft=draft)

    write(0)
