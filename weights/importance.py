"""Importance of a linear layer's inputs: their mean squares on the built-in prompts.

Weights are rounded to few bits by it, those of important inputs with smaller errors. It is kept
between runs. Knows nothing of drafts.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.common.command_line import say
from app.common.files import atomic_path
from model.decoder import Decoder
from model.errors import InputError, one_line
from model.places import cache_folder, version
from weights.checkpoint import tokenizer_files
from weights.load import model_fingerprint
from weights.tokenizer import Tokenizer

PROMPTS_FILE = Path(__file__).with_name("prompts.txt")
PROMPTS = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()


def set_importance(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Set ``model.importance``, ``[in]`` float32 for every linear layer, unless it is set: read
    from the file of the model in ``folder``, or measured on the built-in prompts and written there.
    """
    if model.importance:
        return
    layers = linear_layers(model)
    path = importance_file(model, folder)
    found = {}
    with suppress(OSError, SafetensorError):  # absent or damaged
        found = load_file(path)
    if found.keys() != layers.keys():
        say("measuring the importance of this checkpoint's weights, kept for later runs")
        prompts = [encode(tokenizer, prompt)[: model.max_positions] for prompt in PROMPTS]
        found = {name: each.cpu() for name, each in input_means(model, prompts).items()}
        try:
            with atomic_path(path) as temporary:
                save_file(found, temporary)
        except (InputError, OSError, SafetensorError) as error:
            say(f"the importance is not kept, and measured at every start: {one_line(error)}")
    model.importance.update((layer, found[name]) for name, layer in layers.items())


def importance_file(model: Decoder, folder: Path) -> Path:
    """Return the file of a model, named by all that determines its importance."""
    dtype = str(model.dtype).removeprefix("torch.")
    # The files rather than the encoded prompts: a chat template may write today's date.
    sources = version([Path(__file__), PROMPTS_FILE, *tokenizer_files(folder)])
    name = f"{model_fingerprint(folder)}-{dtype}-{sources}.safetensors"
    return cache_folder() / "importance" / name


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return a prompt's token ids, as a user's turn where the model has a chat template for it."""
    with suppress(InputError):  # no template, or one that wants a system's turn before
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def linear_layers(model: Decoder) -> dict[str, nn.Module]:
    """Return the layers that a draft may have in few bits, by name: the blocks' linear layers, and
    the head or its embedding.
    """
    return {
        **{
            name: part for name, part in model.layers.named_modules() if isinstance(part, nn.Linear)
        },
        "head": model.lm_head or model.embed_tokens,
    }


@torch.inference_mode()
def input_means(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    statistic: Callable[[Tensor], Tensor] = lambda x: x.square().sum(0),
) -> dict[str, Tensor]:
    """Return the mean over all tokens of a statistic of every linear layer's inputs, float32, on
    these texts of token ids, by the layer's name.

    ``statistic`` is a sum over the rows of float32 inputs ``[n, in]``. By default it is that of the
    squares, ``[in]``. Another one is that of the products of all pairs, ``[in, in]``.
    """
    means: dict[str, Tensor] = {}
    count = sum(map(len, texts))

    def add(name: str, x: Tensor) -> None:
        means[name] = means.get(name, 0) + statistic(x.float().flatten(0, -2)) / count

    with ExitStack() as hooks:
        for name, layer in linear_layers(model).items():
            if name != "head":
                hook = layer.register_forward_pre_hook(lambda _, x, name=name: add(name, x[0]))
                hooks.enter_context(hook)
        for text in texts:
            states = model.hidden(torch.tensor([[*text]], device=model.device))
            add("head", model.norm(states))  # a tied one is an embedding, which is not called
    return means
