"""Server: OpenAI's endpoints for texts and chats, and a live page, over one session.

The network has a thread of its own; texts are written in the calling thread, several in shared
steps. Each request has a queue of messages: JSON values, then None; or an error as the last one.
Knows nothing of how texts are drafted: a request's fields become options.
"""

import asyncio
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from greenlet import greenlet
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    StringConstraints,
    ValidationError,
    create_model,
    model_validator,
)
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.characters import TextStream
from app.command_line import say
from app.files import explaining, one_line
from app.options import KINDS
from app.output import as_json
from app.session import Sample, Session, Slot
from decoding.rounds import Round, common_prefix
from decoding.together import Together
from model.errors import InputError

PAGE = Path(__file__).with_name("live.html")
TEXTS = 4  # written at once
MAX_WAITING = 16  # requests in the queue, besides those that are written
LOOK = 0.02  # seconds between two looks at a queue, or at whether a client is still there
MAX_BODY = 1 << 20  # bytes
# Fields of OpenAI's API that have no effect here, and values of others that change nothing.
UNUSED = {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user"}
NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "modalities": ["text"],
    "tool_choice": "none",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_logprobs": 0,
}
# Options of the command line that a request may give, checked by ``Options``: no files and folders.
OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "coupling"),
    *("exit_layer", "adaptive", "min_target_confidence"),
)
GIVEN = {*OPTIONS, "max_new_tokens", "stop", "ban", "draft", "gamma"}
# Lengths are in characters. Stop strings are searched for after each token. Thousands of Lark rules
# that each name the next overflow the stack of llguidance, which ends the process.
Strings = Annotated[
    list[Annotated[str, Field(max_length=256)]] | None,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=256),
]
Regex = Annotated[str, StringConstraints(max_length=1 << 16)]
Grammar = Annotated[str, StringConstraints(max_length=1 << 13, pattern="start:")]


class Body(BaseModel):
    """JSON object whose unknown fields are refused, unless they have no effect: clients send back
    the answers that they received with ``"refusal": null``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_neutral_fields(cls, body: Any) -> Any:
        """Return the body without unknown fields that have no effect."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if name in cls.model_fields or not is_neutral(name, value)
        }


def is_neutral(name: str, value: Any) -> bool:
    """Return whether an unknown field is without effect, null, false, empty, or its default."""
    is_default = value is not True and NEUTRAL.get(name) == value
    return name in UNUSED or value is False or value in (None, "", [], {}) or is_default


class TextPart(Body):
    """Part of a message: text, the only kind that a model here reads."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a chat. A ``content`` in parts becomes one string, and the role "developer"
    becomes "system". The ``name`` of a participant is not told to the model.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[
        list[TextPart],
        Field(min_length=1),
        BeforeValidator(
            lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value
        ),
        AfterValidator(lambda parts: "".join(part.text for part in parts)),
    ]
    name: str | None = None


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``. ``choice``: strings of which the text is one."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: Json[dict[str, Any]] | dict[str, Any] | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Annotated[list[Regex], Field(min_length=1, max_length=256)] | None = None
    grammar: Grammar | None = None

    def options(self) -> dict[str, Any]:
        """Return the command line's option of the kind that is given. Raises InputError."""
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise InputError("structured_outputs: give one of json, regex, choice and grammar")
        return {"regex": "|".join(map(re.escape, self.choice))} if self.choice else given


def structured(response_format: Any) -> Any:
    """Return OpenAI's ``response_format`` as vLLM's ``structured_outputs``."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise ValueError("give the type text, json_object, or json_schema with a schema")


class TextBody(create_model("Options", __base__=Body, **dict.fromkeys(OPTIONS, (Any, None)))):
    """Fields of every request: those of OpenAI's API, and options of the command line. A ``draft``
    is one of ``KINDS``, never a file of code. ``trace``: a stream tells the verdicts of each round.
    """

    model: str | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    stop: Strings = None
    ban: Strings = None
    draft: Literal[tuple(KINDS)] | None = None
    gamma: Annotated[int, Field(ge=0, le=32)] | None = None
    response_format: Annotated[StructuredOutputs | None, BeforeValidator(structured)] = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    trace: bool = False


class CompletionBody(TextBody):
    """JSON of ``/v1/completions``: the prompt is plain text."""

    prompt: str = Field(min_length=1)


class ChatBody(TextBody):
    """JSON of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)


def begin(session: Session, body: CompletionBody | ChatBody) -> Sample:
    """Return the text of a request, with its prompt only. Raises InputError."""
    given = body.model_dump(include=GIVEN, exclude_none=True)
    for form in filter(None, (body.response_format, body.structured_outputs)):
        given |= form.options()
    options = session.options.merged(given)
    if isinstance(body, CompletionBody):
        plain = replace(options, chat=False, system=None)
        return session.begin(session.encode(body.prompt, plain), options)
    messages = [{"role": each.role, "content": each.content} for each in body.messages]
    sample = session.begin(session.encode(messages, options), options)
    sample.continues = True
    return sample


def refusal(request: Request | None, error: Exception) -> JSONResponse:
    """Return the response to an error, as in OpenAI's API, where ``param`` is the field at fault.

    Option ``--exit-layer`` is field ``exit_layer``. A failure such as exhausted memory is printed;
    the client is told no details.
    """
    status = getattr(error, "status_code", 400)
    message = str(getattr(error, "detail", error))
    param = getattr(error, "field", None)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"]))
        is_unknown = first["type"] == "extra_forbidden"
        told = "it is not supported: leave it out" if is_unknown else first["msg"]
        message = f"{one_line(param)[:80] if param else 'the body'}: {told}"
    elif not isinstance(error, InputError | HTTPException) or error.__cause__:  # of a user's code
        say(f"a request could not be answered: {type(error).__name__}: {one_line(error)}")
        status = 500
        message = "the request could not be answered"
    message = re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), message)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    content = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": content}, status)


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
            for message in completion(self, job, slot):
                job.send(message)
        except Exception as error:
            job.send(error)
        finally:
            self.free.append(slot)
            self.jobs.remove(job)
            job.send(None)


def completion(worker: Worker, job: Job, slot: Slot) -> Iterator[Any]:
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
        "model": worker.session.name,
    }

    def answer(said: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        shown = {"delta" if body.stream else "message": said}
        shown = shown if is_chat else {"text": said.get("content", "")}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [choice]}

    if body.stream and is_chat:
        yield answer({"role": "assistant", "content": ""})
    stream = TextStream(sample.source)
    for round in worker.session.rounds(sample, slot, worker.together):
        piece = {"content": stream.pull()}
        if body.stream and body.trace:
            shown = shown_round(round, sample, worker.session.labels)
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


async def respond(worker: Worker, kind: type[ChatBody], request: Request) -> Response:
    """Return the response to a request for a text, once there is a message of it."""
    if int(request.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY:
        raise HTTPException(400, f"send a Content-Length, of at most {MAX_BODY} bytes")
    body = kind.model_validate_json(await request.body())
    model_named(worker.session, body.model or worker.session.name)
    # In another thread, since a grammar may take long to read.
    job = Job(body, await asyncio.to_thread(begin, worker.session, body))
    worker.enqueue(job)
    while job.messages.empty():
        job.is_abandoned = await request.is_disconnected()
        await asyncio.sleep(LOOK)
    message = job.messages.get_nowait()
    if isinstance(message, Exception):
        raise message
    if not body.stream:
        return JSONResponse(message)
    # In the grace period a stopping server ends its streams with an error.
    return EventSourceResponse(
        events(job, message), sep="\n", send_timeout=30, shutdown_grace_period=30
    )


async def events(job: Job, message: Any) -> AsyncIterator[str]:
    """Yield the data of a stream's events: the first ``message`` of a job, then all others."""
    try:
        while message is not None:
            is_error = isinstance(message, Exception)
            yield refusal(None, message).body.decode() if is_error else json.dumps(message)
            message = await job.messages.get()
        yield "[DONE]"
    finally:
        job.is_abandoned = True


def model_named(session: Session, name: str) -> dict[str, Any]:
    """Return the JSON of a model. Raises HTTPException for one that is not served."""
    if name != session.name:
        raise HTTPException(404, f"model {name!r:.80} does not exist here: there is {session.name}")
    return {"id": name, "object": "model", "created": 0, "owned_by": "local"}


def live_page(session: Session, request: Request) -> Response:
    """Return the page. The model's facts are data in it, in which no character ends the script."""
    options = session.options
    facts = {
        "model": session.name,
        "chats": session.tokenizer.chat_template is not None and options.chat is not False,
        "drafts": [kind for kind in KINDS if kind != "model" or options.draft == "model"],
        "draft": options.draft,
        "temperature": options.temperature,
        "max_tokens": options.max_new_tokens,
    }
    page = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", secrets.token_hex(16))
    return HTMLResponse(page.replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c")))


def guarded(app: ASGIApp, host_name: str) -> ASGIApp:
    """Return the app, for requests to the names of this server, from its page or from no page.

    A page of another site may send requests here through the user's browser. The browser then names
    that site as their origin; and if that page's name resolves to this machine (DNS rebinding), the
    Host is that name. An address in numbers cannot be resolved to another.
    """
    names = re.compile(rf"(localhost|{re.escape(host_name)}|[\d.]+)(:\d+)?", re.IGNORECASE)
    refused = HTTPException(403, "pages of other sites may not use this server: use its address")

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Request(scope).headers
        host = headers.get("host", "")
        is_own_page = headers.get("origin", f"//{host}").endswith(f"//{host}")
        shown = app if names.fullmatch(host) and is_own_page else refusal(None, refused)
        await shown(scope, receive, send)

    return guard


def make_app(worker: Worker) -> Starlette:
    """Return the routes."""
    session = worker.session
    model = model_named(session, session.name)
    errors = (InputError, ValidationError, HTTPException, Exception)
    return Starlette(
        routes=[
            Route("/", partial(live_page, session)),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
            Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [model]})),
            Route(
                "/v1/models/{name:path}",
                lambda request: JSONResponse(model_named(session, request.path_params["name"])),
            ),
            Route("/v1/chat/completions", partial(respond, worker, ChatBody), methods=["POST"]),
            Route("/v1/completions", partial(respond, worker, CompletionBody), methods=["POST"]),
        ],
        exception_handlers={
            **dict.fromkeys(errors, refusal),
            ClientDisconnect: lambda request, error: Response(status_code=400),
        },
    )


class Server(uvicorn.Server):
    """Server of one model at ``--serve [HOST:]PORT``; port 0 is any free one."""

    def __init__(self, session: Session) -> None:
        """Listen, then load the model. Raises InputError where either is not possible."""
        asked = session.options.serve
        host, _, port = asked.rpartition(":")
        host = host or "127.0.0.1"
        with explaining(
            f"--serve {asked:.80}: give [HOST:]PORT, such as 127.0.0.1:8000, and a free one",
            (OSError, ValueError, OverflowError, TypeError),
        ):
            self.listener = socket.create_server((host, int(port)))
        self.address = f"http://{host}:{self.listener.getsockname()[1]}/"
        self.worker = Worker(session)
        config = uvicorn.Config(
            guarded(make_app(self.worker), host),
            limit_concurrency=256,  # requests on further connections are answered with status 503
            log_level="critical",
            access_log=False,
            server_header=False,
            headers=[
                ("x-content-type-options", "nosniff"),
                ("x-frame-options", "DENY"),
                ("cache-control", "no-store"),
            ],
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=3,
        )
        super().__init__(config)

    def serve_until_stopped(self) -> None:
        """Print the address and serve until stopped. Raises KeyboardInterrupt on Ctrl-C, when
        everything is closed.

        On a machine of two cores OpenMP keeps its threads awake between products for the main
        thread only: in another a step takes 1.6 times as long, so the network has the other one.
        """
        print(self.address, flush=True)
        say("Ctrl-C ends it")
        network = threading.Thread(target=self.run, args=([self.listener],), name="network")
        with self.capture_signals():
            network.start()
            try:
                self.worker.work(lambda: self.should_exit or not network.is_alive())
            finally:
                self.should_exit = True
                network.join()
