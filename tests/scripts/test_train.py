"""Runs of training: reproducible and resumable."""

import filecmp
import json
import math
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from tests.calls import interrupted, recorded, status_of
from tests.folders import GEMMA2, LLAMA, write_folder
from training import run as runs
from training.run import LOG, OPTIONS, STATE
from weights.load import load_model

SHAPE = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
CONFIG = {**LLAMA, **SHAPE}
TEXT = "\n".join(
    json.dumps({"text": f"The {a} hen saw {b * b} of the {c} foxes by the {b + 7} old trees."})
    for a in ("brown", "small", "clever", "old")
    for b in range(30)
    for c in ("red", "sly", "shy")
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The text, beside a config."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    path = tmp_path / "text.jsonl"
    path.write_text(TEXT, encoding="utf-8")
    return path


def arguments(text: Path, out: Path, **changed: Any) -> list[str]:
    options = {
        "data": text,
        "out": out,
        "config": text.parent / "config.json",
        "vocab_size": 300,
        "steps": 6,
        "batch": 2,
        "accumulate": 2,
        "context": 24,
        "warm_up": 2,
        "rotation": 2,
        "layer_dropout": 0.5,
        "save_every": 2,
        "device": "cpu",
        **changed,
    }
    given = (
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value is not None
    )
    return [*given, "--no-autocast"]


def log_of(out: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (out / LOG).read_text(encoding="utf-8").splitlines())]


def state_of(out: Path) -> dict[str, Any]:
    return torch.load(out / STATE, weights_only=True)


def test_a_run_learns_and_leaves_an_ordinary_model_folder(
    data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    command = arguments(data, out, steps=40, save_every=20, learning_rate=0.01)
    assert train.main(command) == 0
    losses = [row["loss"] for row in log_of(out) if "loss" in row]
    assert len(losses) == 40 and losses[-1] < 0.7 * losses[0]
    judged = log_of(out)[-1]
    assert judged["step"] == 40 and len(judged["held_out_loss"]) == 3
    assert judged["agreement"][-1] == 1
    assert (load_model(out).dtype, load_model(out).num_layers) == (torch.bfloat16, 3)
    capsys.readouterr()
    assert train.main(command) == 0, "there is nothing left to do"
    assert capsys.readouterr().err.endswith(f"[all 40 steps are done: the model is in {out}]\n")


def test_a_killed_run_goes_on_to_the_same_losses_and_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Weights and moments bit for bit, by AdamW and Muon. It speaks at once, is saved early, and
    repeats a step that was not saved.
    """
    assert train.main(arguments(data, tmp_path / "whole", muon_rate=0.02)) == 0
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == f"[reading {data}]" and second.startswith("[step 1 of 6: loss ")
    killed = arguments(data, tmp_path / "killed", muon_rate=0.02)
    for first_save, calls, saved in (-1.0, 2, 1), (train.FIRST_SAVE, 3, 2):
        with monkeypatch.context() as patch:
            patch.setattr(train, "monotonic", lambda: 0.0)
            patch.setattr(train, "FIRST_SAVE", first_save)
            interrupted(patch, train, "backward", calls)
            assert train.main(killed) == 130
        assert state_of(tmp_path / "killed")["step"] == saved
    assert train.main(killed) == 0
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "whole")
    again, whole = (
        [part.get("state", part) for part in state_of(tmp_path / name)["parts"]]
        for name in ("killed", "whole")
    )
    torch.testing.assert_close(again, whole, rtol=0, atol=0)


def test_a_run_is_not_continued_with_other_options_or_another_text(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But from another folder, on the same text in another file, and saved at other steps."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    assert train.main(arguments(data, run, steps=1)) == 0
    said = refusal_of(arguments(data, run, steps=1, learning_rate=0.5), capsys)
    assert "holds a run with learning_rate 0.002: give the same, or another --out" in said
    run.rename(moved)
    data = data.rename(tmp_path / "renamed.jsonl")
    assert train.main(arguments(data, moved, steps=1, save_every=7)) == 0
    monkeypatch.setitem(OPTIONS[""], "--new", {"default": 7, "help": "unknown to the run"})
    command = arguments(data, moved, steps=1)
    assert "holds a run with new None: give" in refusal_of(command, capsys)
    data.write_text(TEXT.replace("old", "new"), encoding="utf-8")
    assert "holds a run with text of checksum " in refusal_of(command, capsys)
    (moved / STATE).write_bytes(b"nonsense")
    assert "is damaged" in refusal_of(command, capsys)


def test_training_goes_on_from_a_checkpoint_of_either_family_with_its_tokenizer(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is looked for once."""
    found = recorded(monkeypatch, runs, "model_folder", str)
    start, out = write_folder(tmp_path / "start", GEMMA2 | SHAPE, eos_ids=(263,)), tmp_path / "run"
    changed = {"config": None, "start_from": start, "learning_rate": 1e-9, "steps": 2}
    assert train.main(arguments(data, out, **changed)) == 0
    assert found == [str(start)]
    before, after = (load_model(each, torch.float32).state_dict() for each in (start, out))
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)
    assert filecmp.cmp(out / "tokenizer.json", start / "tokenizer.json", shallow=False)


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_good_checkpoint(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    loss, factors = train.recipe_loss, chain([1] * 7, [math.nan], repeat(1))
    monkeypatch.setattr(train, "recipe_loss", lambda *inputs: loss(*inputs) * next(factors))
    said = refusal_of(arguments(data, out), capsys)
    assert "the loss or its gradient is non-finite in step 4: the last saved state is kept" in said
    assert state_of(out)["step"] in (2, 3)
    assert all(tensor.isfinite().all() for tensor in state_of(out)["parts"][0].values())


def contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder, and what they hold."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal_of(command: list[str], capsys: Any) -> str:
    """The last line that a refused command says: the whole of its error."""
    assert status_of(train.main, command) == 2
    *_, last = capsys.readouterr().err.splitlines()
    return last.removeprefix("error: ")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"steps": 0}, "--steps: must be at least 1, found 0"),
        ({"steps": "many"}, "--steps: invalid number value: 'many'"),
        ({"layer_dropout": 1.5}, "--layer-dropout: must be from 0 to 1, found 1.5"),
        ({"config": None}, "give either --config or --start-from"),
        ({"start_from": "tiny-llama"}, "give either --config or --start-from"),
        ({"context": 4096}, "more than the config's 256 positions"),
        ({"vocab_size": 20}, "--vocab-size: must be at least 258, found 20"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
        ({"data": "same.jsonl"}, "1 different documents, with "),
        ({"config": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"out": "text.jsonl"}, "text.jsonl"),
        ({"out": "other"}, "holds a model without the state of a run"),
        (
            {"out": "other", "config": None, "start_from": "other"},
            "holds a model without the state of a run",
        ),
        ({"config": None, "start_from": ""}, "give either --config or --start-from"),
        ({"learning_rate": "inf"}, "--learning-rate: must be at least 0 and finite, found inf"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    data: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.jsonl").write_text('{"text": "One text."}\n' * 6000, encoding="utf-8")
    model = write_folder(tmp_path / "other", CONFIG, eos_ids=(263,))
    (model / STATE).parent.mkdir()  # of a run whose state was deleted
    before = contents(tmp_path)
    asked = arguments(data, **{"out": Path("deep/in/run"), **changed})
    assert complaint in refusal_of(asked, capsys)
    assert contents(tmp_path) == before
