"""Importance of the inputs of a model's linear layers, measured once on text that the model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoding.run.acceptance import Continuation
from decoding.run.batch import write_texts
from decoding.sampling import SamplingParams
from decoding.text import Rules
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


def calibration_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    params: SamplingParams,
    seed: int = 0,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = TOKENS,
) -> list[Continuation]:
    """The model's continuations of those prompts that fit its context, up to ``tokens`` tokens each."""
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    fitting = [ids for ids in encoded if len(ids) < model.max_positions]
    return write_texts(model, fitting, params, Rules(tokens, tokenizer.eos_ids), seed)


def linear_layers(model: Decoder) -> dict[str, nn.Module]:
    """The layers whose weights a draft may round, by name: the blocks' linear layers, and the head or its embedding."""
    layers = {name: part for name, part in model.layers.named_modules() if isinstance(part, nn.Linear)}
    return layers | {"head": model.lm_head or model.embed_tokens}


@torch.inference_mode()
def input_squares(
    model: Decoder,
    texts: Sequence[Continuation],
    square: Callable[[Tensor], Tensor] = lambda x: x.square().sum(0),
) -> dict[str, Tensor]:
    """Mean square ``[in]`` float32 of each input of every linear layer on these texts, by the layer's name.

    ``square`` may be another sum over the rows of float32 inputs ``[n, in]``.
    """
    layers = linear_layers(model)
    sums: dict[str, Tensor] = {}

    def add(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, inputs: tuple[Tensor, ...], output: Any = None) -> None:
            x = inputs[0] if output is None else output
            sums[name] = sums.get(name, 0) + square(x.float().flatten(0, -2))

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
    """Set the ``importance`` of every linear layer's inputs, by which ``model.quantise`` rounds its weights.

    It is kept in the model's folder. Where that cannot be written, it is measured again at every start.
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
        squares = input_squares(model, calibration_texts(model, tokenizer, SamplingParams(temperature=1.0)))
        with suppress(OSError), atomic_path(folder / FILE) as temporary:
            save_file({name: each.cpu().contiguous() for name, each in squares.items()}, temporary)
    for name, layer in layers.items():
        layer.importance = squares[name]
