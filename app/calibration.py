"""Calibration: the mean squares of the inputs of a model's linear layers on some texts, by which
its low-bit copies are rounded; and these copies, made or kept.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from app.command_line import say
from app.prompt import encode_prompt
from model import Decoder, LayerPlan, fast, layer_positions, quantise, version
from weights.kept import KeptTensors
from weights.tokenizer import Tokenizer

PROMPTS_FILE = Path(__file__).with_name("prompts.txt")
PROMPTS = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
# the files that determine importance, rounding and packing
SOURCES = [Path(__file__), PROMPTS_FILE, Path(quantise.__file__)]
SOURCES += Path(fast.__file__).with_name("cpu").glob("*.py")


def linear_layers(model: Decoder) -> dict[str, nn.Module]:
    """The layers whose weights a draft may round, by name: the blocks' linear layers, and the head
    or its embedding.
    """
    layers = {
        name: part for name, part in model.layers.named_modules() if isinstance(part, nn.Linear)
    }
    return layers | {"head": model.lm_head or model.embed_tokens}


def input_squares(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    square: Callable[[Tensor], Tensor] = lambda x: x.square().sum(0),
) -> Iterator[dict[str, Tensor]]:
    """Mean square ``[in]`` float32 of each input of every linear layer on these texts of token ids,
    by the layer's name: what is found so far, after each block and text. The last is complete.

    ``square`` may be another sum over the rows of float32 inputs ``[n, in]``.
    """
    names = {layer: name for name, layer in linear_layers(model).items()}
    means: dict[str, Tensor] = {}
    count = sum(map(len, texts))

    def add(name: str, x: Tensor) -> None:
        means[name] = means.get(name, 0) + square(x.float().flatten(0, -2)) / count

    for text in texts:
        with torch.inference_mode():
            x = model.embed(torch.tensor([[*text]], device=model.device))
            positions = layer_positions(model.config, 0, len(text), x)
        for block, place in zip(model.layers, positions, strict=True):
            with torch.inference_mode(), ExitStack() as hooks:
                for part in filter(names.get, block.modules()):
                    name = names[part]
                    hook = part.register_forward_pre_hook(lambda _, x, name=name: add(name, x[0]))
                    hooks.enter_context(hook)
                x = block(x, place, None, attention=True, mlp=True)
            yield means
        with torch.inference_mode():
            add("head", model.norm(x))
        yield means


def low_bit_steps(
    model: Decoder, plan: LayerPlan, kept: KeptTensors, tokenizer: Tokenizer
) -> Iterator[None]:
    """Get a plan's low-bit copies into memory, in short steps: of a few million weights, or of one
    block that reads one calibration text.

    Those that are kept are mapped, all before the first step. The others are made, and each is
    kept as soon as it is made, by a thread of its own. A text may be written between two steps, but
    not drafted under the plan.
    """
    if not model.keeps_copies:  # ``prepare`` makes them
        yield from importance_steps(model, kept, tokenizer)
        return
    names = {layer: name for name, layer in linear_layers(model).items()}
    missing = []
    for layer, bits in model.missing_copies(plan):
        copy = kept.read(f"{names[layer]}.{bits}")
        if copy is None:
            missing.append((layer, bits))
        else:
            model.take_copy(layer, bits, copy)
    if not missing:
        return
    say("making this checkpoint's low-bit copies, kept for later runs")
    if any(bits == 4 for _, bits in missing):  # rounded by the importance of inputs
        yield from importance_steps(model, kept, tokenizer)
    with ThreadPoolExecutor(1, "keeping copies") as writer:
        for layer, bits in missing:
            yield from model.make_copy(layer, bits)
            writer.submit(kept.write, f"{names[layer]}.{bits}", model.low_bits[layer, bits])
    kept.drop_oldest()


def kept_of(model: Decoder, folder: Path) -> KeptTensors:
    """The kept tensors of a model that was loaded from this folder."""
    return KeptTensors(folder, model.dtype, version(SOURCES))


def importance_steps(model: Decoder, kept: KeptTensors, tokenizer: Tokenizer) -> Iterator[None]:
    """Set the model's ``importance`` of every linear layer's inputs, in short steps: the mean
    square over the prompts, or what is kept of it.
    """
    layers = linear_layers(model)
    if model.importance:
        return
    found = kept.read("importance")
    if found is None:
        prompts = [encode_prompt(tokenizer, prompt)[: model.max_positions] for prompt in PROMPTS]
        for squares in input_squares(model, prompts):  # noqa: B007  (the last is complete)
            yield
        found = torch.cat([squares[name].cpu() for name in layers])
        kept.write("importance", found)
    parts = found.view(torch.float32).split([layer.weight.shape[1] for layer in layers.values()])
    model.importance.update(zip(layers.values(), parts, strict=True))
