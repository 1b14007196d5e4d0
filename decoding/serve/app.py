"""Server: routes with the guard before them, memory for the texts, start and end."""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import uvicorn
from pydantic import ValidationError
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
from decoding.serve.messages import CompletionWriter, live_page, write_live
from decoding.serve.requests import MAX_GAMMA, Chat, Completion, LiveText, Refusal, RequestReader
from decoding.serve.worker import Job, Worker
from model import InputError, LayerPlan
from model.fast import accelerate
from model.plan import LOW_BITS
from weights.cli.command_line import say
from weights.load import load_model
from weights.memory import check_fits, estimate, free_bytes
from weights.tokenizer import Tokenizer

MAX_BODY = 1 << 20  # bytes
MAX_REQUESTS = 128  # open at once, those that wait in the queue included
SHORTEST_CONTEXT = 1024  # positions: below this a smaller cache would not help
HEADERS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY", "cache-control": "no-store"}


class Guard:
    """Middleware that admits requests to the names of this server, from its page or from no page.

    A page of another site may send requests here through the user's browser. The browser then names that site as their
    origin; and if that page's name resolves to this machine (DNS rebinding), the Host is that name. An address in
    numbers cannot be resolved to another.
    """

    def __init__(self, app: ASGIApp, host_name: str) -> None:
        names = rf"(localhost|{re.escape(host_name or 'localhost')}|[\d.]+|\[[\da-f:.]+\])(:\d+)?"
        self.app, self.names, self.open = app, re.compile(names, re.IGNORECASE), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond (ASGI)."""
        refusal = self.refusal(Headers(scope=scope), scope["path"])
        self.open += 1
        try:
            await (error_response(None, refusal) if refusal else self.app)(scope, receive, send)
        finally:
            self.open -= 1

    def refusal(self, headers: Headers, path: str) -> Refusal | None:
        """The refusal of a request; None where it is admitted."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.names.fullmatch(host):
            return Refusal("the Host is none of this server's names: use its address", status=403, code="host")
        is_foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if is_foreign or (path != "/" and headers.get("sec-fetch-site", "none") not in ("none", "same-origin")):
            return Refusal("pages of other sites may not use this server", status=403, code="origin")
        if self.open >= MAX_REQUESTS:
            return Refusal(f"{MAX_REQUESTS} requests are open already: try again", status=503, code="busy")
        return None


def error_response(request: HTTPRequest | None, error: Exception) -> JSONResponse:
    """Response to an error that is raised before any other response begins."""
    refusal = Refusal.of(error)
    return JSONResponse(refusal.data(), refusal.status, {"retry-after": "1"} if refusal.status in (429, 503) else None)


def make_app(worker: Worker, reader: RequestReader, host_name: str) -> Starlette:
    """The routes, behind the guard."""
    page, model = live_page(reader), {"id": reader.name, "object": "model", "created": 0, "owned_by": "local"}

    def texts(path: str, kind: type[Completion | Chat], begin: Callable[..., object]) -> Route:
        """The route of one kind of request for texts."""

        async def respond(request: HTTPRequest) -> Response:
            body = b""
            with suppress(ClientDisconnect):  # the rest is missing: no valid JSON
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_BODY:
                        raise Refusal(f"the body has more than {MAX_BODY} bytes", status=413)
            job = Job(*reader.read(kind, body), begin)
            worker.enqueue(job)
            return await job.respond(request)

        return Route(path, respond, methods=["POST"])

    def show_model(request: HTTPRequest) -> Response:
        reader.check_model(request.path_params["name"])
        return JSONResponse(model)

    return Starlette(
        routes=[
            Route("/", lambda request: HTMLResponse(page)),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
            Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [model]})),
            Route("/v1/models/{name:path}", show_model),
            texts("/v1/chat/completions", Chat, CompletionWriter),
            texts("/v1/completions", Completion, CompletionWriter),
            texts("/live", LiveText, write_live),
        ],
        middleware=[Middleware(Guard, host_name=host_name)],
        exception_handlers=dict.fromkeys((InputError, ValidationError, HTTPException, Exception), error_response),
    )


def context_length(command_line: Request, places: int) -> int:
    """Positions of each text's cache: the model's context, halved until ``places`` caches fit into the free memory.

    The estimate includes low-bit copies of all weights in the widest width: requests get one width only.
    """
    config, device = command_line.config, command_line.device
    low_bits = LayerPlan.full(config.num_layers).in_bits(max(LOW_BITS))
    needs = command_line.needs() | {"longest_draft": MAX_GAMMA, "plan": low_bits, "fast_on": device}
    positions = min(config.max_positions, (needs["draft"] or config).max_positions)
    while True:
        one = estimate(config, **needs | {"positions": positions, "prompt": positions // 2})
        memory = replace(one, cache=places * one.cache, workspace=places * one.workspace)
        if positions <= SHORTEST_CONTEXT or memory.total <= free_bytes(device):
            break
        positions //= 2
    check_fits(memory, device)
    if positions < config.max_positions:
        say(f"context: {positions} of the model's {config.max_positions} tokens, for each of {places} texts at once")
    return positions


class Server(uvicorn.Server):
    """Server of one model on a socket."""

    def __init__(self, command_line: Request, listener: socket.socket) -> None:
        """Load the model. Raises InputError where it cannot be loaded, or does not fit."""
        folder, asked, options = command_line.folder, command_line.options, TextOptions.of(command_line.options)
        places = asked.together if command_line.device.type == "cpu" else 1
        capacity, tokenizer = context_length(command_line, places), Tokenizer(folder)
        model = accelerate(load_model(folder, command_line.dtype, command_line.device), not asked.no_compile)
        if not hasattr(model, "together"):
            say("texts are written one after another: here a step takes one text")
            places = 1
        setting = Setting(folder, model, tokenizer, options.params, capacity, options.coupling.name)
        self.worker, self.listener = Worker(setting, options, places), listener
        reader = RequestReader(command_line, tokenizer, capacity, self.worker.bits)
        app = make_app(self.worker, reader, asked.serve.rpartition(":")[0])
        quiet = {"log_level": "critical", "access_log": False, "server_header": False, "headers": [*HEADERS.items()]}
        off = {"lifespan": "off", "ws": "none", "proxy_headers": False, "timeout_graceful_shutdown": 3}
        super().__init__(uvicorn.Config(app, **quiet, **off))

    def serve_until_stopped(self) -> None:
        """Serve until stopped. Raises KeyboardInterrupt on Ctrl-C, when everything is closed.

        Texts are written in the calling thread, connections are served in another. On a machine of two cores OpenMP
        keeps its threads awake between products for the main thread only: in another a step takes 1.6 times as long.
        """
        network = threading.Thread(target=self.run, args=([self.listener],), name="network")
        with self.capture_signals():
            network.start()
            try:
                self.worker.work(lambda: self.should_exit or not network.is_alive())
            finally:
                self.should_exit = True
                network.join()


def run(address: str, command_line: Request) -> None:
    """Load the model, print the address and serve until Ctrl-C (KeyboardInterrupt).

    ``address`` is ``[HOST:]PORT``, by default of host 127.0.0.1; port 0 is any free port. Raises InputError where it is
    wrong or in use.
    """
    host, _, port = address.rpartition(":")
    try:
        listener = socket.create_server((host or "127.0.0.1", int(port)))  # before the model is loaded
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(f"--serve {address:.80}: {error}: give [HOST:]PORT, such as 127.0.0.1:8000") from None
    with listener:
        server = Server(command_line, listener)
        print("http://{}:{}/".format(host or "127.0.0.1", listener.getsockname()[1]), flush=True)
        say("Ctrl-C ends it")
        server.serve_until_stopped()
