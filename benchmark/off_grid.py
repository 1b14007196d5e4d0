"""Weights off the four-bit grid: a copy of a checkpoint with noise that hardly changes its text.

The weights of a checkpoint that was made from a four-bit file lie on the grid of a four-bit draft. Its draft is nearly
the model itself, which says little about other checkpoints. The copy gets noise of up to half a rounding step, in the
half of the input directions that text uses least. It writes almost the same text, and rounding changes its weights.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from decoding.run.acceptance import Continuation
from decoding.run.calibration import calibration_texts, input_squares, linear_layers
from decoding.sampling import SamplingParams
from model import Decoder
from model.fast import accelerate
from model.quantise import GROUP
from search.prompts import PROMPTS
from weights.cli.command_line import say
from weights.cli.files import read_optional_json, write_json
from weights.load import load_model
from weights.save import save_model
from weights.tokenizer import Tokenizer

NOTE = "off_grid.json"  # in the copy's folder: the measured share of equal tokens
LEVELS = 15  # steps of a four-bit grid
TEXTS = 8  # sets of texts that the inputs are measured on


def off_grid_folder(folder: Path) -> Path:
    """Folder of the copy, beside the checkpoint's; made if it is missing. Prints a line about it."""
    copy = folder.with_name(f"{folder.name}-off-grid")
    note = read_optional_json(copy / NOTE)
    if not note:
        say(f"making {copy.name}: noise in its weights, within half a step of a four-bit grid; some minutes")
        model, tokenizer = load_model(folder), Tokenizer(folder)
        write = (accelerate(model), tokenizer)
        texts = [calibration_texts(*write, SamplingParams(0.7), seed) for seed in range(1, TEXTS + 1)]
        held_out = calibration_texts(*write, SamplingParams(), prompts=[two for p in PROMPTS.values() for two in p[:2]])
        add_noise(model, [text for each in texts for text in each], seed=0)
        save_model(model, copy, tokenizer_from=folder)
        noised, checkpoint = greedy_tokens(model, held_out), [torch.tensor(text.written) for text in held_out]
        round_to_nearest(model)
        rounded = greedy_tokens(model, held_out)
        note = {"same": share_of_equal(noised, checkpoint), "rounded": share_of_equal(noised, rounded)}
        write_json(copy / NOTE, note)
    same = f"{copy.name}: its greedy token is the checkpoint's at {note['same']:.2f} of the positions"
    say(f"{same}, and at {note['rounded']:.2f} its own after rounding to the nearest four bits")
    return copy


@torch.no_grad()
def add_noise(model: Decoder, texts: Sequence[Continuation], seed: int) -> None:
    """Add noise to every matrix of a layer, in place; embedding and head stay.

    It is uniform within half a four-bit step of a weight's group on either side, projected onto the half of the
    eigenvectors with the smaller eigenvalues of its inputs' uncentred covariance on these texts, times √2, which
    restores its norm.
    """
    generator = torch.Generator().manual_seed(seed)
    covariances = input_squares(model, texts, lambda x: x.T @ x)
    for name, layer in linear_layers(model).items():
        if name != "head":
            vectors = torch.linalg.eigh(covariances[name].cpu())[1]  # by rising eigenvalue
            weak = vectors[:, : len(vectors) // 2]
            noise = (torch.rand(layer.weight.shape, generator=generator) - 0.5) * four_bit_grid(layer.weight.cpu())[1]
            layer.weight.copy_(layer.weight + (math.sqrt(2) * noise @ weak @ weak.T).to(layer.weight.device))


def four_bit_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest weight, and step of an even grid of 16 values, of each weight's group of columns: two ``[out, in]``."""
    groups = weight.float().split(GROUP, 1)
    low, high = (
        torch.cat([end(part, 1, True).expand_as(part) for part in groups], 1) for end in (torch.amin, torch.amax)
    )
    return low, (high - low) / LEVELS


@torch.no_grad()
def round_to_nearest(model: Decoder) -> None:
    """Round every matrix of a layer to the nearest value of its groups' grids, in place."""
    for layer in linear_layers(model).values():
        low, step = four_bit_grid(layer.weight)
        layer.weight.copy_(((layer.weight - low) / step.clamp(min=1e-30)).round() * step + low)


@torch.inference_mode()
def greedy_tokens(model: Decoder, texts: Sequence[Continuation]) -> list[Tensor]:
    """Likeliest token at every written position of each text, given the text before it."""
    found = []
    for prompt, written in ((text.prompt, text.written) for text in texts):
        states = model.hidden(torch.tensor([[*prompt, *written[:-1]]], device=model.device))[:, len(prompt) - 1 :]
        found.append(model.logits(states)[0].argmax(-1).cpu())
    return found


def share_of_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Share of positions at which two models chose the same token."""
    return (torch.cat([*first]) == torch.cat([*second])).float().mean().item()
