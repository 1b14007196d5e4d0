"""The off-grid copy: same seed, same weights; every matrix moves, along the directions that inputs
use least.
"""

import torch

from benchmark.off_grid import add_noise, four_bit_grid, round_to_nearest, share_kept
from model import Decoder
from search.texts import Continuation
from tests.laws import tiny_model
from weights.importance import input_squares, linear_layers

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
    assert moved == {
        f"layers.{name}.weight" for name in linear_layers(tiny_model("llama")) if name != "head"
    }
    assert all(torch.equal(first[name], again[name]) for name in clean)
    assert not any(torch.equal(first[name], other[name]) for name in moved)


def test_the_noise_is_orthogonal_to_the_directions_that_inputs_use_most() -> None:
    """Products with the inputs' strongest direction do not change."""
    model, clean = noised(0), tiny_model("llama")
    ids = [text.prompt + text.written for text in TEXTS]
    covariances = input_squares(clean, ids, lambda x: x.T @ x)
    for name, covariance in covariances.items():
        if name != "head":
            strongest = torch.linalg.eigh(covariance)[1][:, -1].to(clean.dtype)
            change = (
                linear_layers(model)[name].weight - linear_layers(clean)[name].weight
            ) @ strongest
            assert change.abs().max() < 1e-5


def test_the_noised_weights_lie_off_the_grid_until_they_are_rounded() -> None:
    """Uniformly within half a step of it: at a mean distance of a quarter."""
    model = noised(0)

    def distances() -> list[float]:
        layers = [layer.weight for name, layer in linear_layers(model).items() if name != "head"]
        places = [
            (weight - low) / step for weight in layers for low, step in [four_bit_grid(weight)]
        ]
        return [(place - place.round()).abs().mean().item() for place in places]

    assert all(0.1 < distance < 0.4 for distance in distances())
    round_to_nearest(model)
    assert max(distances()) < 1e-3


def test_the_share_of_kept_tokens_counts_the_models_greedy_ones() -> None:
    model, prompt = tiny_model("llama"), [0, 1, 2]
    written: list[int] = []
    for _ in range(4):
        written.append(int(model(torch.tensor([[*prompt, *written]]))[0, -1].argmax()))
    other = [*written[:3], (written[3] + 1) % 3]
    assert (
        share_kept(model, [Continuation(tuple(prompt), tuple(each)) for each in (written, other)])
        == 7 / 8
    )
