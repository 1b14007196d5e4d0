"""Weights off the four-bit grid: a copy of a checkpoint with noise that hardly changes its text.

The weights of a checkpoint that was made from a four-bit file lie on the grid of a four-bit draft. Its draft is nearly
the model itself, which says little about other checkpoints. The copy gets noise of up to half a rounding step, in the
half of the input directions that text uses least. It writes almost the same text, and rounding changes its weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from decoding.run.acceptance import Continuation
from decoding.run.calibration import calibration_texts
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

NOTE = "off_grid.json"  # in the copy's folder: the measured shares of equal tokens
LEVELS = 15  # steps of a four-bit grid
TEXTS = 8  # sets of texts that the covariance is measured on


def off_grid_folder(folder: Path, seed: int = 0) -> Path:
    """Folder of the copy, beside the checkpoint's; made if it is missing. Prints a line about it."""
    copy = folder.with_name(f"{folder.name}-off-grid")
    note = read_optional_json(copy / NOTE)
    if not note:
        say(f"making {copy.name}: noise in its weights, within half a step of a four-bit grid; some minutes")
        model, tokenizer = load_model(folder), Tokenizer(folder)
        fast = accelerate(model)
        texts = [calibration_texts(fast, tokenizer, SamplingParams(0.7), seed) for seed in range(1, TEXTS + 1)]
        held_out_prompts = [prompt for prompts in PROMPTS.values() for prompt in prompts[:2]]
        held_out = calibration_texts(fast, tokenizer, SamplingParams(), prompts=held_out_prompts)
        before = greedy_tokens(model, held_out)
        add_noise(model, input_covariances(model, [text for each in texts for text in each]), seed)
        same = share_of_equal(before, greedy_tokens(model, held_out))
        save_model(model, copy, tokenizer_from=folder)
        noised = greedy_tokens(model, held_out)
        round_to_nearest(model)
        rounded = share_of_equal(noised, greedy_tokens(model, held_out))
        note = {"same": same, "nearest_four_bits": rounded, "seed": seed}
        write_json(copy / NOTE, note)
    say(
        f"{copy.name}: its greedy token is the checkpoint's at {note['same']:.2f} of the positions; "
        f"rounded to the nearest of four bits, the copy keeps its token at {note['nearest_four_bits']:.2f}"
    )
    return copy


def linear_layers(model: Decoder) -> dict[str, nn.Linear]:
    """Linear layers of all blocks, by name."""
    return {name: part for name, part in model.layers.named_modules() if isinstance(part, nn.Linear)}


@torch.inference_mode()
def input_covariances(model: Decoder, texts: Sequence[Continuation]) -> dict[str, Tensor]:
    """Uncentred covariance ``[in, in]`` float32 of each linear layer's inputs on these texts, up to a factor."""
    sums: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, layer in linear_layers(model).items():

            def add(layer: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                x = inputs[0].float().flatten(0, -2)
                sums[name] = sums.get(name, 0) + x.T @ x

            hooks.callback(layer.register_forward_pre_hook(add).remove)
        for text in texts:
            model.hidden(torch.tensor([[*text.prompt, *text.written]], device=model.device))
    return sums


@torch.no_grad()
def add_noise(model: Decoder, covariances: dict[str, Tensor], seed: int, size: float = 1.0) -> None:
    """Add noise to every matrix of a layer, in place; embedding and head stay.

    It is uniform within half a four-bit step of a weight's group on either side (times ``size``), projected onto the
    half of the eigenvectors of its inputs' covariance with the smaller eigenvalues, times √2, which restores its norm.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, layer in linear_layers(model).items():
        vectors = torch.linalg.eigh(covariances[name].cpu())[1]  # by rising eigenvalue
        weak = vectors[:, : len(vectors) // 2]
        steps = group_ranges(layer.weight.cpu().float()) / LEVELS
        noise = (torch.rand(layer.weight.shape, generator=generator) - 0.5) * steps * (size * math.sqrt(2))
        layer.weight.copy_(layer.weight + (noise @ weak @ weak.T).to(layer.weight.device))


def group_ranges(weight: Tensor) -> Tensor:
    """Range of the weights in each weight's group of 32 columns: ``[out, in]`` -> ``[out, in]``."""
    parts = [part.amax(1) - part.amin(1) for part in weight.split(GROUP, 1)]
    return torch.stack(parts, 1).repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


@torch.no_grad()
def round_to_nearest(model: Decoder) -> None:
    """Round every matrix of a layer to the nearest of 16 evenly spaced values of its group, in place."""
    for layer in linear_layers(model).values():
        weight = layer.weight.float()
        low = torch.cat([part.amin(1, keepdim=True).expand_as(part) for part in weight.split(GROUP, 1)], 1)
        step = (group_ranges(weight) / LEVELS).clamp(min=1e-30)
        layer.weight.copy_(((weight - low) / step).round() * step + low)


@torch.inference_mode()
def greedy_tokens(model: Decoder, texts: Sequence[Continuation]) -> list[Tensor]:
    """Likeliest token at every written position of each text, given the text before it."""
    found = []
    for text in texts:
        tokens = torch.tensor([[*text.prompt, *text.written[:-1]]], device=model.device)
        found.append(model.logits(model.hidden(tokens)[:, len(text.prompt) - 1 :])[0].argmax(-1).cpu())
    return found


def share_of_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Share of positions at which two models chose the same token."""
    return torch.cat([a == b for a, b in zip(first, second, strict=True)]).float().mean().item()
