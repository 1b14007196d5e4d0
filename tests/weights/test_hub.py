"""Models by name: downloads from a hub of this test on the loopback interface, whole and broken,
and refusals in one line.
"""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from tests.folders import LLAMA, write_folder
from tests.refusal import refusal
from weights.load import load_model, model_folder, shown_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)
STATUS = {
    "hub/down": (503, ""),
    "hub/gated": (403, "GatedRepo"),
    "hub/unknown": (401, "RepoNotFound"),
    "hub/other-format": (404, "EntryNotFound"),
}


CANNOT_RUN: dict[str, tuple[dict[str, Any], str]] = {  # what the config changes, what is said
    "hub/quantised": ({"quantization_config": {"bits": 4}}, "the checkpoint is quantised"),
    "hub/family": ({"model_type": "phi3"}, "model_type 'phi3' is not supported"),
    "hub/huge": (
        {"hidden_size": 1 << 20, "intermediate_size": 1 << 24},
        "hub/huge does not fit: its weights take",
    ),
}


class Hub(ThreadingHTTPServer):
    """Hub with the files of one folder under any name; the name says how it fails.

    ``asked`` holds the method, path and token of each request.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.asked: list[tuple[str, str, str | None]] = []

    def fetched(self, name: str) -> set[str]:
        """Files of a model that were downloaded."""
        pages = [path for method, path, _ in self.asked if method == "GET"]
        return {page.rpartition("/")[2] for page in pages if page.startswith(f"/{name}/resolve/")}


class Page(BaseHTTPRequestHandler):
    """One request to the hub."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *given: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers["Authorization"]))
        path = self.path.partition("?")[0]
        if path.endswith(f"/tree/{COMMIT}"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.server.files.items()
            ]
            self.answer(200, json.dumps(entries).encode())
        elif found := re.fullmatch(r"/(.+)/resolve/(.+)/(.+)", path):
            model, revision, name = found.groups()
            status, error = STATUS.get(model, (200, ""))
            if revision not in REVISIONS:
                status, error = 404, "RevisionNotFound"
            elif name not in self.server.files:
                status, error = 404, "EntryNotFound"
            data = self.server.files[name] if status == 200 else b""
            if name == "config.json" and model in CANNOT_RUN:
                data = json.dumps(LLAMA | CANNOT_RUN[model][0]).encode()
            self.answer(status, data, error=error, tag=f"{model.replace('/', '-')}-{name}")
        else:
            self.answer(404)

    do_HEAD = do_GET

    def answer(self, status: int, data: bytes = b"", *, error: str = "", tag: str = "") -> None:
        """Send a page, cut off within the weights where the model's name says so."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{tag}"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if tag.endswith(".safetensors") and "broken" in self.path:
            self.close_connection = True
            data = data[: len(data) // 2]
        self.wfile.write(data if self.command == "GET" else b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the model on the hub, of which some are not needed."""
    folder = write_folder(tmp_path_factory.mktemp("origin"), LLAMA, dtype=torch.bfloat16)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (folder / name).write_bytes(b"large")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


@pytest.fixture
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, with a new cache of the library in ``tmp_path``."""
    hub = f"http://127.0.0.1:{served.server_port}"
    for name, value in {
        "ENDPOINT": hub,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the pauses between tries
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served.asked.clear()
    return served


def test_a_model_comes_with_the_files_that_are_read_and_no_others(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    found = model_folder("hub/whole")
    ours, theirs = (load_model(each).state_dict() for each in (found, folder))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in found.iterdir()} == hub.fetched("hub/whole") == needed
    assert found.is_relative_to(tmp_path) and found.name == COMMIT
    tokens = {token for _, path, token in hub.asked if "/hub/whole/" in path}
    assert tokens == {"Bearer hf_secret"}


def test_a_cached_model_is_not_downloaded_again_and_runs_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = model_folder("hub/cached")
    hub.asked.clear()
    assert model_folder("hub/cached", "v1") == first and not hub.fetched("hub/cached")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("hub/cached") == first
    assert "unset HF_HUB_OFFLINE" in refusal(model_folder, "hub/uncached")


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_a_model_that_cannot_run_is_refused_by_its_config_alone(hub: Hub, name: str) -> None:
    assert CANNOT_RUN[name][1] in refusal(model_folder, name)
    assert hub.fetched(name) == {"config.json"}


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("hub/unknown", None, "is no folder, and no model on the hub that you may see"),
        ("hub/gated", None, "is gated: ask for access on its page, and set HF_TOKEN"),
        ("hub/whole", "v9", "has no revision 'v9': give a branch, a tag or a commit"),
        ("hub/other-format", None, "has no config.json"),
        ("hub/down", None, "the hub cannot be reached: check the network"),
        ("hub/broken", None, "hub/broken could not be downloaded"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_remedy(
    hub: Hub, name: str, revision: str | None, said: str
) -> None:
    """Twice: a download that breaks off leaves nothing that looks whole."""
    for _ in range(2):
        assert said in refusal(model_folder, name, revision)


def test_a_local_folder_wins_and_has_no_revisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "hub" / "local")
    (tmp_path / "hub" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_folder("hub/local") == Path("hub/local")
    assert "--revision is for models on the hub" in refusal(model_folder, "hub/local", "main")
    assert "no folder 'hub/empty' with" in refusal(model_folder, "hub/empty")


def test_a_model_of_the_hub_is_shown_by_its_name_and_not_by_its_commit(tmp_path: Path) -> None:
    assert (
        shown_name(tmp_path / "models--org--small-1B" / "snapshots" / "0123abcd") == "org/small-1B"
    )
    assert shown_name(tmp_path / "local") == "local"
