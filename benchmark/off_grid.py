"""Weights off the four-bit grid: a copy of a checkpoint with noise that hardly changes its text.

The weights of a checkpoint that was made from a four-bit file lie on the grid of a four-bit draft. Its draft is nearly
the model itself, which says little about other checkpoints. The copy gets noise of up to half a rounding step, in the
half of the input directions that text uses least. It writes almost the same text, and rounding changes its weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

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
        note = {"same": share_of_equal(model, held_out)}
        write_json(copy / NOTE, note)
    say(f"{copy.name}: its greedy token is the checkpoint's at {note['same']:.2f} of the positions")
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
            groups = layer.weight.cpu().float().split(GROUP, 1)
            ranges = [(part.amax(1, True) - part.amin(1, True)).expand_as(part) for part in groups]
            noise = (torch.rand(layer.weight.shape, generator=generator) - 0.5) * torch.cat(ranges, 1) / LEVELS
            layer.weight += (math.sqrt(2) * noise @ weak @ weak.T).to(layer.weight)


@torch.inference_mode()
def share_of_equal(model: Decoder, texts: Sequence[Continuation]) -> float:
    """Share of the tokens of some texts that are the model's greedy ones, given the text before them."""
    equal = []
    for prompt, written in ((text.prompt, text.written) for text in texts):
        states = model.hidden(torch.tensor([[*prompt, *written[:-1]]], device=model.device))[:, len(prompt) - 1 :]
        equal.append(model.logits(states)[0].argmax(-1).cpu() == torch.tensor(written))
    return torch.cat(equal).float().mean().item()
