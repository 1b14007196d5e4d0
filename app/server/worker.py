"""Worker: the queue of requests, whose texts it writes, several in shared steps.

A job's messages are JSON values, then None; an error may be the last one. Knows nothing of sockets
and of how texts are drafted.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from greenlet import greenlet
from starlette.exceptions import HTTPException

from app.characters import TextStream
from app.output import as_json
from app.server.requests import ChatBody, CompletionBody
from app.session import Sample, Session, Slot
from decoding.rounds import Round, common_prefix
from decoding.together import Together

TEXTS = 4  # written at once
MAX_WAITING = 16  # requests in the queue, besides those that are written
LOOK = 0.02  # seconds between two looks at a queue, or at whether a client is still there


@dataclass
class Job:
    """A request in the queue, its text, and the messages to its client. Unread messages wait in
    memory: a text is bounded, so are they.
    """

    body: CompletionBody | ChatBody
    sample: Sample
    messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    network: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    writing: greenlet | None = None
    is_abandoned: bool = False  # by its client, who has disconnected

    def send(self, message: Any) -> None:
        """Send a message, from any thread."""
        with suppress(RuntimeError):  # the network has ended
            self.network.call_soon_threadsafe(self.messages.put_nowait, message)


class Worker:
    """Worker that writes the texts of all jobs, up to ``TEXTS`` at a time, in order of arrival."""

    def __init__(self, session: Session) -> None:
        """Load the model. Raises InputError where it does not fit, or cannot draft as asked."""
        session.check_memory()
        session.mask_seconds = 1.0  # a grammar that takes longer would keep the others waiting
        session.options = replace(session.options, context=session.capacity())
        session.warm_up([0, 0])  # so that no client waits for low-bit copies or a compiler
        slots = session.slots_for(TEXTS, session.context)
        self.session = session
        self.free = [session.new_slot(session.context) for _ in range(slots)]
        self.places = slots + MAX_WAITING
        self.together = Together(session.model)
        self.jobs: list[Job] = []  # that wait or are written, in order of arrival

    def enqueue(self, job: Job) -> None:
        """Queue a job, in the network's thread. Raises HTTPException where the queue is full."""
        if sum(not each.is_abandoned for each in [*self.jobs]) >= self.places:
            raise HTTPException(429, f"{MAX_WAITING} requests wait already: try again")
        self.jobs.append(job)

    def work(self, stopped: Callable[[], bool]) -> None:
        """Write the texts of all jobs until ``stopped``, which ends them with an error."""
        while not stopped():
            for job in [*self.jobs]:
                if job.is_abandoned and job.writing:
                    self.together.stop(job.writing)
                elif self.free and not job.writing:
                    job.writing = self.together.start(partial(self.write, job))
            if not self.together.step():
                time.sleep(LOOK)
        for job in [*self.jobs]:
            job.send(HTTPException(503, "the server is stopping"))
            job.send(None)
        for loop in [*self.together.loops]:
            self.together.stop(loop)

    def write(self, job: Job) -> None:
        """Write the text of a job, in a greenlet. An error ends it alone."""
        prompt = job.sample.source.tokens
        # A conversation goes on where its cache is; what begins alike does not cost another's:
        # entries that are kept, less those that are lost.
        slot = max(
            self.free, key=lambda slot: 2 * common_prefix(slot.tokens, prompt) - len(slot.tokens)
        )
        self.free.remove(slot)
        try:
            for message in answers(self.session, job, slot, self.together):
                job.send(message)
        except Exception as error:
            job.send(error)
        finally:
            self.free.append(slot)
            self.jobs.remove(job)
            job.send(None)


def answers(session: Session, job: Job, slot: Slot, target: Together) -> Iterator[dict[str, Any]]:
    """Yield the messages of a text, with statistics of its rounds: the whole text in one or, of a
    stream, the text that a terminal would show, after each round.
    """
    body = job.body
    sample = job.sample
    is_chat = isinstance(body, ChatBody)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {
        "id": secrets.token_hex(12),
        "object": f"{kind}.chunk" if is_chat and body.stream else kind,
        "created": int(time.time()),
        "model": session.name,
    }

    def answer(said: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        shown = {"delta" if body.stream else "message": said}
        shown = shown if is_chat else {"text": said.get("content", "")}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [choice]}

    if body.stream and is_chat:
        yield answer({"role": "assistant", "content": ""})
    stream = TextStream(sample.source)
    for round in session.rounds(sample, slot, target):
        piece = {"content": stream.pull()}
        if body.stream and body.trace:
            shown = shown_round(round, sample, session.labels)
            yield answer(piece, trace=shown, speculation=as_json(sample))
        elif body.stream and piece["content"]:
            yield answer(piece)
    finish = "length" if sample.finish == "length" else "stop"
    usage = {
        "prompt_tokens": sample.source.prompt_length,
        "completion_tokens": len(sample.tokens),
        "total_tokens": len(sample.source),
    }
    said = {} if body.stream else {"role": "assistant", "content": sample.text}
    last = answer(said, finish, speculation=as_json(sample))
    yield last if body.stream else last | {"usage": usage}
    if body.stream and (body.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": usage}


def shown_round(round: Round, sample: Sample, label: Callable[[int], str]) -> dict[str, Any]:
    """Return a round as the live page shows it."""
    tokens = [
        {"id": token, "text": label(token), "verdict": verdict}
        for token, verdict in round.verdicts()
    ]
    return {"tokens": tokens, "retracted": len(round.retracted), "draft": sample.draft}
