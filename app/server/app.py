"""Server: guard of requests and their bodies, routes, responses, start and end."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import uvicorn
from pydantic import ValidationError
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.command_line import say
from app.files import explaining
from app.request import Request
from app.server.requests import (
    ChatBody,
    CompletionBody,
    LiveBody,
    RequestReader,
    TextBody,
    refusal,
)
from app.server.worker import (
    LOOK,
    Answer,
    Job,
    Worker,
    completion,
    context_length,
    live,
    live_page,
)
from app.session import Session
from model import InputError

MAX_BODY = 1 << 20  # bytes
BODY_SECONDS = 30  # in which a body must arrive
MAX_CONNECTIONS = 256  # open at once; requests on further ones are answered with status 503


def guarded(app: ASGIApp, host_name: str) -> ASGIApp:
    """The app, for requests to the names of this server, from its page or from no page.

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


def error_response(request: HTTPRequest | None, error: Exception) -> JSONResponse:
    """Response to an error that is raised before any other response begins."""
    status, content = refusal(error)
    return JSONResponse(content, status)


async def read_body(request: HTTPRequest) -> bytes:
    """The body of a request; the part that has come where the client disconnects.

    Raises HTTPException for one that is too long or too slow, and for two statements of its length,
    by which proxies are deceived.
    """
    if {"content-length", "transfer-encoding"}.issubset(request.headers):
        raise HTTPException(400, "give Content-Length or Transfer-Encoding, not both")
    try:
        return await asyncio.wait_for(collect(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, "the body did not arrive in time: send it again") from None


async def collect(request: HTTPRequest) -> bytes:
    """The bytes of a body, counted as they come. Raises HTTPException for too many."""
    body = bytearray()
    with suppress(ClientDisconnect):
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"a body may have up to {MAX_BODY} bytes")
    return bytes(body)


async def respond(request: HTTPRequest, job: Job) -> Response:
    """The response to a job, once there is a message. Raises HTTPException for a client that has
    disconnected.
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
    if not job.request.body.stream:
        return JSONResponse(message)
    # In the grace period a stopping server ends its streams with an error.
    return EventSourceResponse(
        events(job, message), sep="\n", send_timeout=30, shutdown_grace_period=30
    )


async def events(job: Job, message: Any) -> AsyncIterator[str]:
    """The data of a stream's events: the first ``message`` of a job, then all others."""
    try:
        while message is not None:
            shown = refusal(message)[1] if isinstance(message, Exception) else message
            yield shown if isinstance(shown, str) else json.dumps(shown)
            message = await job.messages.get()
    finally:
        job.is_abandoned = True


def make_app(worker: Worker, reader: RequestReader) -> Starlette:
    """The routes."""
    page = live_page(reader)
    model = {"id": reader.command_line.name, "object": "model", "created": 0, "owned_by": "local"}

    def texts(path: str, kind: type[TextBody], answer: Answer) -> Route:
        """The route of one kind of request for texts."""

        async def write(request: HTTPRequest) -> Response:
            body = await read_body(request)
            # In another thread, since a grammar may take long to read.
            parsed = await asyncio.to_thread(reader.read, kind, body)
            job = Job(parsed, answer, worker.session)
            worker.enqueue(job)
            return await respond(request, job)

        return Route(path, write, methods=["POST"])

    def show_model(request: HTTPRequest) -> Response:
        reader.check_model(request.path_params["name"])
        return JSONResponse(model)

    return Starlette(
        routes=[
            Route("/", lambda request: HTMLResponse(page)),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
            Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [model]})),
            Route("/v1/models/{name:path}", show_model),
            texts("/v1/chat/completions", ChatBody, completion),
            texts("/v1/completions", CompletionBody, completion),
            texts("/live", LiveBody, live),
        ],
        exception_handlers=dict.fromkeys(
            (InputError, ValidationError, HTTPException, Exception), error_response
        ),
    )


class Server(uvicorn.Server):
    """Server of one model at ``--serve [HOST:]PORT``; port 0 is any free one."""

    def __init__(self, command_line: Request) -> None:
        """Listen, then load the model. Raises InputError where either is not possible, or the model
        does not fit.
        """
        asked = command_line.options
        host, _, port = asked.serve.rpartition(":")
        host = host or "127.0.0.1"
        with explaining(
            f"--serve {asked.serve:.80}: give [HOST:]PORT, such as 127.0.0.1:8000, and a free one",
            (OSError, ValueError, OverflowError, TypeError),
        ):
            self.listener = socket.create_server((host, int(port)))
        self.address = f"http://{host}:{self.listener.getsockname()[1]}/"
        slots = asked.together if command_line.device.type == "cpu" else 1
        # the session and the reader take it from the request
        asked.context = context_length(command_line, slots)
        self.worker = Worker(Session(command_line), slots)
        reader = RequestReader(command_line, self.worker.bits)
        config = uvicorn.Config(
            guarded(make_app(self.worker, reader), host),
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

        Texts are written in the calling thread, connections are served in another. On a machine of
        two cores OpenMP keeps its threads awake between products for the main thread only: in
        another a step takes 1.6 times as long.
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
