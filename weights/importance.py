"""Importance of a model's weights: the mean square of each input of its linear layers on the
built-in prompts, by which low-bit copies are rounded.

A few kilobytes per model are kept in the user's cache folder, so that only the first start measures
them. They only save time: a file that cannot be read or written is passed over. Knows nothing of
plans and drafts.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.command_line import say
from app.files import atomic_path
from model.decoder import Decoder
from model.errors import InputError
from model.layers import layer_positions
from model.places import cache_folder, version
from weights.load import model_fingerprint
from weights.tokenizer import Tokenizer

PROMPTS_FILE = Path(__file__).with_name("prompts.txt")
PROMPTS = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()


def linear_layers(model: Decoder) -> dict[str, nn.Module]:
    """Return the layers whose weights a draft may round, by name: the blocks' linear layers, and
    the head or its embedding.
    """
    layers = {
        name: part for name, part in model.layers.named_modules() if isinstance(part, nn.Linear)
    }
    return layers | {"head": model.lm_head or model.embed_tokens}


@torch.inference_mode()
def input_squares(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    square: Callable[[Tensor], Tensor] = lambda x: x.square().sum(0),
) -> dict[str, Tensor]:
    """Return the mean square ``[in]`` float32 of each input of every linear layer on these texts of
    token ids, by the layer's name.

    ``square`` may be another sum over the rows of float32 inputs ``[n, in]``.
    """
    names = {layer: name for name, layer in linear_layers(model).items()}
    means: dict[str, Tensor] = {}
    count = sum(map(len, texts))

    def add(name: str, x: Tensor) -> None:
        means[name] = means.get(name, 0) + square(x.float().flatten(0, -2)) / count

    with ExitStack() as hooks:
        for part in filter(names.get, model.layers.modules()):
            name = names[part]
            hook = part.register_forward_pre_hook(lambda _, x, name=name: add(name, x[0]))
            hooks.enter_context(hook)
        for text in texts:
            x = model.embed(torch.tensor([[*text]], device=model.device))
            positions = layer_positions(model.config, 0, len(text), x)
            for block, place in zip(model.layers, positions, strict=True):
                x = block(x, place, None, attention=True, mlp=True)
            add("head", model.norm(x))
    return means


def importance(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Set ``model.importance`` of every linear layer, as it is kept, or else measured on the
    built-in prompts. ``folder`` is that of the model's files.
    """
    if model.importance:
        return
    layers = linear_layers(model)
    code = version([Path(__file__), PROMPTS_FILE])
    dtype = str(model.dtype).removeprefix("torch.")
    name = f"{model_fingerprint(folder)}-{dtype}-{code}.safetensors"
    path = cache_folder() / "importance" / name
    squares: dict[str, Tensor] = {}
    with suppress(OSError, SafetensorError):
        squares = load_file(path)
    if squares.keys() != layers.keys():
        say("measuring which weights matter, for rounding: once per checkpoint")
        ids = [encode(tokenizer, prompt)[: model.max_positions] for prompt in PROMPTS]
        squares = {name: means.cpu() for name, means in input_squares(model, ids).items()}
        with suppress(OSError, InputError, SafetensorError), atomic_path(path) as temporary:
            save_file(squares, temporary)
    model.importance.update({layers[name]: means for name, means in squares.items()})


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of a prompt, as a turn of a chat where there is a chat template."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])
