"""Batched sampling: continuations of many prompts, all written in the same steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from decoding.randomness import inverse_cdf
from decoding.run.acceptance import Continuation
from decoding.sampling import SamplingParams, distribution
from decoding.text import Rules
from model import Decoder, InputError
from model.errors import NON_FINITE


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

    All rows advance together, one position per step. Within its prompt a row takes the prompt's next token, after it a
    drawn one. There is no padding. A text ends with the first of ``eos_ids``, which it keeps, after ``max_new_tokens``
    or at the end of the context. Row i draws by uniform random numbers from ``seed`` and i, one per output token: its
    text does not depend on the other rows, up to rounding. Raises InputError for a prompt that does not fit the
    context, and for non-finite logits.
    """
    if (longest := max(map(len, prompts), default=0)) >= model.max_positions:
        raise InputError(f"a prompt has {longest} tokens: the model's context ends after {model.max_positions}")
    if not prompts:
        return []
    starts = torch.tensor([len(prompt) for prompt in prompts])
    ends = (starts + max_new_tokens).clamp(max=model.max_positions)
    rows, capacity = len(prompts), int(ends.max())
    tokens = torch.zeros(rows, capacity, dtype=torch.int64)
    uniform = torch.zeros(rows, capacity, dtype=torch.float64)  # of the token at each position
    for row, prompt in enumerate(prompts):
        stream = np.random.default_rng(np.random.SeedSequence(seed % 2**64, spawn_key=(row,)))
        tokens[row, : starts[row]] = torch.tensor(prompt)
        uniform[row, starts[row] : ends[row]] = torch.from_numpy(stream.random(int(ends[row] - starts[row])))
    eos = torch.tensor(sorted(eos_ids), dtype=torch.int64)
    tokens, uniform, starts, ends, eos = (each.to(model.device) for each in (tokens, uniform, starts, ends, eos))
    cache, first = model.new_cache(capacity, batch=rows), int(starts.min())
    model.prefill(tokens[:, : first - 1], cache)
    for position in range(first, capacity):
        logits = model(tokens[:, position - 1 : position], cache, position - 1)[:, -1]
        if not logits.isfinite().all():
            raise InputError(NON_FINITE)
        drawn = inverse_cdf(_distributions(logits, tokens[:, :position], params), uniform[:, position])
        writes = (starts <= position) & (position < ends)
        tokens[:, position] = torch.where(writes, drawn, tokens[:, position])
        ends = torch.where(writes & torch.isin(drawn, eos), position + 1, ends)
        if (ends <= position + 1).all():
            break
    spans = zip(tokens.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [text[start:end] for text, start, end in spans]


def write_texts(
    model: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams, rules: Rules, seed: int = 0
) -> list[Continuation]:
    """The continuation of each prompt by ``sample_texts``, from which acceptance is measured."""
    limits = {"max_new_tokens": rules.max_new_tokens, "eos_ids": rules.eos_ids}
    written = sample_texts(model, prompts, params=params, seed=seed, **limits)
    pairs = zip(prompts, written, strict=True)
    return [Continuation(tuple(prompt), tuple(text), rules.max_new_tokens - len(text)) for prompt, text in pairs]


def _distributions(logits: Tensor, texts: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities ``[rows, vocab]`` after each of the ``texts`` ``[rows, n]``.

    ``distribution`` takes its rows for successive positions of one text. Only the repetition penalty reads that text.
    """
    if params.repetition_penalty == 1:
        return distribution(logits, texts[0], params)
    rows = zip(logits, texts, strict=True)
    return torch.cat([distribution(row[None], text, params) for row, text in rows])
