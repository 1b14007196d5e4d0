"""Worker: the queue of requests, whose texts it writes, several in shared steps.

A job's messages are JSON values, then None; an error may be the last one. Knows nothing of sockets
and of how texts are drafted.
"""

import asyncio
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

from greenlet import greenlet
from starlette.exceptions import HTTPException
from torch import Tensor

from app.characters import Labels, TextStream
from app.output import as_json
from app.server.requests import ChatBody, CompletionBody
from app.session import Sample, Session, Slot
from decoding.drafters import Draft
from decoding.rounds import Round, common_prefix
from decoding.text import Text
from decoding.together import Together

TEXTS = 4  # written at once
LONGEST_RETRY = 60  # seconds: clients ignore a longer wish
LEAST = -9999.0  # log probability that stands for minus infinity, which JSON has not
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
        self.session = session
        self.slots = session.slots_for(TEXTS, session.context)
        self.free = [session.new_slot(session.context) for _ in range(self.slots)]
        self.places = self.slots + session.options.queue
        self.pace = 1.0  # seconds that a text took of late
        self.together = Together(session.model)
        self.jobs: list[Job] = []  # that wait or are written, in order of arrival

    def enqueue(self, job: Job) -> None:
        """Queue a job, in the network's thread. Raises HTTPException where the queue is full."""
        ahead = sum(not each.is_abandoned for each in [*self.jobs])
        if ahead >= self.places:
            seconds = min(LONGEST_RETRY, ceil(ahead / self.slots * self.pace))
            raise HTTPException(429, "the queue is full: try again", {"Retry-After": str(seconds)})
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
        began = time.monotonic()
        try:
            for message in answers(self.session, job, slot, self.together):
                job.send(message)
        except Exception as error:
            job.send(error)
        finally:
            self.free.append(slot)
            self.jobs.remove(job)
            self.pace = time.monotonic() - began
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
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": f"{kind}.chunk" if is_chat and body.stream else kind,
        "created": int(time.time()),
        "model": session.name,
    }
    stream = TextStream(sample.source)
    logprobs = None if body.top is None else Logprobs(sample.source, session.labels, body.top)

    def answer(said: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        key = "delta" if body.stream else "message"
        shown = {key: said} if is_chat else {"text": said.get("content", "")}
        told = logprobs and logprobs.pull(stream.shown, is_chat)
        choice = {"index": 0, **shown, "logprobs": told, "finish_reason": finish, **more}
        return {**head, "choices": [choice]}

    if body.stream and is_chat:
        yield answer({"role": "assistant", "content": ""})
    for round in session.rounds(sample, slot, target, logprobs and logprobs.see):
        piece = stream.pull()
        more = {"trace": shown_round(round, sample, session.labels)} if body.trace else {}
        if body.stream and (piece or more):
            yield answer({"content": piece}, **more)
    usage = {
        "prompt_tokens": sample.source.prompt_length,
        "completion_tokens": len(sample.tokens),
        "total_tokens": len(sample.source),
        "speculation": as_json(sample),
    }
    said = {} if body.stream else {"role": "assistant", "content": sample.text}
    last = answer(said, "length" if sample.finish == "length" else "stop")
    yield last if body.stream else last | {"usage": usage}
    if body.stream and (body.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": usage}


def shown_round(round: Round, sample: Sample, label: Callable[[int], str]) -> dict[str, Any]:
    """Return a round as the live page shows it, with the statistics so far."""
    tokens = [
        {"id": token, "text": label(token), "verdict": verdict}
        for token, verdict in round.verdicts()
    ]
    return {
        **as_json(sample),
        "tokens": tokens,
        "retracted": len(round.retracted),
        "draft": sample.draft,
    }


class Logprobs:
    """Log probabilities of a text's tokens, each with the ``top`` likeliest in its place.

    They are of the target's own distributions, before penalties, temperature and filters, so they
    are equal with any draft.
    """

    def __init__(self, text: Text, labels: Labels, top: int) -> None:
        self.text = text
        self.labels = labels
        self.top = top
        # of each token its entry and those of the likeliest, in OpenAI's form
        self.entries: list[list[dict[str, Any]]] = []
        self.told = 0

    def see(self, draft: Draft, logits: Tensor, *_: object) -> None:
        """Add the tokens that a round added to the text: an observer of the loop. Those that a ban
        took back are dropped.
        """
        del self.entries[len(self.text.generated) :]
        new = self.text.generated[len(self.entries) :]
        for row, token in zip(logits.double().log_softmax(-1), new, strict=False):
            ids = [token, *row.topk(self.top).indices.tolist()]
            self.entries.append([self._entry(each, row[each].item()) for each in ids])

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.labels.spelled([token])
        return {
            "token": spelled.decode(errors="backslashreplace"),
            "logprob": max(logprob, LEAST),
            "bytes": [*spelled],
        }

    def pull(self, end: int, is_chat: bool) -> dict[str, Any]:
        """Return the entries since the last call of tokens that end at offset ``end`` of the text
        or before, or of all where it is finished, in the form of chats or of completions.
        """
        begins = self.text.begins[self.text.prompt_length :]
        count = len(self.entries) if self.text.finish else bisect_right(begins, end) - 1
        new = slice(self.told, count)
        self.told = count
        if is_chat:
            return {"content": [own | {"top_logprobs": top} for own, *top in self.entries[new]]}
        output = self.text.data[begins[0] :]
        return {
            "tokens": [own["token"] for own, *_ in self.entries[new]],
            "token_logprobs": [own["logprob"] for own, *_ in self.entries[new]],
            "top_logprobs": [
                {each["token"]: each["logprob"] for each in top} for _, *top in self.entries[new]
            ],
            "text_offset": [
                len(output[: begin - begins[0]].decode(errors="replace")) for begin in begins[new]
            ],
        }
