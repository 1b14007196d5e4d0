"""Models by name: downloads from a hub of this test on the loopback interface, and refusals."""

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from tests.calls import recorded
from tests.folders import LLAMA, write_folder
from tests.refusal import refusal
from weights.load import download, load_model, model_folder, shown_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLOSED = "http://127.0.0.1:9"  # a port where nothing listens
REVISIONS = ("main", "v1", COMMIT)
STATUS = {
    "hub/down": (503, ""),
    "hub/gated": (403, "GatedRepo"),
    "hub/unknown": (401, "RepoNotFound"),
    "hub/other-format": (404, "EntryNotFound"),
}
CONFIGS: dict[str, dict[str, Any]] = {  # of models that cannot run
    "hub/quantised": {"quantization_config": {"bits": 4}},
    "hub/family": {"model_type": "phi3"},
    "hub/huge": {"hidden_size": 1 << 20, "intermediate_size": 1 << 24},
}


class Page(BaseHTTPRequestHandler):
    """One request to a hub with some files under any name; the name says how it fails."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[tuple[str, str, str | None]]] = []  # method, path and token

    def log_message(self, *given: Any) -> None:
        pass

    def do_GET(self) -> None:
        """Send a page."""
        self.asked.append((self.command, self.path, self.headers["Authorization"]))
        path = self.path.partition("?")[0]
        status, error, data = 404, "EntryNotFound", b""
        listed = [
            {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            for name, content in self.files.items()
        ]
        if path.endswith(f"/tree/{COMMIT}"):
            status, data = 200, json.dumps(listed).encode()
        elif found := re.fullmatch(r"/(.+)/resolve/(.+)/(.+)", path):
            model, revision, name = found.groups()
            if revision not in REVISIONS:
                error = "RevisionNotFound"
            elif name in self.files:
                status, error = STATUS.get(model, (200, ""))
                data = self.files[name]
            if name == "config.json" and model in CONFIGS:
                data = json.dumps(LLAMA | CONFIGS[model]).encode()
        self.send_response(status)
        for header, value in {
            "Content-Length": len(data),
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hash(path):x}"',
            **({"X-Error-Code": error} if error else {}),
        }.items():
            self.send_header(header, str(value))
        self.end_headers()
        self.wfile.write(data if self.command == "GET" else b"")

    do_HEAD = do_GET


def fetched(name: str) -> set[str]:
    """Files of a model that were downloaded."""
    pages = [path for method, path, _ in Page.asked if method == "GET"]
    return {page.rpartition("/")[2] for page in pages if page.startswith(f"/{name}/resolve/")}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the hub is. Some of the model's files are not needed."""
    folder = write_folder(tmp_path_factory.mktemp("origin"))
    more = ("pytorch_model.bin", "consolidated.safetensors", "README.md")
    Page.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    Page.files |= dict.fromkeys(more, b"large")
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{hub.server_port}"
        hub.shutdown()


@pytest.fixture
def hub(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub, with a new cache of the library in ``tmp_path``."""
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the pauses between tries
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    download.cache_clear()
    Page.asked.clear()


@pytest.mark.usefixtures("hub")
def test_a_model_comes_once_with_the_files_that_are_read_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then runs offline, under the name that it was asked for."""
    found = model_folder("hub/whole")
    assert load_model(found).num_layers == LLAMA["num_hidden_layers"]
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in found.iterdir()} == fetched("hub/whole") == needed
    assert found.is_relative_to(tmp_path) and shown_name(found) == "hub/whole"
    assert {token for _, path, token in Page.asked if "/hub/whole/" in path} == {"Bearer hf_secret"}
    Page.asked.clear()
    assert model_folder("hub/whole", "v1") == found and not fetched("hub/whole")
    Page.asked.clear()
    assert model_folder("hub/whole") == found and not Page.asked, "once in a process"
    download.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("hub/whole") == found
    assert "unset HF_HUB_OFFLINE" in refusal(model_folder, "hub/uncached")


@pytest.mark.usefixtures("hub")
def test_shards_of_any_name_come_by_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": "weights.1.safetensors"}}
    files = {name: Page.files[name] for name in ("config.json", "consolidated.safetensors")}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    monkeypatch.setattr(Page, "files", files | {"weights.1.safetensors": b"tensors"})
    found = model_folder("hub/sharded")
    assert (found / "weights.1.safetensors").read_bytes() == b"tensors"
    assert "consolidated.safetensors" not in fetched("hub/sharded")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("hub/unknown", None, "is no folder, and no model on the hub that you may see"),
        ("hub/gated", None, "is gated: ask for access on its page, and set HF_TOKEN"),
        ("hub/whole", "v9", "has no revision 'v9': give a branch, a tag or a commit"),
        ("hub/other-format", None, "has no config.json"),
        ("hub/down", None, "could not be downloaded from the hub: check the network"),
        ("hub/quantised", None, "the checkpoint is quantised"),
        ("hub/family", None, "model_type 'phi3' is not supported"),
        ("hub/huge", None, "hub/huge does not fit: its weights take"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_remedy(
    name: str, revision: str | None, said: str
) -> None:
    """By its config alone: no more of it is downloaded."""
    assert said in refusal(model_folder, name, revision)
    assert fetched(name) <= {"config.json"}


@pytest.mark.usefixtures("hub")
def test_without_a_network_the_hub_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model in the cache needs no network."""
    found = model_folder("hub/cached")
    download.cache_clear()
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", CLOSED + "/{repo_id}/{filename}")
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    pauses = recorded(monkeypatch, time, "sleep", lambda seconds: seconds)
    assert model_folder("hub/cached") == found
    assert "hub/absent is no folder, and could not be" in refusal(model_folder, "hub/absent")
    assert not pauses and not caplog.records


def test_a_local_folder_wins_and_has_no_revisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, empty = write_folder(tmp_path / "hub" / "local"), tmp_path / "hub" / "empty"
    empty.mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_folder("hub/local").samefile(local) and shown_name(local) == "local"
    assert "--revision is for models on the hub" in refusal(model_folder, "hub/local", "main")
    assert "no folder 'hub/empty' with" in refusal(model_folder, "hub/empty")
