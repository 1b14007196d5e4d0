"""Guard: which requests are let in, and how their bodies are read."""

import asyncio
import re
from collections import defaultdict
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decoding.serve.requests import error_json, refusal

MAX_BODY = 1 << 20  # bytes
BODY_SECONDS = 30  # in which a body must arrive
MAX_ARRIVING = 32  # bodies of one address that arrive at once; of more, the oldest is given up
# open at once, those that wait in the queue included; further ones are answered with status 503
MAX_REQUESTS = 128


def guarded(app: ASGIApp, host_name: str) -> ASGIApp:
    """The app, for requests to the names of this server, from its page or from no page.

    A page of another site may send requests here through the user's browser. The browser then names
    that site as their origin; and if that page's name resolves to this machine (DNS rebinding), the
    Host is that name. An address in numbers cannot be resolved to another.
    """
    names = re.compile(rf"(localhost|{re.escape(host_name)}|[\d.]+)(:\d+)?", re.IGNORECASE)
    open_requests = asyncio.Semaphore(MAX_REQUESTS)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        is_own_page = headers.get("origin", f"//{host}").endswith(f"//{host}")
        if not (names.fullmatch(host) and is_own_page):
            refused = HTTPException(
                403, "pages of other sites may not use this server: use its address"
            )
        elif open_requests.locked():
            refused = HTTPException(503, f"{MAX_REQUESTS} requests are open: try again")
        else:
            async with open_requests:
                return await app(scope, receive, send)
        return await error_response(None, refused)(scope, receive, send)

    return guard


def error_response(request: HTTPRequest | None, error: Exception) -> JSONResponse:
    """Response to an error that is raised before any other response begins."""
    refused = refusal(error)
    return JSONResponse(error_json(refused), refused.status_code)


async def read_body(
    request: HTTPRequest, arriving: defaultdict[str, list[asyncio.Task[bytes]]]
) -> bytes:
    """The body of a request; the part that has come where the client disconnects.

    ``arriving`` are the bodies that arrive now, by the client's address. Raises HTTPException for
    one that is too long or too slow, and for two statements of its length, by which proxies are
    deceived.
    """
    if {"content-length", "transfer-encoding"}.issubset(request.headers):
        raise HTTPException(400, "give Content-Length or Transfer-Encoding, not both")
    body = asyncio.create_task(collect(request))
    await asyncio.sleep(0)  # in which a body is read that has come whole
    if not body.done():
        address = request.client.host if request.client else ""  # None: already gone
        bodies = arriving[address]
        if len(bodies) == MAX_ARRIVING:
            bodies.pop(0).cancel()
        bodies.append(body)
        await asyncio.wait([body], timeout=BODY_SECONDS)
        if body in bodies:
            bodies.remove(body)
        if not bodies:
            arriving.pop(address, None)
    if body.cancel() or body.cancelled():  # too late, or given up
        raise HTTPException(408, "the body did not arrive in time: send it again")
    return body.result()


async def collect(request: HTTPRequest) -> bytes:
    """The bytes of a body, counted as they come. Raises HTTPException for too many."""
    body = bytearray()
    with suppress(ClientDisconnect):
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"a body may have up to {MAX_BODY} bytes")
    return bytes(body)
