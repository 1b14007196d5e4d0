"""Weights off the four-bit grid: a copy of a checkpoint with noise that hardly changes its text.

The weights of a checkpoint that was made from a four-bit file lie on the grid of a four-bit draft.
Its draft is nearly the model itself, which says little about other checkpoints. The copy gets noise
of up to half a rounding step, in the half of the input directions that text uses least. It writes
almost the same text, and rounding changes its weights.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from app.command_line import say
from app.prompt import encode_prompt
from decoding.sampling import SamplingParams
from model import Decoder
from model.fast import accelerate
from model.quantise import GROUP, LEVELS
from search.texts import PROMPTS, Continuation
from training.corpus.sampling import sample_texts
from weights.importance import PROMPTS as CALIBRATION
from weights.importance import input_squares, linear_layers
from weights.load import load_model
from weights.save import save_model
from weights.tokenizer import Tokenizer

TOKENS = 48  # of each text
TEXTS = 8  # sets of texts that the inputs are measured on


def off_grid_folder(folder: Path) -> Path:
    """Folder of the copy, beside the checkpoint's; made if it is missing."""
    copy = folder.with_name(f"{folder.name}-off-grid")
    if (copy / "model.safetensors").exists():
        return copy
    say(
        f"making {copy.name}: noise in its weights, within half a step of a four-bit grid; some"
        " minutes"
    )
    model = load_model(folder)
    # It shares the model's weights: later texts are those of the noised model.
    write = partial(own_texts, accelerate(model), Tokenizer(folder))
    texts = [text for seed in range(1, TEXTS + 1) for text in write(SamplingParams(0.7), seed)]
    prompts = [prompt for some in PROMPTS.values() for prompt in some[:2]]
    held_out = write(SamplingParams(), prompts=prompts)
    add_noise(model, texts, seed=0)
    save_model(model, copy, tokenizer_from=folder)
    say(
        f"its greedy token is the checkpoint's at {share_kept(model, held_out):.2f} of the"
        " positions of a text"
    )
    own = write(SamplingParams(), prompts=[some[2] for some in PROMPTS.values() if some[2:]])
    round_to_nearest(model)
    say(
        "rounded to the nearest of four bits, that share of its own texts is"
        f" {share_kept(model, own):.2f}"
    )
    return copy


def own_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    params: SamplingParams,
    seed: int = 0,
    prompts: Sequence[str] = CALIBRATION,
) -> list[Continuation]:
    """The model's continuations of those prompts that fit its context, up to ``TOKENS`` tokens
    each.
    """
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    fitting = [ids for ids in encoded if len(ids) < model.max_positions]
    texts = sample_texts(
        model,
        fitting,
        max_new_tokens=TOKENS,
        params=params,
        eos_ids=tokenizer.eos_ids,
        seed=seed,
    )
    return [
        Continuation(tuple(prompt), tuple(text), TOKENS - len(text))
        for prompt, text in zip(fitting, texts, strict=True)
    ]


@torch.no_grad()
def add_noise(model: Decoder, texts: Sequence[Continuation], seed: int) -> None:
    """Add noise to every matrix of a layer, in place; embedding and head stay.

    It is uniform within half a four-bit step of a weight's group, projected onto the half of the
    eigenvectors with the smaller eigenvalues of its inputs' uncentred covariance on these texts,
    times √2, which restores its norm.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [text.prompt + text.written for text in texts]
    covariances = input_squares(model, ids, lambda x: x.T @ x)
    for name, weight in matrices(model).items():
        vectors = torch.linalg.eigh(covariances[name].cpu())[1]  # by rising eigenvalue
        weak = vectors[:, : len(vectors) // 2]
        _, step = four_bit_grid(weight.cpu())
        noise = (torch.rand(weight.shape, generator=generator) - 0.5) * step
        weight.copy_(weight + (math.sqrt(2) * noise @ weak @ weak.T).to(weight.device))


@torch.no_grad()
def round_to_nearest(model: Decoder) -> None:
    """Round the same matrices to the nearest values of their four-bit grids, in place."""
    for weight in matrices(model).values():
        low, step = four_bit_grid(weight)
        weight.copy_(low + step * ((weight - low) / step.clamp(min=1e-30)).round())


def matrices(model: Decoder) -> dict[str, Tensor]:
    """The weights of the layers' linear layers by name, without the head's."""
    return {name: layer.weight for name, layer in linear_layers(model).items() if name != "head"}


def four_bit_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest value and step ``[out, in]`` of an even grid of 16 values for each weight's group of
    columns.
    """
    groups = weight.float().split(GROUP, 1)
    low = torch.cat([part.amin(1, keepdim=True).expand_as(part) for part in groups], 1)
    high = torch.cat([part.amax(1, keepdim=True).expand_as(part) for part in groups], 1)
    return low, (high - low) / LEVELS


@torch.inference_mode()
def share_kept(model: Decoder, texts: Sequence[Continuation]) -> float:
    """Share of the written tokens that are the model's likeliest ones, given the text before
    them.
    """
    kept = []
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.written]], device=model.device)
        states = model.hidden(ids[:, :-1])[:, len(text.prompt) - 1 :]
        kept += (model.logits(states).argmax(-1) == ids[:, len(text.prompt) :])[0].tolist()
    return sum(kept) / len(kept)
