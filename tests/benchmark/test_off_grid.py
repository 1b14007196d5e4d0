"""The off-grid copy: noise of zero changes nothing, the same seed gives the same weights, none on the old grid."""

from __future__ import annotations

import torch

from benchmark.off_grid import add_noise, input_covariances, linear_layers, round_to_nearest
from decoding.run.acceptance import Continuation
from model import Decoder
from tests.laws import tiny_model

TEXTS = [Continuation((0, 1, 2), (2, 1, 0, 1)), Continuation((1,), (2, 2, 0))]


def weights(model: Decoder) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def noised(seed: int, size: float = 1.0) -> Decoder:
    model = tiny_model("llama")
    add_noise(model, input_covariances(model, TEXTS), seed, size)
    return model


def test_noise_of_zero_changes_nothing() -> None:
    assert equal(weights(noised(0, 0.0)), weights(tiny_model("llama")))


def test_the_same_seed_gives_the_same_weights() -> None:
    assert equal(weights(noised(1)), weights(noised(1)))
    assert not equal(weights(noised(1)), weights(noised(2)))


def test_every_matrix_of_a_layer_leaves_the_grid_and_nothing_else_moves() -> None:
    model = tiny_model("llama")
    round_to_nearest(model)
    before = dict(model.named_parameters())
    on_grid = {name: parameter.detach().clone() for name, parameter in before.items()}
    add_noise(model, input_covariances(model, TEXTS), 0)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, on_grid[name])}
    assert moved == {f"layers.{name}.weight" for name in linear_layers(model)}
    again = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    round_to_nearest(model)
    assert all(not torch.equal(dict(model.named_parameters())[name], again[name]) for name in moved)


def test_the_noise_is_orthogonal_to_the_directions_that_inputs_use_most() -> None:
    """Products with the inputs' strongest direction do not change."""
    model, clean = noised(0), tiny_model("llama")
    for name, covariance in input_covariances(clean, TEXTS).items():
        strongest = torch.linalg.eigh(covariance)[1][:, -1].to(clean.dtype)
        change = (linear_layers(model)[name].weight - linear_layers(clean)[name].weight) @ strongest
        assert change.abs().max() < 1e-5
