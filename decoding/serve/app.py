"""Server: address, routes with the guard before them, start and end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from decoding.run.chooser import Setting
from decoding.run.options import Request, TextOptions
from decoding.serve.completions import write_completion
from decoding.serve.live import live_page, write_live
from decoding.serve.requests import MAX_GAMMA, Chat, Completion, LiveText, Refusal, RequestReader
from decoding.serve.worker import Job, Worker
from model import InputError, LayerPlan
from model.fast import accelerate
from model.plan import LOW_BITS
from weights.cli.command_line import say
from weights.cli.files import one_line
from weights.load import load_model, model_folder, read_config
from weights.memory import Memory, check_fits, estimate, free_bytes
from weights.tokenizer import Tokenizer

MAX_BODY = 1 << 20  # bytes
MAX_REQUESTS = 128  # open at once, those that wait in the queue included
SHORTEST_CONTEXT = 1024  # positions: below this a smaller cache would not help
HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
    ("content-security-policy", "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
]


class Guard:
    """Middleware that admits requests to the names of this server, from its page or from no page.

    A page of another site may send requests here through the user's browser. The browser then names that site as their
    origin; and if that page's name resolves to this machine (DNS rebinding), the Host is that name. An address in
    numbers cannot be resolved to another.
    """

    def __init__(self, app: ASGIApp, host_name: str) -> None:
        self.app, self.names = app, ("localhost", host_name.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond (ASGI)."""
        refusal = self.refusal(Headers(scope=scope), scope["path"])
        await (error_response(refusal) if refusal else self.app)(scope, receive, send)

    def refusal(self, headers: Headers, path: str) -> Refusal | None:
        """The refusal of a request; None where it is admitted."""
        hosts, origin = headers.getlist("host"), headers.get("origin")
        if len(hosts) != 1 or not self.is_name(hosts[0]):
            return Refusal("the Host is none of this server's names: use its address", status=403, code="host")
        is_foreign = origin is not None and origin.partition("://")[2].lower() != hosts[0].lower()
        if is_foreign or (path != "/" and headers.get("sec-fetch-site", "none") not in ("none", "same-origin")):
            return Refusal("pages of other sites may not use this server", status=403, code="origin")
        return None

    def is_name(self, host: str) -> bool:
        """Whether a Host names this server: localhost, an address in numbers, or the name on the command line."""
        try:
            name = urlsplit(f"//{host}").hostname
            return name in self.names or bool(ip_address(name))
        except ValueError:
            return False


def error_response(error: InputError) -> JSONResponse:
    """An error in OpenAI's JSON."""
    refusal = Refusal.of(error)
    retry = {"retry-after": "1"} if refusal.status in (429, 503) else None
    return JSONResponse(refusal.data(), refusal.status, retry)


async def respond_to_error(request: HTTPRequest, error: Exception) -> Response:
    """Response to an error that is raised before the response begins."""
    if isinstance(error, HTTPException):  # no such path or method
        error = Refusal(error.detail, status=error.status_code)
    if not isinstance(error, InputError):
        say(f"a request could not be answered: {type(error).__name__}: {one_line(error)}")
        error = Refusal("the request could not be answered", status=500)
    return error_response(error)


async def read_body(request: HTTPRequest) -> bytes:
    """The body of a request. Raises Refusal where it is not JSON, too large or broken off."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("send JSON, with the header Content-Type: application/json", status=415)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise Refusal(f"the body has more than {MAX_BODY} bytes", status=413)
    except ClientDisconnect:
        raise Refusal("the body is not complete") from None
    return bytes(body)


def make_app(worker: Worker, reader: RequestReader, host_name: str) -> Starlette:
    """The routes, behind the guard."""
    page, model = live_page(reader), {"id": reader.name, "object": "model", "created": 0, "owned_by": "local"}

    def texts(path: str, kind: type[Completion | Chat], write: Callable[..., None]) -> Route:
        """The route of one kind of request for texts."""

        async def respond(request: HTTPRequest) -> Job:
            # In another thread, because a long prompt takes long to encode.
            job = Job(await asyncio.to_thread(reader.read, kind, await read_body(request)), write)
            worker.submit(job)
            return job

        return Route(path, respond, methods=["POST"])

    async def show_model(request: HTTPRequest) -> Response:
        reader.check_model(request.path_params["name"])
        return JSONResponse(model)

    return Starlette(
        routes=[
            Route("/", lambda request: HTMLResponse(page)),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
            Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [model]})),
            Route("/v1/models/{name:path}", show_model),
            texts("/v1/chat/completions", Chat, write_completion),
            texts("/v1/completions", Completion, write_completion),
            texts("/live", LiveText, write_live),
        ],
        middleware=[Middleware(Guard, host_name=host_name)],
        exception_handlers=dict.fromkeys((InputError, HTTPException, Exception), respond_to_error),
    )


class Server(uvicorn.Server):
    """Server of one model on a socket. When it stops, texts end first, then connections."""

    def __init__(self, command_line: Request, listener: socket.socket, host_name: str) -> None:
        """Load the model. Raises InputError where it cannot be loaded, or does not fit."""
        folder, capacity = command_line.folder, context_length(command_line)
        tokenizer, options = Tokenizer(folder), TextOptions.of(command_line.options)
        model = accelerate(load_model(folder, command_line.dtype, command_line.device))
        setting = Setting(folder, model, tokenizer, options.params, capacity, options.coupling.name)
        self.worker, self.listener = Worker(setting, options.draft), listener
        config = uvicorn.Config(
            make_app(self.worker, RequestReader(command_line, tokenizer, capacity, self.worker.bits), host_name),
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            headers=HEADERS,
            limit_concurrency=MAX_REQUESTS,
            timeout_graceful_shutdown=3,
        )
        super().__init__(config)

    def serve_until_stopped(self) -> None:
        """Serve until stopped. Raises KeyboardInterrupt on Ctrl-C, when everything is closed.

        Texts are written in the calling thread, connections are served in another. On a machine of two cores OpenMP
        keeps its threads awake between products for the main thread only: in another a step takes 1.6 times as long.
        """
        network = threading.Thread(target=self._serve_connections, name="network")
        with self.capture_signals():
            network.start()
            try:
                self.worker.work()
            finally:
                self.should_exit = True
                network.join()

    def _serve_connections(self) -> None:
        try:
            self.run(sockets=[self.listener])
        finally:
            self.worker.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.stop()
        await super().shutdown(sockets)


def context_length(command_line: Request) -> int:
    """Positions of the cache: the model's context, halved until it fits into the free memory.

    The estimate includes low-bit copies of all weights in the widest width: requests get one width only.
    """
    config, device, draft_model = command_line.config, command_line.device, command_line.options.draft_model
    draft = read_config(model_folder(draft_model)) if draft_model else None
    positions = min(each.max_positions for each in (config, draft) if each)
    if positions < 2:
        raise InputError(f"the model's context of {positions} tokens is too short for a text")

    def needed() -> Memory:
        low_bits = LayerPlan.full(config.num_layers).in_bits(max(LOW_BITS))
        more = {"draft": draft, "fast_on": device, "longest_draft": MAX_GAMMA, "plan": low_bits}
        return estimate(config, command_line.dtype, positions, prompt=positions - 1, **more)

    while positions > SHORTEST_CONTEXT and needed().total > free_bytes(device):
        positions //= 2
    check_fits(needed(), device)
    if positions < config.max_positions:
        say(f"context: {positions} of the model's {config.max_positions} tokens")
    return positions


def bind(address: str) -> tuple[socket.socket, str]:
    """A listening socket at ``[HOST:]PORT`` and the host, by default 127.0.0.1. Port 0 is any free port.

    Raises InputError where the address is wrong or in use.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family), host
    except (OSError, ValueError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise InputError(f"--serve {address:.80}: {why}: give [HOST:]PORT, such as 127.0.0.1:8000") from None


def run(address: str, command_line: Request) -> None:
    """Load the model, print the address and serve until Ctrl-C (KeyboardInterrupt)."""
    listener, host = bind(address)  # before the model is loaded
    with listener:
        server = Server(command_line, listener, host)
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{listener.getsockname()[1]}/", flush=True)
        say("Ctrl-C ends it")
        server.serve_until_stopped()
