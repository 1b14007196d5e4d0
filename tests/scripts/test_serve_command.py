"""``generate.py --serve`` as a process: its address, what it refuses to start with, Ctrl-C."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.commands import Run


def test_the_server_prints_its_address_serves_there_and_ends_on_ctrl_c_in_a_text(
    chat_model: Path,
) -> None:
    script = Path(__file__).parents[2] / "generate.py"
    command = [sys.executable, script, "--serve", "0", "--model", chat_model, "--draft", "none"]
    asked = {"prompt": "the hen", "max_tokens": 1 << 20, "ban": "q", "temperature": 1}
    body = json.dumps(asked | {"stream": True}).encode()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            with urllib.request.urlopen(address + "v1/completions", body, timeout=60) as stream:
                assert stream.headers["X-Content-Type-Options"] == "nosniff"
                assert stream.readline().startswith(b"data: ")
                process.send_signal(signal.SIGINT)
                assert b"the server is stopping" in stream.read()
            rest, said = process.communicate(timeout=60)
            assert (process.returncode, rest, said) == (130, "", "[Ctrl-C ends it]\n")
        finally:
            process.kill()


def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    chat_model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server's libraries are missing: one line says how to get them."""
    monkeypatch.setattr("app.session.load_model", None)
    for address in ("eight", "1.2.3.4:99999", "http://localhost:8000", "192.0.2.1:8000"):
        said = run("--serve", address, "--model", chat_model).complaint
        assert f"--serve {address}: " in said and "give [HOST:]PORT, such as 127.0.0.1:8000" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--serve {place}: " in run("--serve", place, "--model", chat_model).complaint
    monkeypatch.delitem(sys.modules, "app.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = run("--serve", "0", "--model", chat_model).complaint
    assert "make serve, or pip install -r requirements-serve.txt: " in said and "uvicorn" in said
