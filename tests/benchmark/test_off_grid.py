"""The off-grid copy: same seed, same weights; every matrix moves, along the directions that inputs use least."""

import torch

from benchmark.off_grid import add_noise, four_bit_grid, greedy_tokens, round_to_nearest, share_of_equal
from decoding.run.acceptance import Continuation
from decoding.run.calibration import input_squares, linear_layers
from model import Decoder
from tests.laws import tiny_model

TEXTS = [Continuation((0, 1, 2), (2, 1, 0, 1)), Continuation((1,), (2, 2, 0))]


def noised(seed: int) -> Decoder:
    model = tiny_model("llama")
    add_noise(model, TEXTS, seed)
    return model


def test_the_same_seed_gives_the_same_weights_and_only_matrices_of_layers_move() -> None:
    clean, first, again, other = (
        dict(model.named_parameters()) for model in (tiny_model("llama"), *map(noised, (1, 1, 2)))
    )
    moved = {name for name, weight in first.items() if not torch.equal(weight, clean[name])}
    assert moved == {f"layers.{name}.weight" for name in linear_layers(tiny_model("llama")) if name != "head"}
    assert all(torch.equal(first[name], again[name]) for name in clean)
    assert not any(torch.equal(first[name], other[name]) for name in moved)


def test_the_noise_is_orthogonal_to_the_directions_that_inputs_use_most() -> None:
    """Products with the inputs' strongest direction do not change."""
    model, clean = noised(0), tiny_model("llama")
    for name, covariance in input_squares(clean, TEXTS, lambda x: x.T @ x).items():
        if name != "head":
            strongest = torch.linalg.eigh(covariance)[1][:, -1].to(clean.dtype)
            change = (linear_layers(model)[name].weight - linear_layers(clean)[name].weight) @ strongest
            assert change.abs().max() < 1e-5


def test_no_rounding_of_the_noised_weights_is_free() -> None:
    """They are not on the grid, while rounded ones are and round to themselves."""
    model = noised(0)
    before = {name: layer.weight.clone() for name, layer in linear_layers(model).items()}
    round_to_nearest(model)
    for name, layer in linear_layers(model).items():
        step = four_bit_grid(before[name])[1]
        assert 0.1 < ((layer.weight - before[name]).abs() / step).mean() < 0.4, "uniform within half a step: a quarter"
    once = {name: layer.weight.clone() for name, layer in linear_layers(model).items()}
    round_to_nearest(model)
    assert all(torch.allclose(layer.weight, once[name], atol=1e-6) for name, layer in linear_layers(model).items())


def test_the_share_of_equal_tokens_counts_the_models_greedy_ones() -> None:
    model, prompt = tiny_model("llama"), [0, 1, 2]
    written = []
    for _ in range(4):
        written.append(int(model(torch.tensor([[*prompt, *written]]))[0, -1].argmax()))
    other = [*written[:3], (written[3] + 1) % 3]
    texts = [Continuation(tuple(prompt), tuple(each)) for each in (written, other)]
    assert share_of_equal(greedy_tokens(model, texts), [torch.tensor(text.written) for text in texts]) == 7 / 8
