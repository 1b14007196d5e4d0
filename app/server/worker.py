"""Worker: the queue of jobs, the thread that writes their texts, several at once, and the answers,
which are the messages about a text for OpenAI's endpoints and for the live page.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from app.characters import TextStream
from app.command_line import say
from app.draft_options import DraftOptions
from app.output import as_json
from app.page import Recording, heading, render_page
from app.request import Request
from app.server.requests import MAX_GAMMA, ChatBody, ParsedRequest, RequestReader
from app.session import Session
from app.together import Entry, Scheduler
from app.writer import Task
from decoding.rounds import Round
from decoding.text import Rules
from model import LOW_BITS, LayerPlan
from weights.memory import Memory, check_fits, free_bytes

MAX_WAITING = 16  # requests in the queue, besides as many as texts are written at once
# seconds between two looks at whether a waiting client is still there, and whether the server stops
LOOK = 0.2
SHORTEST_CONTEXT = 1024  # positions: below this a smaller cache would not help
# the elements that the live page has besides those of --html
FORM = Path(__file__).with_name("live.html")

# Generator of a job's texts, whose readers send the messages; it runs in the worker's thread, and
# goes on when the text that it yielded last has been written.
Answer = Callable[["Job", Session], Iterator[Entry]]


class Job:
    """A request in the queue: its texts, one after the other, and the messages to its client.

    A message is a JSON value, or the error that ended a text; None is the last. Unread messages
    wait in memory: a text is bounded, so are they.
    """

    def __init__(self, request: ParsedRequest, answer: Answer, session: Session) -> None:
        """Made in the thread of the event loop."""
        self.request = request
        self.texts = answer(self, session)
        self.entry: Entry | None = None  # of the latest text; None while the job waits
        self.is_abandoned = False  # by its client, who has disconnected
        self.loop = asyncio.get_running_loop()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        """Send a message, from any thread."""
        with suppress(RuntimeError):  # the event loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self.messages.put_nowait, message)


class Worker:
    """Worker that writes the texts of all jobs, up to ``slots`` at a time, in order of arrival."""

    def __init__(self, session: Session, slots: int) -> None:
        """Raises InputError where the command line's draft is not possible."""
        self.session = session
        self.scheduler = Scheduler(session.model, session.request.capacity, slots)
        self.jobs: list[Job] = []  # in order of arrival
        self.arrived = threading.Event()
        asked = session.request.asked._replace(rules=Rules(16))
        drafts = asked.draft, DraftOptions("none")
        texts = [session.task([0], asked._replace(draft=draft)) for draft in drafts]
        drafting = texts[0].drafting
        drafting.preparation.work()  # no client waits for it
        plan = drafting.plan
        widths = {*plan.attention, *plan.mlp} & {*LOW_BITS} if plan else set()
        # of the low-bit copies that requests may ask for
        self.bits = max(widths, default=LOW_BITS[0])
        # A few tokens, so that no client waits for a compiler.
        self.scheduler.write_all(texts)

    def enqueue(self, job: Job) -> None:
        """Queue a job, in the event loop's thread. Raises HTTPException where it is full."""
        present = [other for other in self.jobs if not other.is_abandoned]
        if len(present) >= len(self.scheduler.slots) + MAX_WAITING:
            raise HTTPException(429, f"{MAX_WAITING} requests wait already: try again")
        self.jobs.append(job)
        self.arrived.set()

    def work(self, stopped: Callable[[], bool]) -> None:
        """Write the texts of all jobs until ``stopped``, which ends them with an error."""

        def before_step() -> None:
            for job in [*self.jobs]:
                if stopped():
                    self.end(job, HTTPException(503, "the server is stopping"))
                elif job.is_abandoned:
                    self.end(job)
                else:
                    self.advance(job)

        while self.jobs or not stopped():
            self.arrived.wait(LOOK)
            self.arrived.clear()
            self.scheduler.run(before_step)

    def advance(self, job: Job) -> None:
        """Begin the next text of a job: the first when there is room, another when the one before
        has ended. End the job after its last text, and after an error.
        """
        entry = job.entry
        is_due = entry.ended if entry else self.scheduler.has_room
        if entry and entry.error:
            self.end(job, entry.error)
        elif is_due:
            try:
                job.entry = next(job.texts)
                self.scheduler.submit(job.entry)
            except StopIteration:
                self.end(job)
            except Exception as error:
                self.end(job, error)

    def end(self, job: Job, error: BaseException | None = None) -> None:
        """End the text of a job where it is, and its messages, with the error if any; take the job
        out of the queue.
        """
        if job.entry:
            job.entry.cancelled = True
        if error:
            job.send(error)
        job.send(None)
        self.jobs.remove(job)


def context_length(command_line: Request, slots: int) -> int:
    """Positions of each text's cache: the context, halved until ``slots`` caches fit.

    The estimate includes low-bit copies of all weights in the widest width.
    """
    config = command_line.config
    free = free_bytes(command_line.device)
    low_bits = LayerPlan.full(config.num_layers).in_bits(max(LOW_BITS))
    draft_config = command_line.needs()["draft_config"] or config
    positions = min(command_line.capacity, draft_config.max_positions)

    def memory_for(positions: int) -> Memory:
        return command_line.memory(
            positions=positions,
            prompt=positions // 2,
            longest_draft=MAX_GAMMA,
            plan=low_bits,
            texts=slots,
        )

    while positions > SHORTEST_CONTEXT and memory_for(positions).total > free:
        positions //= 2
    check_fits(memory_for(positions), command_line.device)
    if positions < config.max_positions:
        say(
            f"context: {positions} of the model's {config.max_positions} tokens, for each of"
            f" {slots} texts at once"
        )
    return positions


def completion(job: Job, session: Session) -> Iterator[Entry]:
    """Answer of OpenAI's endpoints, with statistics of the rounds: the whole text in one message
    or, of a stream, the text that a terminal would show, after each round.
    """
    body, ids, answers, options = job.request
    is_chat = isinstance(body, ChatBody)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {
        "id": secrets.token_hex(12),
        "object": f"{kind}.chunk" if is_chat and body.stream else kind,
        "created": int(time.time()),
        "model": session.request.name,
    }
    task = session.task(ids, options, answers=answers)
    stream = TextStream(task.text)

    def answer(said: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        shown: dict[str, Any] = {"text": said.get("content", "")}
        if is_chat:
            shown = {"delta" if body.stream else "message": said}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [choice]}

    def read(round: Round, seconds: float) -> None:
        if body.stream and (piece := stream.pull()):
            job.send(answer({"content": piece}))

    task.readers = [read]
    if body.stream and is_chat:
        job.send(answer({"role": "assistant", "content": ""}))
    yield Entry(task)
    finish = "length" if task.text.finish == "length" else "stop"
    statistics = as_json(task.sample, str(task.coupling) if task.params.temperature else "")
    usage = {
        "prompt_tokens": task.text.prompt_length,
        "completion_tokens": len(task.text.generated),
        "total_tokens": len(task.text),
    }
    if not body.stream:
        said = {"role": "assistant", "content": task.text.written}
        job.send(answer(said, finish, speculation=statistics) | {"usage": usage})
        return
    job.send(answer({}, finish, speculation=statistics))
    if (body.stream_options or {}).get("include_usage"):
        job.send({**head, "choices": [], "usage": usage})
    job.send("[DONE]")


def live(job: Job, session: Session) -> Iterator[Entry]:
    """Answer of the live page: a column with the text and, if asked, one with its plain text."""
    body, ids, answers, options = job.request
    drafts = [options.draft, DraftOptions("none")] if body.beside else [options.draft]
    tasks = [session.task(ids, options._replace(draft=draft), answers=answers) for draft in drafts]
    facts = heading("", session.request.name, tasks[0])
    job.send({"kind": "begin", "columns": [task.drafting.name for task in tasks], **facts})
    for number, task in enumerate(tasks):
        yield shown_in_column(job, session, task, number)


def shown_in_column(job: Job, session: Session, task: Task, number: int) -> Entry:
    """The text of a column: the page is told each draft of it and, verified, each round."""
    recording = Recording(task.params, session.labels)

    def send(kind: str, **more: Any) -> None:
        job.send({"kind": kind, "column": number, **more})

    def read(round: Round, seconds: float) -> None:
        data = recording.add(round, seconds)
        send("round", round=data, finish=round.finish, seconds=seconds)

    task.readers = [read]
    task.observer = recording.observe
    return Entry(task, lambda tokens: send("draft", tokens=[*map(session.labels, tokens)]))


def live_page(reader: RequestReader) -> str:
    """The page before anything is written."""
    options = reader.options
    facts = {
        "prompt": "",
        "facts": [("Model", reader.command_line.name)],
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
    nothing = {"rounds": [], "finish": None, "seconds": 0}
    return render_page(facts, [nothing], FORM.read_text(encoding="utf-8"))
