"""Sampling of many texts of a model at once, in rows of one batch."""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from decoding.randomness import inverse_cdf
from decoding.sampling import SamplingParams, distribution
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

    All rows advance together, one position per step. Within its prompt a row takes the prompt's
    next token, after it a drawn one. There is no padding. A text ends with the first of
    ``eos_ids``, which it keeps, after ``max_new_tokens`` or at the end of the context. Row i draws
    by uniform random numbers from ``seed`` and i, one per output token: its text does not depend on
    the other rows, up to rounding. A repetition penalty in ``params`` has no effect. Raises
    InputError for a prompt that does not fit the context, and for non-finite logits.
    """
    if (longest := max(map(len, prompts))) >= model.max_positions:
        raise InputError(
            f"a prompt has {longest} tokens: the model's context ends after {model.max_positions}"
        )
    starts = torch.tensor([len(prompt) for prompt in prompts])
    ends = (starts + max_new_tokens).clamp(max=model.max_positions)
    capacity = int(ends.max())
    tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64)
    # of the token at each position
    uniform = torch.zeros(len(prompts), capacity, dtype=torch.float64)
    for row, prompt in enumerate(prompts):
        stream = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(row,)))
        tokens[row, : starts[row]] = torch.tensor(prompt)
        uniform[row, starts[row] : ends[row]] = torch.from_numpy(
            stream.random(int(ends[row] - starts[row]))
        )
    eos = torch.tensor(sorted(eos_ids), dtype=torch.int64)
    tokens, uniform, starts, ends, eos = (
        each.to(model.device) for each in (tokens, uniform, starts, ends, eos)
    )
    cache = model.new_cache(capacity, batch=len(prompts))
    first = int(starts.min())
    model.prefill(tokens[:, : first - 1], cache)
    for position in range(first, capacity):
        logits = model(tokens[:, position - 1 : position], cache, position - 1)[:, -1]
        if not logits.isfinite().all():
            raise InputError(NON_FINITE)
        # The rows are of different texts: without a context there is no repetition penalty.
        probs = distribution(logits, tokens[0, :0], params)
        drawn = inverse_cdf(probs, uniform[:, position])
        writes = (starts <= position) & (position < ends)
        tokens[:, position] = torch.where(writes, drawn, tokens[:, position])
        ends = torch.where(writes & torch.isin(drawn, eos), position + 1, ends)
        if (ends <= position + 1).all():
            break
    spans = zip(tokens.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [text[start:end] for text, start, end in spans]
