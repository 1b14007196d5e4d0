"""Importance of weights: what is measured, and what is read from its file instead."""

import shutil
from pathlib import Path

import pytest
import torch

from model.fast import accelerate
from tests.calls import recorded
from weights import importance as module
from weights.importance import importance_file, input_means, linear_layers, set_importance
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

FOLDER = model_folder("tiny-llama")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PROMPTS", module.PROMPTS[:2])
    return tmp_path / "cache"


def measured() -> dict[str, torch.Tensor]:
    """The importance of the inputs of each layer."""
    model = accelerate(load_model(FOLDER))
    set_importance(model, Tokenizer(FOLDER), FOLDER)
    return {name: model.importance[layer] for name, layer in linear_layers(model).items()}


def test_importance_is_the_mean_square_of_a_layers_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(FOLDER)
    texts = [[1, 2, 3, 4], [5, 6]]
    found = input_means(model, texts)
    assert found.keys() == linear_layers(model).keys()
    layer = model.layers[1].mlp.down_proj
    inputs = recorded(monkeypatch, layer, "forward", lambda x: x[0])
    with torch.inference_mode():
        states = torch.cat([model.hidden(torch.tensor([text]))[0] for text in texts])
    for name, rows in ("1.mlp.down_proj", torch.cat(inputs)), ("head", model.norm(states)):
        torch.testing.assert_close(found[name], rows.float().square().mean(0))


@pytest.mark.parametrize("end", [None, -1], ids=["whole", "cut off"])
def test_a_second_start_reads_the_same_importance_or_measures_it_where_the_file_is_damaged(
    end: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another dtype has another file, and another tokenizer or chat template. One that refuses a
    lone turn of a user does without.
    """
    first = measured()
    file = importance_file(load_model(FOLDER), FOLDER)
    content = file.read_bytes()
    file.write_bytes(content[:end])
    torch.testing.assert_close(measured(), first, rtol=0, atol=0)
    assert file.read_bytes() == content
    assert capsys.readouterr().err.count("measuring") == (1 if end is None else 2)
    assert file != importance_file(load_model(FOLDER, torch.float64), FOLDER)
    other = shutil.copytree(FOLDER, tmp_path / "other")
    model = load_model(other)
    file = importance_file(model, other)
    (other / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")
    set_importance(model, Tokenizer(other), other)
    assert file != importance_file(model, other) and model.importance


def test_a_folder_that_cannot_be_written_costs_one_line(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here it is a file."""
    cache.write_text("")
    assert measured() and capsys.readouterr().err.count("not kept") == 1
