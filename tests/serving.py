"""A server in a thread of the test's own process, and plain HTTP to talk to it with."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generate
from app.options import make_parser
from app.server.app import Server
from app.server.worker import Worker
from tests.folders import LLAMA, write_folder

CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor"
    " %}assistant:"
)
CONTEXT = 1 << 12


def chat_folder(folder: Path) -> Path:
    """A tiny random model that can chat and whose context is long; its texts end at the letter q
    too.
    """
    write_folder(folder, {**LLAMA, "max_position_embeddings": CONTEXT}, eos_ids=(80,))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


@dataclass
class Served:
    """A running server."""

    server: Server

    @property
    def worker(self) -> Worker:
        return self.server.worker

    @property
    def idle(self) -> bool:
        return not self.worker.jobs

    @property
    def address(self) -> str:
        return self.server.address.removesuffix("/")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of a request; ``body`` is sent as it is where it is bytes, else as
        JSON.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(
                method, path, data, {"Content-Type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def refusal(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that is not served."""
        status, answer = self.ask(path, body)
        return status, json.loads(answer)["error"]

    def text(self, **body: Any) -> str:
        """The text of a completion that is served."""
        status, answer = self.ask("/v1/completions", body)
        assert status == 200, answer
        return json.loads(answer)["choices"][0]["text"]

    def begin(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request was sent and nothing read yet."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A server as ``generate.py --serve`` with these arguments starts it, on a free port."""
    server = Server(generate.Request(make_parser().parse_args(["--serve", "0", *arguments])))
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    until(lambda: server.started)
    try:
        yield Served(server)
    finally:
        server.should_exit = True
        thread.join()


def until(true: Callable[[], Any], patience: float = 60.0) -> None:
    """Wait for a condition that another thread will make true."""
    ends = time.monotonic() + patience
    while not true():
        assert time.monotonic() < ends, "it never came about"
        time.sleep(0.005)


def events_of(stream: bytes) -> list[Any]:
    """The messages of an event stream; [DONE] as it is. Comments only keep the connection open."""
    assert stream.endswith(b"\n\n")
    events = stream.removesuffix(b"\n\n").split(b"\n\n")
    data = [event.removeprefix(b"data: ") for event in events if not event.startswith(b":")]
    return [each.decode() if each == b"[DONE]" else json.loads(each) for each in data]
