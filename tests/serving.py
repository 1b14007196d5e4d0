"""A server in a thread of the test's own process, and plain HTTP to talk to it with."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.options import parse
from app.server.network import Server
from app.server.worker import Worker
from app.session import Session
from tests.calls import until
from tests.folders import LLAMA, write_folder

CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor"
    " %}assistant:{{ ' (' + tone + ')' if tone }}"
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
    """A running server: its worker, and its address without a slash at the end."""

    worker: Worker
    address: str

    def begin(self, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        """A connection on which a request was sent and nothing read yet; without a body, a GET.

        ``body`` is sent as it is where it is bytes, else as JSON.
        """
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.address[7:], timeout=60)
        connection.request("GET" if body is None else "POST", path, data, headers)
        return connection

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a request, or its text where that is no JSON."""
        with closing(self.begin(path, body, **headers)) as connection:
            response = connection.getresponse()
            text = response.read().decode()
        return response.status, json.loads(text) if text[:1] == "{" else text

    def text(self, **body: Any) -> str:
        """The text of a completion that is served."""
        status, answer = self.ask("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A server as ``generate.py --serve`` with these arguments starts it, on a free port."""
    server = Server(Session(parse(["--serve", "0", *arguments])))
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    until(lambda: server.started)
    try:
        yield Served(server.worker, server.address.removesuffix("/"))
    finally:
        server.should_exit = True
        thread.join()


def events_of(stream: str) -> list[Any]:
    """The messages of an event stream, which ends with [DONE]."""
    *events, done, nothing = stream.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(each[6:]) for each in events if not each.startswith(":")]
