"""How orders are answered: OpenAI's shapes, whole or as server-sent events, and the live page's own events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import anyio
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from decoding.run.writer import Sample
from decoding.serve.orders import Order
from decoding.serve.worker import Ended, Event, Job, Piece, Shown, Worker, Written
from decoding.show.report import as_json
from model import InputError

PATIENCE = 30.0  # seconds that a client may take to read what was sent
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}  # our words in OpenAI's
SPECULATION = ("rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round", "tokens_per_second")


def error_data(error: InputError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    status = getattr(error, "status", 400)
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    more = {name: getattr(error, name, None) for name in ("param", "code")}
    return {"error": {"message": str(error), "type": kind, **more}}


def error_response(error: InputError) -> JSONResponse:
    headers = {"retry-after": "1"} if getattr(error, "status", 400) == 429 else None
    return JSONResponse(error_data(error), getattr(error, "status", 400), headers)


class Form(Protocol):
    """How the events of one job are put: as messages of a stream, or as one answer."""

    def messages(self, event: Event) -> Iterator[Any]: ...

    def whole(self, samples: Sequence[Sample]) -> Any: ...


class LiveForm:
    """The live page's: what it is to show."""

    def messages(self, event: Event) -> Iterator[Any]:
        if isinstance(event, Shown):
            yield event.data
        elif isinstance(event, Ended) and event.error:
            yield {"kind": "error", **error_data(event.error)}


class CompletionForm:
    """OpenAI's: of a chat, or of a plain text. What speculation did stands beside each choice."""

    def __init__(self, order: Order, model: str, *, chat: bool) -> None:
        self.order, self.chat = order, chat
        kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self.chunk_head = {**self.head, "object": "chat.completion.chunk" if chat else kind}
        self.begun: set[int] = set()
        self.tokens = 0

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        choices = []
        for index, sample in enumerate(samples):
            self.tokens += sample.statistics.tokens
            written = sample.text.written
            said = {"message": {"role": "assistant", "content": written}} if self.chat else {"text": written}
            choices.append({"index": index, **said, "logprobs": None, **self._end(sample)})
        return {**self.head, "choices": choices, "usage": self._usage()}

    def messages(self, event: Event) -> Iterator[Any]:
        if isinstance(event, Piece):
            yield self._chunk(event.choice, event.text)
        elif isinstance(event, Written):
            self.tokens += event.sample.statistics.tokens
            if event.choice not in self.begun:  # a text of nothing still begins
                yield self._chunk(event.choice, "")
            yield self._chunk(event.choice, None, **self._end(event.sample))
        elif isinstance(event, Ended):
            if event.error:
                yield error_data(event.error)
                return
            if self.order.with_usage:
                yield {**self.chunk_head, "choices": [], "usage": self._usage()}
            yield "[DONE]"

    def _chunk(self, choice: int, text: str | None, **end: Any) -> dict[str, Any]:
        """``text``: more of it; None where it has ended."""
        if self.chat:
            role = {} if choice in self.begun else {"role": "assistant"}
            said: dict[str, Any] = {"delta": {} if text is None else {**role, "content": text}}
        else:
            said = {"text": text or ""}
        self.begun.add(choice)
        usage = {"usage": None} if self.order.with_usage else {}
        return {
            **self.chunk_head,
            "choices": [{"index": choice, **said, "logprobs": None, "finish_reason": None, **end}],
            **usage,
        }

    def _end(self, sample: Sample) -> dict[str, Any]:
        repeat_with = str(self.order.coupling) if self.order.params.temperature else ""
        told = as_json(sample, repeat_with)
        speculation = {name: told[name] for name in (*SPECULATION, "repeat_with")}
        return {"finish_reason": FINISH[sample.finish], "speculation": speculation}

    def _usage(self) -> dict[str, int]:
        prompt = len(self.order.ids)
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}


def server_sent(message: Any) -> bytes:
    """A message of an event stream. JSON in ASCII has no line breaks that could end it."""
    return f"data: {message if isinstance(message, str) else json.dumps(message)}\n\n".encode()


class Answer:
    """The response to an order, as an ASGI application: the order's job ends when its client goes away."""

    def __init__(self, worker: Worker, order: Order, form: Form) -> None:
        self.worker, self.order, self.form = worker, order, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refusal, or what the job ends with, while nothing is sent yet."""
        job = Job(self.order)
        before = self.worker.submit(job)
        if self.order.watched:
            job.take_in(Shown({"kind": "waiting", "before": before}))
        write = self._stream(job, send) if self.order.streams else self._whole(job, scope, receive, send)
        writing, leaving = asyncio.create_task(write), asyncio.create_task(self._left(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self.worker.leave(job)
            writing.cancel()
            leaving.cancel()

    @staticmethod
    async def _left(receive: Receive) -> None:
        """Returns once the client has gone away."""
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _whole(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        events: list[Event] = []
        while not (events and isinstance(events[-1], Ended)):
            events += await job.read()
        self._raise(events[-1])
        samples = [event.sample for event in events if isinstance(event, Written)]
        await JSONResponse(self.form.whole(samples))(scope, receive, send)

    async def _stream(self, job: Job, send: Send) -> None:
        events = await job.read()
        self._raise(events[0])
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        more = True
        while more:
            more = not isinstance(events[-1], Ended)
            messages = chain.from_iterable(map(self.form.messages, events))
            body = b"".join(map(server_sent, messages))
            with anyio.move_on_after(PATIENCE) as waited:
                await send({"type": "http.response.body", "body": body, "more_body": more})
            if waited.cancelled_caught:
                return  # without an end: the connection is closed
            if more:
                events = await job.read()

    @staticmethod
    def _raise(event: Event) -> None:
        if isinstance(event, Ended) and event.error:
            raise event.error
