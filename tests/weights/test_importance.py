"""Importance of weights: what is measured, and what is read from its file instead."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.decoder import Decoder
from model.fast import accelerate
from tests.calls import recorded
from weights import importance as module
from weights.importance import importance_file, input_squares, linear_layers, set_importance
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

FOLDER = model_folder("tiny-llama")
TOKENIZER = Tokenizer(FOLDER)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PROMPTS", module.PROMPTS[:2])
    return tmp_path / "cache"


def measured() -> Decoder:
    model = accelerate(load_model(FOLDER))
    set_importance(model, TOKENIZER, FOLDER)
    return model


def values(model: Decoder) -> torch.Tensor:
    return torch.cat([model.importance[layer] for layer in linear_layers(model).values()])


def test_importance_is_the_mean_square_of_a_layers_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(FOLDER)
    texts = [[1, 2, 3, 4], [5, 6]]
    found = input_squares(model, texts)
    assert found.keys() == linear_layers(model).keys()
    layer = model.layers[1].mlp.down_proj
    inputs = recorded(monkeypatch, layer, "forward", lambda x: x[0])
    with torch.inference_mode():
        states = torch.cat([model.hidden(torch.tensor([text]))[0] for text in texts])
    for name, rows in ("1.mlp.down_proj", torch.cat(inputs)), ("head", model.norm(states)):
        torch.testing.assert_close(found[name], rows.float().square().mean(0))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content,
        lambda _: b"",
        lambda content: content[:-1],
        lambda content: content[:9] * 2,
    ],
)
def test_a_second_start_reads_the_same_importance_on_every_model_object(
    damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Or makes a damaged file anew with a line. Another dtype has another file."""
    file = importance_file(first := measured(), FOLDER)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    fast = accelerate(load_model(FOLDER))
    set_importance(fast, TOKENIZER, FOLDER)
    assert torch.equal(values(first), values(fast)) and file.read_bytes() == content
    said, is_damaged = capsys.readouterr().err, damage(content) != content
    assert (said.count("made anew"), said.count("measuring")) == (is_damaged, 1 + is_damaged)
    assert file != importance_file(load_model(FOLDER, torch.float64), FOLDER)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_folder_that_cannot_be_written_costs_one_line(
    read_only: bool,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Or that is a file."""
    if read_only:
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        cache.write_text("")
    assert measured().importance
    said = capsys.readouterr().err
    assert said.count("not kept") == 1 and "made anew" not in said
