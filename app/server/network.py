"""Network: the server of one model, its routes, and who may use it.

The network has a thread of its own; the worker writes texts in the calling thread. Knows nothing of
how texts are written and drafted.
"""

import asyncio
import json
import re
import secrets
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.common.command_line import say
from app.options import SHORT_TEXT
from app.server.requests import ChatBody, CompletionBody, complaint, kinds_at_hand, sample_of
from app.server.worker import POLL, Job, Worker
from app.session import Session
from model.errors import InputError, explaining

PAGE = Path(__file__).with_name("live.html")
MAX_BODY = 1 << 20  # bytes
LOG = {  # a line on standard error for each request
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "[%(message)s]"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "uvicorn.access": {"handlers": ["stderr"], "level": "INFO"},
        "uvicorn.error": {"level": "CRITICAL"},
    },
}


def refusal(error: Exception) -> JSONResponse:
    """Return the response to an error, as in OpenAI's API: ``param`` is the field at fault.

    A failure of the server, or of a user's code, is printed with its traceback; the client is told
    no details.
    """
    param = None
    if isinstance(error, InputError | ValidationError) and not error.__cause__:
        message, param = complaint(error)
        error = HTTPException(400, message)
    elif not isinstance(error, HTTPException):
        say("a request could not be answered:")
        traceback.print_exception(error)
        error = HTTPException(500, "the request could not be answered")
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    told = {"message": error.detail, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": told}, error.status_code, error.headers)


async def respond(
    worker: Worker, kind: type[ChatBody | CompletionBody], request: Request
) -> Response:
    """Return the response to a request for a text, once there is a reply.

    An error before that has a status of its own, also where a stream was asked for.
    """
    if (
        "transfer-encoding" in request.headers  # its chunks may be longer than a stated length
        or int(request.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY
    ):
        raise HTTPException(
            400, f"send a Content-Length, of at most {MAX_BODY} bytes, and no Transfer-Encoding"
        )
    body = kind.model_validate_json(await request.body())
    model_named(worker.session, body.model or worker.session.name)
    # In another thread, since a grammar may take long to read.
    sample = await asyncio.to_thread(sample_of, worker.session, body)
    job = Job(body, sample, asyncio.current_task())
    worker.enqueue(job)
    while job.replies.empty():
        if await request.is_disconnected():
            raise ClientDisconnect
        await asyncio.sleep(POLL)
    reply = job.replies.get_nowait()
    if isinstance(reply, Exception):
        raise reply
    if not body.stream:
        return JSONResponse(reply)
    # A stopping server has this many seconds to end its streams with an error.
    return EventSourceResponse(
        events(job, reply), sep="\n", send_timeout=30, shutdown_grace_period=30
    )


async def events(job: Job, reply: Any) -> AsyncIterator[str]:
    """Yield the data of a stream's events: this ``reply`` of a job, then those that follow."""
    while reply is not None:
        yield refusal(reply).body.decode() if isinstance(reply, Exception) else json.dumps(reply)
        reply = await job.replies.get()
    yield "[DONE]"


def model_named(session: Session, name: str) -> dict[str, Any]:
    """Return the JSON of a model. Raises HTTPException for one that is not served."""
    if name != session.name:
        raise HTTPException(404, f"model {name!r:.80} does not exist here: there is {session.name}")
    return {"id": name, "object": "model", "created": 0, "owned_by": "local"}


def live_page(session: Session, request: Request) -> Response:
    """Return the live page, with the facts of its model as a JSON value in its script."""
    options = session.options
    facts = {
        "model": session.name,
        "chats": session.tokenizer.chat_template is not None and options.chat is not False,
        "drafts": kinds_at_hand(session),
        "draft": options.draft,
        "temperature": options.temperature,
        "max_tokens": min(options.max_new_tokens, SHORT_TEXT),
    }
    page = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", secrets.token_hex(16))
    # without "<", so that no name ends the script
    return HTMLResponse(page.replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c")))


def guarded(app: ASGIApp, names: Sequence[str]) -> ASGIApp:
    """Return the app behind a guard that refuses the requests of other sites' pages.

    Such a page can send requests here through the browser of a user. The browser names its site as
    their Origin, so that must be this server. A site whose name resolves to this machine (DNS
    rebinding) passes as this server, but the Host is then its name. So the Host must be one of
    ``names``, or an address in numbers, which no other site can have.
    """
    known = "|".join(map(re.escape, ["localhost", *names]))
    ours = re.compile(rf"({known}|[\d.]+|\[[\da-f:.]+\])(:\d+)?", re.IGNORECASE)
    refused = HTTPException(
        403,
        "pages of other sites may not use this server: use its address, or start it with"
        " --allow-host NAME",
    )

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Request(scope).headers
        host = headers.get("host", "")
        is_own_page = headers.get("origin", f"//{host}").endswith(f"//{host}")
        answer = app if ours.fullmatch(host) and is_own_page else refusal(refused)
        await answer(scope, receive, send)

    return guard


def make_app(worker: Worker) -> Starlette:
    """Return the routes."""
    session = worker.session
    models = {"object": "list", "data": [model_named(session, session.name)]}
    return Starlette(
        routes=[
            Route("/", partial(live_page, session)),
            Route("/health", lambda request: JSONResponse({"status": "ok"})),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
            Route("/v1/models", lambda request: JSONResponse(models)),
            Route(
                "/v1/models/{name:path}",
                lambda request: JSONResponse(model_named(session, request.path_params["name"])),
            ),
            Route("/v1/chat/completions", partial(respond, worker, ChatBody), methods=["POST"]),
            Route("/v1/completions", partial(respond, worker, CompletionBody), methods=["POST"]),
        ],
        exception_handlers={
            **dict.fromkeys(
                (InputError, ValidationError, HTTPException, Exception),
                lambda request, error: refusal(error),
            ),
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
        family = socket.AF_INET6 if "[" in host else socket.AF_INET
        with explaining(
            f"--serve {asked:.80}: give [HOST:]PORT, such as 127.0.0.1:8000, and a free one",
            (OSError, ValueError, OverflowError, TypeError),
        ):
            self.listener = socket.create_server((host.strip("[]"), int(port)), family=family)
        self.address = f"http://{host}:{self.listener.getsockname()[1]}/"
        self.worker = Worker(session)
        config = uvicorn.Config(
            guarded(make_app(self.worker), [host, *session.options.allow_host]),
            limit_concurrency=256,  # requests on further connections are answered with status 503
            log_config=LOG,
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
        """Print the address and serve until stopped. After Ctrl-C raises KeyboardInterrupt, when
        everything is closed.

        Texts are written in the calling thread, which should be the main one. For that alone OpenMP
        keeps its threads awake between products: in another a step takes 1.6 times as long on two
        cores.
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
