"""Server: OpenAI's endpoints for texts and chats, and a live page, over one session.

The network has a thread of its own; texts are written in the calling thread, several in shared
steps. A message to a client is a JSON value, an error, or None as the last one. Knows nothing of
how texts are drafted: a request's fields become options.
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
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from greenlet import GreenletExit, greenlet
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.characters import TextStream
from app.command_line import say
from app.files import explaining, one_line
from app.options import KINDS, Options
from app.output import as_json
from app.session import Sample, Session, Slot
from decoding.rounds import common_prefix
from decoding.together import Together
from model.errors import InputError
from weights.memory import check_fits, free_bytes

PAGE = Path(__file__).with_name("live.html")
TEXTS = 4  # written at once
MAX_WAITING = 16  # requests in the queue, besides those that are written
LOOK = 0.2  # seconds between two looks at whether a client is still there
MAX_BODY = 1 << 20  # bytes
BODY_SECONDS = 30  # in which a body must arrive
MAX_CONNECTIONS = 256  # open at once; requests on further ones are answered with status 503
SHORTEST_CONTEXT = 1024  # positions: below this a smaller cache would not help
MASK_SECONDS = 1.0  # longest that the masks of a text may take in all
MAX_GAMMA = 32
# Longest sources in characters. Thousands of Lark rules that each name the next overflow the stack
# of llguidance, which ends the process. Stop strings are searched for after each token.
LONGEST = {"json": 1 << 16, "regex": 1 << 16, "grammar": 1 << 13, "stop": 1 << 13, "ban": 1 << 13}
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


class Body(BaseModel):
    """JSON object whose unknown fields are refused, unless they have no effect: clients send back
    the answers that they received with ``"refusal": null``.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def without_neutral_fields(cls, body: Any) -> Any:
        """Return the body without unknown fields that have no effect."""
        if not isinstance(body, dict):
            return body
        known = cls.model_fields.keys()
        return {
            name: value
            for name, value in body.items()
            if name in known or not (name in UNUSED or is_neutral(name, value))
        }


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a value of an unknown field is null, false, empty, or its default."""
    is_default = value is not True and NEUTRAL.get(name) == value
    return value is False or value in (None, "", [], {}) or is_default


class TextPart(Body):
    """Part of a message: text, the only kind that a model here reads."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a chat. A ``content`` that is a string becomes a list of one part, and the role
    "developer" becomes "system". The ``name`` of a participant is not told to the model.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[
        list[TextPart],
        BeforeValidator(
            lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value
        ),
        Field(min_length=1),
    ]
    name: str | None = None


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``. ``choice``: strings of which the text is one."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the command line's option of the kind that is given. Raises InputError."""
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise InputError("structured_outputs: give one of json, regex, choice and grammar")
        if self.choice:
            given = {"regex": "|".join(map(re.escape, self.choice))}
        for name, source in given.items():
            check_length(name.removesuffix("_schema"), str(source))
        if isinstance(self.json_schema, str):  # of the command line it could be a file's name
            with explaining("structured_outputs.json is no JSON", (ValueError, RecursionError)):
                given["json_schema"] = json.loads(self.json_schema)
        if self.grammar and "start:" not in self.grammar:
            raise InputError("structured_outputs.grammar: a Lark grammar begins with start:")
        return given


def check_length(name: str, source: str) -> None:
    """Raises InputError for a source that is too long."""
    if len(source) > LONGEST[name]:
        raise InputError(f"{name} must have at most {LONGEST[name]} characters", name)


def structured(response_format: Any) -> Any:
    """Return OpenAI's ``response_format`` as vLLM's ``structured_outputs``."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise PydanticCustomError(
        "response_format", "give the type text, json_object, or json_schema with a schema"
    )


# Options of the command line that a request may give: those without files and folders.
REQUESTABLE = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "coupling"),
    *("stop", "ban", "draft", "exit_layer", "gamma", "adaptive", "min_target_confidence"),
)


class TextBody(create_model("Options", __base__=Body, **dict.fromkeys(REQUESTABLE, (Any, None)))):
    """Fields of every request: those of OpenAI's API, and options of the command line, which
    ``Options`` checks.
    """

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1, strict=True)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, strict=True)] = None
    response_format: Annotated[StructuredOutputs | None, BeforeValidator(structured)] = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None

    def options(self, known: Options) -> Options:
        """Return the command line's options, with those of the request in their place; those of
        drafting hold for the command line's kind of draft only. Raises InputError.
        """
        given = self.model_dump(include={*REQUESTABLE}, exclude_none=True)
        for name in {"stop", "ban"} & given.keys():
            texts = [given[name]] if isinstance(given[name], str) else given[name]
            check_length(name, "".join(map(str, texts)) if isinstance(texts, list) else "")
            given[name] = texts
        kind = given.get("draft", known.draft)
        if kind != known.draft and kind not in KINDS.keys() - {"model"}:
            raise InputError(
                f"draft must be one of {', '.join(KINDS)}, found {kind!r:.80}", "draft"
            )
        if isinstance(self.gamma, int) and self.gamma > MAX_GAMMA:
            raise InputError(f"gamma must be at most {MAX_GAMMA}, found {self.gamma}", "gamma")
        for form in filter(None, (self.response_format, self.structured_outputs)):
            given |= form.options()
        given["max_new_tokens"] = (
            self.max_completion_tokens or self.max_tokens or known.max_new_tokens
        )
        return known.merged(given)


class CompletionBody(TextBody):
    """JSON of ``/v1/completions``: the prompt is plain text."""

    prompt: str = Field(min_length=1)

    def encode(self, session: Session, options: Options) -> list[int]:
        return session.encode(self.prompt, replace(options, chat=False, system=None))


class LiveBody(CompletionBody):
    """JSON of the live page, whose prompt is encoded as on the command line. ``beside``: write the
    text plainly as well.
    """

    stream: Literal[True] = True
    beside: bool = False

    def encode(self, session: Session, options: Options) -> list[int]:
        return session.encode(self.prompt, options)


class ChatBody(TextBody):
    """JSON of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)

    def encode(self, session: Session, options: Options) -> list[int]:
        if session.tokenizer.chat_template is None:
            raise InputError("this model has no chat template: use /v1/completions")
        messages = [
            {"role": each.role, "content": "".join(part.text for part in each.content)}
            for each in self.messages
        ]
        return session.encode_messages(messages, options)


def refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status of an error, and its JSON as in OpenAI's API, where ``param`` is the field
    at fault.

    Option ``--exit-layer`` is field ``exit_layer``. A failure such as exhausted memory is printed;
    the client is told no details.
    """
    status = 400
    param = None
    match error:
        case ValidationError():
            first = error.errors(include_url=False)[0]
            # a client's names may hold line breaks
            place = " ".join(".".join(map(str, first["loc"])).split())[:80] or "the body"
            is_unknown = first["type"] == "extra_forbidden"
            told = "it is not supported: leave it out" if is_unknown else first["msg"]
            message = f"{place}: {told}"
            param = f"{first['loc'][0]:.80}" if first["loc"] else None
        case HTTPException():
            status = error.status_code
            message = error.detail
        case InputError() if not error.__cause__:  # of code of the server's user, it is no client's
            status = 404 if error.field == "model" else 400
            message = re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
            param = error.field
        case _:
            say(f"a request could not be answered: {type(error).__name__}: {one_line(error)}")
            status = 500
            message = "the request could not be answered"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": None}}


@dataclass
class Job:
    """A request in the queue: its texts, which are written one after the other, and the messages
    to its client. Unread messages wait in memory: a text is bounded, so are they.
    """

    body: CompletionBody | ChatBody
    samples: list[Sample]
    loop: asyncio.AbstractEventLoop
    messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    is_abandoned: bool = False  # by its client, who has disconnected

    def send(self, message: Any) -> None:
        """Send a message, from any thread."""
        with suppress(RuntimeError):  # the event loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self.messages.put_nowait, message)


class Worker:
    """Worker that writes the texts of all jobs, up to ``TEXTS`` at a time, in order of arrival."""

    def __init__(self, session: Session) -> None:
        """Raises InputError where the command line's draft is not possible."""
        self.session = session
        slots = TEXTS if session.model.abilities.shares_steps else 1
        positions = context_length(session, slots)
        session.options = replace(session.options, context=positions)
        self.free = [session.new_slot(positions) for _ in range(slots)]
        self.places = slots + MAX_WAITING
        self.together = Together(session.model)
        self.waiting: list[Job] = []
        self.running: dict[greenlet, Job] = {}
        self.arrived = threading.Event()
        few = session.options.merged({"max_new_tokens": 8})
        # A few tokens, so that no client waits for low-bit copies or a compiler.
        for _ in session.rounds(session.begin([0, 0], few), self.free[0]):
            pass

    @property
    def jobs(self) -> list[Job]:
        """Jobs that wait or are written."""
        return [*self.waiting, *self.running.values()]

    def enqueue(self, job: Job) -> None:
        """Queue a job, in the event loop's thread. Raises HTTPException where it is full."""
        if len([other for other in self.jobs if not other.is_abandoned]) >= self.places:
            raise HTTPException(429, f"{MAX_WAITING} requests wait already: try again")
        self.waiting.append(job)
        self.arrived.set()

    def work(self, stopped: Callable[[], bool]) -> None:
        """Write the texts of all jobs until ``stopped``, which ends them with an error."""
        while not stopped():
            self.arrived.wait(LOOK)
            self.arrived.clear()
            while self.jobs and not stopped():
                self._admit()
                self.together.step()
        for job in self.jobs:
            job.send(HTTPException(503, "the server is stopping"))
            job.send(None)
        for loop in [*self.running]:
            self.together.stop(loop)

    def _admit(self) -> None:
        """End the texts of clients that have left, and begin those of waiting ones."""
        for loop in [loop for loop, job in self.running.items() if job.is_abandoned]:
            self.together.stop(loop)
        self.waiting = [job for job in self.waiting if not job.is_abandoned]
        while self.free and self.waiting:
            job = self.waiting.pop(0)
            prompt = job.samples[0].source.tokens
            # A conversation goes on where its cache is.
            slot = max(self.free, key=lambda slot: common_prefix(slot.tokens, prompt))
            self.free.remove(slot)
            self.together.start(lambda job=job, slot=slot: self._write(job, slot))

    def _write(self, job: Job, slot: Slot) -> None:
        """Write the texts of a job, in its greenlet. An error ends it alone."""
        self.running[greenlet.getcurrent()] = job
        answer = live if isinstance(job.body, LiveBody) else completion
        try:
            for message in answer(self, job, slot):
                job.send(message)
        except GreenletExit:
            raise
        except Exception as error:
            slot.tokens = []  # the cache may hold anything
            job.send(error)
        finally:
            job.send(None)
            self.free.append(slot)
            del self.running[greenlet.getcurrent()]


def context_length(session: Session, slots: int) -> int:
    """Return the positions of each text's cache: the context, halved until ``slots`` caches fit."""
    positions = session.capacity()
    free = free_bytes(session.device)

    def needed(positions: int) -> Any:
        return session.memory(positions, positions // 2, texts=slots, longest_draft=MAX_GAMMA)

    while positions > SHORTEST_CONTEXT and needed(positions).total > free:
        positions //= 2
    check_fits(needed(positions), session.device)
    if positions < session.config.max_positions:
        say(
            f"context: {positions} of the model's {session.config.max_positions} tokens, for each"
            f" of {slots} texts at once"
        )
    return positions


def completion(worker: Worker, job: Job, slot: Slot) -> Iterator[Any]:
    """Messages of OpenAI's endpoints, with statistics of the rounds: the whole text in one or, of a
    stream, the text that a terminal would show, after each round.
    """
    body = job.body
    [sample] = job.samples
    is_chat = isinstance(body, ChatBody)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {
        "id": secrets.token_hex(12),
        "object": f"{kind}.chunk" if is_chat and body.stream else kind,
        "created": int(time.time()),
        "model": worker.session.name,
    }

    def answer(said: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        shown: dict[str, Any] = {"text": said.get("content", "")}
        if is_chat:
            shown = {"delta" if body.stream else "message": said}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [choice]}

    if body.stream and is_chat:
        yield answer({"role": "assistant", "content": ""})
    sample.continues = is_chat
    stream = TextStream(sample.source)
    for _ in worker.session.rounds(sample, slot, worker.together):
        if body.stream and (piece := stream.pull()):
            yield answer({"content": piece})
    finish = "length" if sample.finish == "length" else "stop"
    usage = {
        "prompt_tokens": sample.source.prompt_length,
        "completion_tokens": len(sample.tokens),
        "total_tokens": len(sample.source),
    }
    if not body.stream:
        said = {"role": "assistant", "content": sample.text}
        yield answer(said, finish, speculation=as_json(sample)) | {"usage": usage}
        return
    yield answer({}, finish, speculation=as_json(sample))
    if (body.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": usage}
    yield "[DONE]"


def live(worker: Worker, job: Job, slot: Slot) -> Iterator[Any]:
    """Messages of the live page: a column with the text and, if asked, one with its plain text."""
    labels = worker.session.labels
    for column, sample in enumerate(job.samples):
        yield {"kind": "begin", "column": column, "greedy": not sample.options.temperature}
        for round in worker.session.rounds(sample, slot, worker.together):
            tokens = [
                {"id": token, "text": labels(token), "verdict": verdict}
                for token, verdict in round.verdicts()
            ]
            yield {
                "kind": "round",
                "column": column,
                "tokens": tokens,
                "retracted": len(round.retracted),
                "finish": round.finish,
                "draft": sample.draft,
                **as_json(sample),
            }


def guarded(app: ASGIApp, host_name: str) -> ASGIApp:
    """Return the app, for requests to the names of this server, from its page or from no page.

    A page of another site may send requests here through the user's browser. The browser then names
    that site as their origin; and if that page's name resolves to this machine (DNS rebinding), the
    Host is that name. An address in numbers cannot be resolved to another.
    """
    names = re.compile(rf"(localhost|{re.escape(host_name)}|[\d.]+)(:\d+)?", re.IGNORECASE)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        is_own_page = headers.get("origin", f"//{host}").endswith(f"//{host}")
        if names.fullmatch(host) and is_own_page:
            await app(scope, receive, send)
        else:
            refused = HTTPException(
                403, "pages of other sites may not use this server: use its address"
            )
            await error_response(None, refused)(scope, receive, send)

    return guard


def error_response(request: Request | None, error: Exception) -> JSONResponse:
    """Return the response to an error that is raised before any other response begins."""
    status, content = refusal(error)
    return JSONResponse(content, status)


async def read_body(request: Request) -> bytes:
    """Return the body of a request; the part that has come where the client disconnects.

    Raises HTTPException for one that is too long or too slow, and for two statements of its length,
    by which proxies are deceived.
    """
    if {"content-length", "transfer-encoding"}.issubset(request.headers):
        raise HTTPException(400, "give Content-Length or Transfer-Encoding, not both")
    try:
        return await asyncio.wait_for(collect(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, "the body did not arrive in time: send it again") from None


async def collect(request: Request) -> bytes:
    """Return the bytes of a body, counted as they come. Raises HTTPException for too many."""
    body = bytearray()
    with suppress(ClientDisconnect):
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"a body may have up to {MAX_BODY} bytes")
    return bytes(body)


def read_job(worker: Worker, kind: type[CompletionBody | ChatBody], data: bytes, loop: Any) -> Job:
    """Return the job of a request. Raises the errors that ``refusal`` takes."""
    session = worker.session
    body = kind.model_validate_json(data)
    check_model(session, body.model or session.name)
    options = body.options(session.options)
    options = replace(options, seed=options.rule.seed)
    ids = body.encode(session, options)
    beside = [options.merged({"draft": "none"})] if getattr(body, "beside", False) else []
    return Job(body, [session.begin(ids, each) for each in (options, *beside)], loop)


def check_model(session: Session, name: str) -> None:
    """Raises InputError for a model that is not served."""
    if name != session.name:
        raise InputError(
            f"model {name!r:.80} does not exist here: there is {session.name}", "model"
        )


async def respond(request: Request, job: Job) -> Response:
    """Return the response to a job, once there is a message. Raises HTTPException for a client that
    has disconnected.
    """
    message = None
    while message is None:
        if await request.is_disconnected():
            job.is_abandoned = True
            raise HTTPException(400, "the client has disconnected")
        with suppress(asyncio.TimeoutError):
            message = await asyncio.wait_for(job.messages.get(), LOOK)
    if isinstance(message, Exception):
        return error_response(request, message)
    if not job.body.stream:
        return JSONResponse(message)
    # In the grace period a stopping server ends its streams with an error.
    return EventSourceResponse(
        events(job, message), sep="\n", send_timeout=30, shutdown_grace_period=30
    )


async def events(job: Job, message: Any) -> AsyncIterator[str]:
    """Data of a stream's events: the first ``message`` of a job, then all others."""
    try:
        while message is not None:
            shown = refusal(message)[1] if isinstance(message, Exception) else message
            yield shown if isinstance(shown, str) else json.dumps(shown)
            message = await job.messages.get()
    finally:
        job.is_abandoned = True


def live_page(session: Session) -> str:
    """Return the page. The model's facts are data in it, in which no character ends the script."""
    options = session.options
    facts = {
        "model": session.name,
        "drafts": [kind for kind in KINDS if kind != "model" or options.draft == "model"],
        "draft": options.draft,
        "temperature": options.temperature,
        "max_tokens": options.max_new_tokens,
    }
    nonce = secrets.token_hex(16)
    page = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
    return page.replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c"))


def make_app(worker: Worker) -> Starlette:
    """Return the routes."""
    session = worker.session
    page = live_page(session)
    model = {"id": session.name, "object": "model", "created": 0, "owned_by": "local"}

    def texts(path: str, kind: type[CompletionBody | ChatBody]) -> Route:
        """Return the route of one kind of request for texts."""

        async def write(request: Request) -> Response:
            body = await read_body(request)
            loop = asyncio.get_running_loop()
            # In another thread, since a grammar may take long to read.
            job = await asyncio.to_thread(read_job, worker, kind, body, loop)
            worker.enqueue(job)
            return await respond(request, job)

        return Route(path, write, methods=["POST"])

    def show_model(request: Request) -> Response:
        check_model(session, request.path_params["name"])
        return JSONResponse(model)

    return Starlette(
        routes=[
            Route("/", lambda request: HTMLResponse(page)),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
            Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [model]})),
            Route("/v1/models/{name:path}", show_model),
            texts("/v1/chat/completions", ChatBody),
            texts("/v1/completions", CompletionBody),
            texts("/live", LiveBody),
        ],
        exception_handlers=dict.fromkeys(
            (InputError, ValidationError, HTTPException, Exception), error_response
        ),
    )


class Server(uvicorn.Server):
    """Server of one model at ``--serve [HOST:]PORT``; port 0 is any free one."""

    def __init__(self, session: Session) -> None:
        """Listen, then load the model. Raises InputError where either is not possible, or the model
        does not fit.
        """
        asked = session.options.serve
        host, _, port = asked.rpartition(":")
        host = host or "127.0.0.1"
        with explaining(
            f"--serve {asked:.80}: give [HOST:]PORT, such as 127.0.0.1:8000, and a free one",
            (OSError, ValueError, OverflowError, TypeError),
        ):
            self.listener = socket.create_server((host, int(port)))
        self.address = f"http://{host}:{self.listener.getsockname()[1]}/"
        session.mask_seconds = MASK_SECONDS
        self.worker = Worker(session)
        config = uvicorn.Config(
            guarded(make_app(self.worker), host),
            limit_concurrency=MAX_CONNECTIONS,
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


def serve(session: Session) -> None:
    """Serve a session until Ctrl-C."""
    Server(session).serve_until_stopped()
