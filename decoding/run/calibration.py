"""Calibration: texts that a model writes itself, and the mean squares of its linear layers' inputs
on them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cli.command_line import say
from decoding.randomness import inverse_cdf
from decoding.run.prompt import encode_prompt
from decoding.sampling import SamplingParams, distribution
from model import Decoder, InputError, LayerPlan, fast, quantise
from model.errors import NON_FINITE
from model.places import version
from weights.kept import KeptTensors
from weights.tokenizer import Tokenizer

PROMPTS_FILE = Path(__file__).with_name("prompts.txt")
PROMPTS = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
# the files that determine importance, rounding and packing
SOURCES = [Path(__file__), PROMPTS_FILE, Path(quantise.__file__)]
SOURCES += Path(fast.__file__).with_name("cpu").glob("*.py")
TOKENS = 48  # written after each prompt


@dataclass(frozen=True)
class Continuation:
    """A prompt and the tokens that the target wrote after it, at least one each.

    ``unused`` tokens of the budget were left when the text ended (0: the budget ended it).
    """

    prompt: tuple[int, ...]
    written: tuple[int, ...]
    unused: int = 0


@torch.inference_mode()
def sample_texts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    params: SamplingParams,
    eos_ids: Collection[int],
    seed: int,
) -> list[list[int]]:
    """The model's continuation of each prompt, of one token or more; greedy at temperature 0.

    All rows advance together, one position per step. Within its prompt a row takes the prompt's
    next token, after it a drawn one. There is no padding. A text ends with the first of
    ``eos_ids``, which it keeps, after ``max_new_tokens`` or at the end of the context. Row i draws
    by uniform random numbers from ``seed`` and i, one per output token: its text does not depend on
    the other rows, up to rounding. Raises InputError for a prompt that does not fit the context,
    and for non-finite logits.
    """
    if (longest := max(map(len, prompts), default=0)) >= model.max_positions:
        raise InputError(
            f"a prompt has {longest} tokens: the model's context ends after {model.max_positions}"
        )
    if not prompts:
        return []
    starts = torch.tensor([len(prompt) for prompt in prompts])
    ends = (starts + max_new_tokens).clamp(max=model.max_positions)
    rows = len(prompts)
    capacity = int(ends.max())
    tokens = torch.zeros(rows, capacity, dtype=torch.int64)
    uniform = torch.zeros(rows, capacity, dtype=torch.float64)  # of the token at each position
    for row, prompt in enumerate(prompts):
        stream = np.random.default_rng(np.random.SeedSequence(seed % 2**64, spawn_key=(row,)))
        tokens[row, : starts[row]] = torch.tensor(prompt)
        uniform[row, starts[row] : ends[row]] = torch.from_numpy(
            stream.random(int(ends[row] - starts[row]))
        )
    eos = torch.tensor(sorted(eos_ids), dtype=torch.int64)
    tokens, uniform, starts, ends, eos = (
        each.to(model.device) for each in (tokens, uniform, starts, ends, eos)
    )
    cache = model.new_cache(capacity, batch=rows)
    first = int(starts.min())
    model.prefill(tokens[:, : first - 1], cache)
    for position in range(first, capacity):
        logits = model(tokens[:, position - 1 : position], cache, position - 1)[:, -1]
        if not logits.isfinite().all():
            raise InputError(NON_FINITE)
        if params.repetition_penalty == 1:
            # ``distribution`` takes its rows for positions of one text, here that of the first row.
            # Only the repetition penalty reads it.
            probs = distribution(logits, tokens[0, :position], params)
        else:
            parts = zip(logits.split(1), tokens[:, :position], strict=True)
            probs = torch.cat([distribution(row, text, params) for row, text in parts])
        drawn = inverse_cdf(probs, uniform[:, position])
        writes = (starts <= position) & (position < ends)
        tokens[:, position] = torch.where(writes, drawn, tokens[:, position])
        ends = torch.where(writes & torch.isin(drawn, eos), position + 1, ends)
        if (ends <= position + 1).all():
            break
    spans = zip(tokens.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [text[start:end] for text, start, end in spans]


def calibration_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    params: SamplingParams,
    seed: int = 0,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = TOKENS,
) -> list[Continuation]:
    """The model's continuations of those prompts that fit its context, up to ``tokens`` tokens
    each.
    """
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    fitting = [ids for ids in encoded if len(ids) < model.max_positions]
    texts = sample_texts(
        model,
        fitting,
        max_new_tokens=tokens,
        params=params,
        eos_ids=tokenizer.eos_ids,
        seed=seed,
    )
    return [
        Continuation(tuple(prompt), tuple(text), tokens - len(text))
        for prompt, text in zip(fitting, texts, strict=True)
    ]


def linear_layers(model: Decoder) -> dict[str, nn.Module]:
    """The layers whose weights a draft may round, by name: the blocks' linear layers, and the head
    or its embedding.
    """
    layers = {
        name: part for name, part in model.layers.named_modules() if isinstance(part, nn.Linear)
    }
    return layers | {"head": model.lm_head or model.embed_tokens}


@torch.inference_mode()
def input_squares(
    model: Decoder,
    texts: Sequence[Continuation],
    square: Callable[[Tensor], Tensor] = lambda x: x.square().sum(0),
) -> dict[str, Tensor]:
    """Mean square ``[in]`` float32 of each input of every linear layer on these texts, by the
    layer's name.

    ``square`` may be another sum over the rows of float32 inputs ``[n, in]``.
    """
    sums: dict[str, Tensor | float] = dict.fromkeys(linear_layers(model), 0.0)

    def add(name: str, x: Tensor) -> None:
        sums[name] = sums[name] + square(x.float().flatten(0, -2))

    with ExitStack() as hooks:
        for name, layer in linear_layers(model).items():
            if name != "head":
                hook = layer.register_forward_pre_hook(lambda _, x, name=name: add(name, x[0]))
                hooks.enter_context(hook)
        for text in texts:
            ids = torch.tensor([[*text.prompt, *text.written]], device=model.device)
            add("head", model.norm(model.hidden(ids)))
    count = sum(len(text.prompt) + len(text.written) for text in texts)
    return {name: total / count for name, total in sums.items()}


def low_bit_steps(
    model: Decoder, plan: LayerPlan, kept: KeptTensors, tokenizer: Tokenizer
) -> Iterator[None]:
    """Get a plan's low-bit copies into memory, in steps of one matrix or one calibration text.

    Those that are kept are mapped, all before the first step. The others are made and kept. A text
    may be written between two steps, but not drafted under the plan.
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
    for layer, bits in missing:
        kept.write(f"{names[layer]}.{bits}", model.make_copy(layer, bits))
        yield
    kept.drop_oldest()


def kept_of(model: Decoder, folder: Path) -> KeptTensors:
    """The kept tensors of a model that was loaded from this folder."""
    return KeptTensors(folder, model.dtype, version(SOURCES))


def importance_steps(model: Decoder, kept: KeptTensors, tokenizer: Tokenizer) -> Iterator[None]:
    """Set the model's ``importance`` of every linear layer's inputs, in steps of one text: the mean
    square over the prompts, or what is kept of it.
    """
    layers = linear_layers(model)
    if model.importance:
        return
    found = kept.read("importance")
    if found is None:
        means = []
        for prompt in PROMPTS:
            ids = encode_prompt(tokenizer, prompt)[: model.max_positions]
            squares = input_squares(model, [Continuation(tuple(ids), ())])
            means.append(torch.cat([squares[name].cpu() for name in layers]))
            yield
        found = torch.stack(means).mean(0)
        kept.write("importance", found)
    sizes = [layer.weight.shape[1] for layer in layers.values()]
    parts = found.view(torch.float32).split(sizes)
    model.importance.update(zip(layers.values(), parts, strict=True))
