"""The server: its routes, who may use them, and its life from the first check to Ctrl-C."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import Callable

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from decoding.serve.answers import Answer, CompletionForm, Form, LiveForm, error_response
from decoding.serve.live import live_page
from decoding.serve.orders import LONGEST_GAMMA, Defaults, Fields, Order, Orders, Refusal, parse_body
from decoding.serve.worker import Worker
from model import InputError, LayerPlan
from model.fast import accelerate
from weights.cli.command_line import say
from weights.cli.files import one_line
from weights.load import load_model, read_config
from weights.memory import Memory, check_fits, estimate, free_bytes
from weights.names import model_folder
from weights.tokenizer import Tokenizer

LARGEST_BODY = 1 << 20  # bytes
BODY_PATIENCE = 30.0  # seconds in which a request's body must have come
MOST_CONNECTIONS = 128
SHORTEST_CONTEXT = 1024  # positions: below this a smaller cache would not help
HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
    ("content-security-policy", "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
]


class Guard:
    """Lets in who came by one of the server's own names, and from no page but its own.

    A page of another site may send requests here through the reader's browser. The browser then says where they come
    from; and if the page has its own name resolve to this machine (DNS rebinding), the Host is that name. An address
    in numbers cannot be resolved to another.
    """

    def __init__(self, app: ASGIApp, own_name: str) -> None:
        self.app, self.own_name = app, own_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(Headers(scope=scope), scope["path"]) if scope["type"] == "http" else None
        await (self.app if refusal is None else error_response(refusal))(scope, receive, send)

    def refusal(self, headers: Headers, path: str) -> Refusal | None:
        """Why a request is not let in; None where it is."""
        hosts, origin = headers.getlist("host"), headers.get("origin")
        if len(hosts) != 1 or not self.is_own(hosts[0]):
            return Refusal("the Host is none of this server's names: use its address", status=403, code="host")
        if origin is not None and origin.partition("://")[2].lower() != hosts[0].lower():
            return Refusal("pages of other sites may not use this server", status=403, code="origin")
        if path != "/" and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Refusal("pages of other sites may not use this server", status=403, code="origin")
        return None

    def is_own(self, host: str) -> bool:
        """Whether a Host names this server: localhost, an address in numbers, or what it was started with."""
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", host)
        name = match[1].strip("[]").lower() if match else ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in ("localhost", self.own_name.lower())
        return True


async def read_body(request: Request) -> Fields:
    """The JSON object of a request. Raises Refusal where it is too large, too slow or none."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("send JSON, with the header Content-Type: application/json", status=415)
    body = bytearray()
    try:
        with anyio.fail_after(BODY_PATIENCE):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_BODY:
                    raise Refusal(f"the body has more than {LARGEST_BODY} bytes", status=413)
    except TimeoutError:
        raise Refusal("the body did not come in time", status=408) from None
    except ClientDisconnect:
        raise Refusal("the body broke off") from None
    return parse_body(bytes(body))


def make_app(worker: Worker, orders: Orders, own_name: str) -> Starlette:
    """The routes, behind the guard."""
    defaults, page = orders.defaults, live_page(orders.defaults)

    def route(path: str, take: Callable[[Fields], Order], form: Callable[[Order], Form]) -> Route:
        async def answer(request: Request) -> Answer:
            order = await asyncio.to_thread(take, await read_body(request))  # a long prompt takes a while to encode
            return Answer(worker, order, form(order))

        return Route(path, answer, methods=["POST"])

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page)

    async def list_models(request: Request) -> Response:
        model = {"id": defaults.name, "object": "model", "created": 0, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    async def no_icon(request: Request) -> Response:
        return Response(status_code=204)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # no such page, or not by this method
            error = Refusal(error.detail, status=error.status_code)
        if not isinstance(error, InputError):
            say(f"a request could not be answered: {type(error).__name__}: {one_line(error)}")
            error = Refusal("the request could not be answered", status=500)
        return error_response(error)

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/favicon.ico", no_icon),
            Route("/v1/models", list_models),
            route("/v1/chat/completions", orders.chat, lambda order: CompletionForm(order, defaults.name, chat=True)),
            route("/v1/completions", orders.completion, lambda order: CompletionForm(order, defaults.name, chat=False)),
            route("/live", orders.live, lambda order: LiveForm()),
        ],
        middleware=[Middleware(Guard, own_name=own_name)],
        exception_handlers={InputError: refuse, HTTPException: refuse, Exception: refuse},
    )


class Server(uvicorn.Server):
    """Serves one model on a socket until it is told to stop; then the texts end before the connections do."""

    def __init__(self, defaults: Defaults, listener: socket.socket, own_name: str) -> None:
        """Load the model. Raises InputError where it cannot be loaded, or does not fit."""
        capacity = room(defaults)
        tokenizer = Tokenizer(defaults.folder)
        model = accelerate(load_model(defaults.folder, defaults.dtype, defaults.device))
        self.worker, self.listener = Worker(model, tokenizer, defaults, capacity), listener
        app = make_app(self.worker, Orders(defaults, tokenizer, capacity), own_name)
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            headers=HEADERS,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=3,
        )
        super().__init__(config)

    def serve_until_stopped(self) -> None:
        """Serve. Raises KeyboardInterrupt on Ctrl-C, when everything is closed.

        Texts are written in the thread that calls, connections are served in another. On a machine of two cores OpenMP
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


def room(defaults: Defaults) -> int:
    """Positions of the cache: the model's context, or as much of it as there is memory for."""
    draft_model = defaults.draft.draft_model
    draft = read_config(model_folder(draft_model)) if draft_model else None
    positions = min(config.max_positions for config in (defaults.config, draft) if config)
    if positions < 2:
        raise InputError(f"the model's context of {positions} has no room for a text")

    def needed() -> Memory:
        low_bits = LayerPlan.full(defaults.config.num_layers).in_bits(8)  # a request may ask for them
        more = {"draft": draft, "fast_on": defaults.device, "longest_draft": LONGEST_GAMMA, "plan": low_bits}
        return estimate(defaults.config, defaults.dtype, positions, prompt=positions - 1, **more)

    while positions > SHORTEST_CONTEXT and needed().total > free_bytes(defaults.device):
        positions //= 2
    check_fits(needed(), defaults.device)
    if positions < defaults.config.max_positions:
        say(f"context: {positions} of the model's {defaults.config.max_positions} tokens")
    return positions


def bind(address: str) -> tuple[socket.socket, str]:
    """A socket of ``[HOST:]PORT`` (127.0.0.1 where no host is named; port 0: any that is free), and the host.

    Raises InputError where none is free.
    """
    match = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):)?([0-9]{1,5})", address)
    if not match or int(match[3]) > 65535:
        raise InputError(f"--serve takes [HOST:]PORT, such as 8000 or 127.0.0.1:8000, found {address!r:.80}")
    host, port = match[1] or match[2] or "127.0.0.1", int(match[3])
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        raise InputError(f"--serve {address}: {error.strerror}: give another address or port") from None
    return listener, host


def run(address: str, defaults: Defaults) -> None:
    """Load the model, print the address and serve until Ctrl-C (KeyboardInterrupt)."""
    listener, host = bind(address)  # before anything is loaded
    with listener:
        server = Server(defaults, listener, host)
        listener.listen()
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{listener.getsockname()[1]}/", flush=True)
        say("Ctrl-C ends it")
        server.serve_until_stopped()
