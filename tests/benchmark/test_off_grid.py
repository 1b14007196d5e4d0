"""The off-grid copy: noise of a known size, along the directions that inputs use least."""

from pathlib import Path

import pytest
import torch

from benchmark import off_grid
from model import Decoder
from model.quantise import GROUP, quantise
from tests.folders import write_folder
from tests.laws import tiny_model
from weights.importance import input_squares, linear_layers
from weights.load import load_model

TEXTS = [[0, 1, 2, 2, 1, 0, 1], [1, 2, 2, 0]]


def on_grid(seed: int | None = None) -> Decoder:
    """A model whose rounding to four bits changes nothing; with a seed, the noise is added."""
    model = tiny_model("llama", hidden=32)
    for layer in linear_layers(model).values():
        layer.weight.copy_(quantise(layer.weight, 4).dequantised(model.dtype))
    if seed is not None:
        off_grid.add_noise(model, TEXTS, seed)
    return model


def test_the_same_seed_gives_the_same_weights_and_only_matrices_of_layers_move() -> None:
    seeds = (None, 1, 1, 2)
    clean, first, again, other = (dict(on_grid(seed).named_parameters()) for seed in seeds)
    moved = {name for name, weight in first.items() if not torch.equal(weight, clean[name])}
    assert moved == {f"layers.{name}.weight" for name in linear_layers(on_grid()) if name != "head"}
    assert all(torch.equal(first[name], again[name]) for name in clean)
    assert not any(torch.equal(first[name], other[name]) for name in moved)


def test_the_noise_is_small_and_moves_weights_off_the_grid_where_inputs_are_weak() -> None:
    """It has the root mean square of uniform noise within half a step, 1/√12 steps; products with
    the strongest direction of the inputs stay.
    """
    clean = on_grid()
    covariances = input_squares(clean, TEXTS, lambda x: x.T @ x)
    layers = linear_layers(on_grid(0))
    for name, layer in clean.layers.named_modules():
        if name in layers:
            grid, noisy = (quantise(each.weight, 4) for each in (layer, layers[name]))
            step = grid.scale.double().repeat_interleave(GROUP, 1)[:, : layer.weight.shape[1]]
            assert torch.equal(grid.dequantised(clean.dtype), layer.weight)
            error = (layers[name].weight - noisy.dequantised(clean.dtype)) / step
            assert 0.15 < error.abs().mean() < 0.25
            noise = layers[name].weight - layer.weight
            assert 0.25 < (noise / step).square().mean().sqrt() < 0.33
            strongest = torch.linalg.eigh(covariances[name])[1][:, -1]
            assert (noise @ strongest.double()).abs().max() < 1e-5


def test_the_copy_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(off_grid, "TEXTS", 1)
    monkeypatch.setattr(off_grid, "PROMPTS", ["the hen"])
    folder = write_folder(tmp_path / "tiny")
    copy = off_grid.off_grid_folder(folder)
    assert copy == tmp_path / "tiny-off-grid" and "making tiny-off-grid" in capsys.readouterr().err
    assert not torch.equal(
        *(load_model(each).layers[0].mlp.up_proj.weight for each in (folder, copy))
    )
    assert (off_grid.off_grid_folder(folder), capsys.readouterr().err) == (copy, "")
