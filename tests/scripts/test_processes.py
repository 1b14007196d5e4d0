"""The commands as processes: streams, exit status, signals; and every fault of a model folder in
one line.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import Run
from tests.folders import LLAMA, write_folder

ROOT = Path(__file__).parents[2]
LONG = {**LLAMA, "max_position_embeddings": 1 << 16}


def started(model: object, *options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, ROOT / "generate.py", "the hen", "--model", model, *options]
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_process_keeps_json_and_messages_apart_and_ends_with_status_0(model: str) -> None:
    options = ["--num-samples", "2", "--temperature", "1", "--seed", "3", "--max-new-tokens", "8"]
    with started(model, *options, "--draft", "exit", "--json", "--compare") as process:
        out, err = process.communicate()
    assert process.returncode == 0
    assert [len(json.loads(line)["tokens"]) for line in out.decode().splitlines()] == [8, 8]
    said = err.decode(errors="replace")
    assert "too short to compare speeds" in said and "seed 3" in said and "Traceback" not in said


@pytest.mark.parametrize("samples", [1, 3])
def test_ctrl_c_ends_a_process_with_status_130_after_what_it_wrote(
    samples: int, tmp_path: Path
) -> None:
    options = ["--draft", "lookup", "--max-new-tokens", 1 << 16, "--num-samples", samples]
    with started(write_folder(tmp_path / "model", LONG), *options) as process:
        first = process.stdout.read(1)  # the text has begun, and is far from its end
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate()
    assert process.returncode == 130 and first and rest.endswith(b"\n")
    assert said.count(b" tokens in ") == samples and b"Traceback" not in said


@pytest.mark.parametrize("trace", [(), ("--trace",)])
def test_a_reader_that_goes_away_ends_the_process_quietly(
    tmp_path: Path, trace: tuple[str, ...]
) -> None:
    """As in ``generate.py ... | head -c 1``."""
    options = ["--max-new-tokens", 1 << 16, "--draft", "none", *trace]
    with started(write_folder(tmp_path / "model", LONG), *options) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
    assert b"Traceback" not in said and b"BrokenPipe" not in said and process.returncode == 0


def rewrite(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


def edit_config(**changes: Any) -> Callable[[Path], Any]:
    return rewrite("config.json", json.dumps({**LLAMA, **changes}))


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def cut_short(name: str) -> Callable[[Path], Any]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def drop_tensor(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors")


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        remove("config.json"),
        "with a config.json, and weights/ holds",
    ),
    "half a config": (cut_short("config.json"), "config.json is not valid JSON"),
    "unknown model type": (
        edit_config(model_type="falcon"),
        "'falcon' is not supported; this project runs 'llama'",
    ),
    "no model type": (
        edit_config(model_type=None, architectures=None),
        "this project runs 'llama', 'mistral'",
    ),
    "no context left": (edit_config(max_position_embeddings=1), "the model's context 1"),
    "another shape": (edit_config(hidden_size=64), "not those that its config.json describes"),
    "missing tensor": (drop_tensor, "Missing key(s) in state_dict: "),
    "half the weights": (cut_short("model.safetensors"), "is not a whole safetensors file"),
    "no weights": (
        remove("model.safetensors"),
        "holds no model.safetensors",
    ),
    "pickles": (only_pickles, "holds no model.safetensors"),
    "no tokenizer": (
        remove("tokenizer.json"),
        "holds no tokenizer.json",
    ),
    "half a tokenizer": (
        cut_short("tokenizer.json"),
        "tokenizer.json is not a tokenizer that can be read",
    ),
    "half a plan": (
        rewrite("plan.json", '{"attn": ['),
        "plan.json is not valid JSON",
    ),
    "a plan of gamma -1": (
        rewrite("plan.json", '{"attn": [], "gamma": -1}'),
        "gamma must be a whole number of at least 0, found -1",
    ),
    "a plan of another model": (
        rewrite("plan.json", '{"mlp": [9]}'),
        "mlp must be a list of different layers from 0 to 3, found [9]",
    ),
}


@pytest.mark.parametrize(("damage", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_every_fault_of_a_model_folder_is_one_line_and_status_2(
    tmp_path: Path, run: Run, damage: Callable[[Path], Any], said: str
) -> None:
    folder = write_folder(tmp_path / "model")
    damage(folder)
    assert said in run("the hen", "--model", folder, "--max-new-tokens", "2").complaint
