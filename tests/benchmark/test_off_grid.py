"""The off-grid copy: noise of a known size, along the directions that inputs use least."""

from pathlib import Path

import pytest
import torch

from benchmark import off_grid
from model.decoder import Decoder
from model.quantise import GROUP, quantise
from tests.folders import write_folder
from tests.laws import tiny_model
from weights.importance import input_means, linear_layers
from weights.load import load_model

TEXTS = [[0, 1, 2, 2, 1, 0, 1], [1, 2, 2, 0]]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return quantise(weight, 4).dequantised(weight.dtype)


def on_grid(seed: int | None = None) -> Decoder:
    """A model whose rounding to four bits changes nothing; with a seed, the noise is added."""
    model = tiny_model("llama", hidden=32)
    for layer in linear_layers(model).values():
        layer.weight.copy_(rounded(layer.weight))
    if seed is not None:
        off_grid.add_noise(model, TEXTS, seed)
    return model


def test_the_same_seed_gives_the_same_weights_and_only_matrices_of_layers_move() -> None:
    clean, first, again, other = (dict(on_grid(n).named_parameters()) for n in (None, 1, 1, 2))
    moved = {name for name, weight in first.items() if not torch.equal(weight, clean[name])}
    assert moved == {f"layers.{name}.weight" for name in linear_layers(on_grid()) if name != "head"}
    assert all(torch.equal(first[name], again[name]) for name in clean)
    assert not any(torch.equal(first[name], other[name]) for name in moved)


def test_the_noise_is_small_and_moves_weights_off_the_grid_where_inputs_are_weak() -> None:
    """It has the root mean square of uniform noise within half a step, 1/√12 steps; products with
    the strongest direction of the inputs stay.
    """
    covariances = input_means(on_grid(), TEXTS, lambda x: x.T @ x)
    clean, noised = (linear_layers(on_grid(seed)) for seed in (None, 0))
    for name in clean.keys() - {"head"}:
        before, after = (layers[name].weight for layers in (clean, noised))
        step = quantise(before, 4).scale.double().repeat_interleave(GROUP, 1)[:, : before.shape[1]]
        distances = (after - before, before - rounded(before), after - rounded(after))
        sizes = [(each / step).square().mean().sqrt().item() for each in distances]
        assert sizes == pytest.approx([12**-0.5, 0, 0.22], abs=0.05)
        strongest = torch.linalg.eigh(covariances[name])[1][:, -1].double()
        assert ((after - before) @ strongest).abs().max() < 1e-5


def test_the_copy_is_made_once_for_the_same_weights_and_code(
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
    assert {"model/quantise.py", "weights/prompts.txt"} < {*off_grid.MADE_BY}
    for changed in "model_fingerprint", "version":
        monkeypatch.setattr(off_grid, changed, lambda sources: "of other weights or code")
        assert off_grid.off_grid_folder(folder) == copy and "making" in capsys.readouterr().err
