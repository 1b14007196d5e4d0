"""Importance of the inputs of a model's linear layers, measured once on text that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoding.randomness import SeededRandomness, inverse_cdf
from decoding.run.acceptance import Continuation
from decoding.sampling import SamplingParams, distribution
from model import Decoder
from weights.cli.files import atomic_path
from weights.cli.prompt import encode_prompt
from weights.tokenizer import Tokenizer

FILE = "calibration.safetensors"  # in the model's folder
PROMPTS = (
    "Why does it rain?",
    "Write a short story about a bird.",
    "How do I bake bread?",
    "Write a Python function that adds two numbers.",
    "Who was Marie Curie?",
    "Give me some advice for a long journey.",
    "Describe a town by the sea.",
    "What is a computer made of?",
)
TOKENS = 48  # written after each prompt


@torch.inference_mode()
def write_texts(
    model: Decoder, tokenizer: Tokenizer, params: SamplingParams, seed: int = 0, prompts: Sequence[str] = PROMPTS
) -> list[Continuation]:
    """The model's continuations of some prompts, up to ``TOKENS`` tokens each, sampled side by side.

    All texts take their steps together from position 0 on: while one is in its prompt, its next token is given.
    """
    given = [encode_prompt(tokenizer, prompt, chat=None, system=None) for prompt in prompts]
    length = min(max(map(len, given)) + TOKENS, model.max_positions)
    tokens = torch.zeros(len(given), length, dtype=torch.int64, device=model.device)
    for row, prompt in zip(tokens, given, strict=True):
        row[: len(prompt)] = torch.tensor(prompt[:length])
    cache, randomness = model.new_cache(length, len(given)), SeededRandomness(seed, model.device)
    for position in range(1, length):
        logits = model(tokens[:, position - 1 : position], cache, position - 1)[:, 0]
        for row, prompt, scores in zip(tokens, given, logits, strict=True):
            if position >= len(prompt):
                probs = distribution(scores[None], row[:position], params)
                row[position] = inverse_cdf(probs, randomness.uniform(1))[0]
    texts = []
    for row, prompt in zip(tokens.tolist(), given, strict=True):
        written = row[len(prompt) : len(prompt) + TOKENS]
        ends = [place + 1 for place, token in enumerate(written) if token in tokenizer.eos_ids]
        written = written[: min(ends, default=TOKENS)]
        if written:
            texts.append(Continuation(tuple(prompt), tuple(written), TOKENS - len(written)))
    return texts


def linear_layers(model: Decoder) -> dict[str, nn.Module]:
    """All layers whose weights a draft may round, by name: the blocks' linear layers, and the head or its embedding."""
    layers = {name: part for name, part in model.layers.named_modules() if isinstance(part, nn.Linear)}
    return layers | {"head": model.lm_head or model.embed_tokens}


@torch.inference_mode()
def input_squares(model: Decoder, texts: Sequence[Continuation]) -> dict[str, Tensor]:
    """The mean square of each input of every linear layer on these texts: ``[in]`` float32, by the layer's name."""
    layers = linear_layers(model)
    sums: dict[str, Tensor] = {}

    def add(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, inputs: tuple[Tensor, ...], output: Any = None) -> None:
            x = inputs[0] if output is None else output
            sums[name] = sums.get(name, 0) + x.float().square().flatten(0, -2).sum(0)

        return hook

    with ExitStack() as hooks:
        for name, layer in layers.items():
            if name != "head":
                hooks.callback(layer.register_forward_pre_hook(add(name)).remove)
        hooks.callback(model.norm.register_forward_hook(add("head")).remove)
        for text in texts:
            model.norm(model.hidden(torch.tensor([[*text.prompt, *text.written]], device=model.device)))
    count = sum(len(text.prompt) + len(text.written) for text in texts)
    return {name: squares / count for name, squares in sums.items()}


def weigh_inputs(model: Decoder, folder: Path, tokenizer: Tokenizer) -> None:
    """Give every linear layer the ``importance`` of its inputs, by which ``model.quantise`` rounds its weights.

    It is kept in the model's folder; without a folder that can be written it is measured again.
    """
    layers = linear_layers(model)
    if all(hasattr(layer, "importance") for layer in layers.values()):
        return
    shapes = {name: layer.weight.shape[1:] for name, layer in layers.items()}
    try:
        squares = load_file(folder / FILE)
    except (OSError, SafetensorError):
        squares = {}
    if {name: each.shape for name, each in squares.items()} != shapes:
        squares = input_squares(model, write_texts(model, tokenizer, SamplingParams(temperature=1.0)))
        with suppress(OSError), atomic_path(folder / FILE) as temporary:
            save_file({name: each.cpu().contiguous() for name, each in squares.items()}, temporary)
    for name, layer in layers.items():
        layer.importance = squares[name]
