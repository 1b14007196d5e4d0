"""Many texts at a time: the batched sampler behind the calibration text of the plan search and the corpus writer.

There is no padding. The rows of a batch advance together, a position a step: a row whose prompt is longer than
that takes its prompt's next token, the others a token drawn for them. Each row has a random stream of its own, which
is not that of ``generate.py``: a seed means other texts here, and steps of many rows round otherwise in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from decoding.randomness import inverse_cdf
from decoding.sampling import SamplingParams, distribution
from decoding.text import Rules
from model import Decoder, InputError
from model.diagnose import explain_nonfinite

BATCH = 128
TIES = 2  # times top-k candidates are looked at: tokens as likely as the last of them stay
COMPACT_SHARE = 0.75  # ended rows leave the batch once no more than this share of its rows is alive


@dataclass
class Rows:
    """The texts of a batch that are still in its cache, one row each.

    ``index`` ``[rows]`` says which prompt a row continues; ``tokens`` ``[rows, capacity]`` int64 hold prompt and
    output; ``prompts`` and ``ends`` ``[rows]`` are the positions where the output begins and where the text
    ends at the latest; ``numbers`` ``[rows, max_new_tokens]`` float64 in [0, 1) are all the chance there is.
    """

    index: Tensor
    tokens: Tensor
    prompts: Tensor
    ends: Tensor
    numbers: Tensor

    def select(self, which: Tensor) -> Rows:
        """The rows at these places, ``[n]`` int64."""
        return Rows(*(getattr(self, field.name)[which] for field in fields(self)))

    def output(self) -> Iterator[tuple[int, list[int]]]:
        """The index and the output of each row."""
        columns = (self.index, self.prompts, self.ends, self.tokens)
        for index, prompt, end, tokens in zip(*(column.tolist() for column in columns), strict=True):
            yield index, tokens[prompt:end]


@torch.inference_mode()
def sample_texts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    params: SamplingParams,
    eos_ids: Collection[int],
    seed: int,
    batch: int = BATCH,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The model's continuation of each prompt, in their order; greedy at temperature 0.

    A text ends with the first of ``eos_ids`` (which it keeps), after ``max_new_tokens`` or where the model's
    context is full. Up to ``batch`` prompts of similar length are continued together. Row i draws from a random
    stream of its own, made of ``seed`` and i: its text does not depend on which rows share its batch, but for
    the rounding of the model's products. ``on_tokens`` hears how many tokens each step has written.
    Raises InputError for a prompt that is empty, does not fit the context or holds unknown ids, for
    ``max_new_tokens`` or ``batch`` below 1, and when the logits are not numbers.
    """
    Rules(max_new_tokens)  # refuses what is below 1
    if batch < 1:
        raise InputError(f"batch must be at least 1, found {batch}")
    for prompt in prompts:
        check_prompt(model, prompt)
    texts: list[list[int]] = [[] for _ in prompts]
    ends = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=model.device)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(prompts), batch):
        rows = lay_out(model, prompts, by_length[first : first + batch], max_new_tokens, seed)
        for index, text in write_rows(model, rows, params, ends, on_tokens):
            texts[index] = text
    return texts


def check_prompt(model: Decoder, prompt: Sequence[int]) -> None:
    """Raises InputError for a prompt that this model cannot continue."""
    if not 0 < len(prompt) < model.max_positions:
        raise InputError(
            f"a prompt has {len(prompt)} tokens: it must have from 1 to {model.max_positions - 1}, one less than the "
            "model's context"
        )
    if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
        raise InputError(
            f"a prompt holds a token id outside 0..{model.vocab_size - 1}, the ids of this model: use its own tokenizer"
        )


def lay_out(
    model: Decoder, prompts: Sequence[Sequence[int]], which: Sequence[int], max_new_tokens: int, seed: int
) -> Rows:
    """The prompts at these indices as rows, with room for their output and their random numbers."""
    lengths = torch.tensor([len(prompts[index]) for index in which])
    ends = (lengths + max_new_tokens).clamp(max=model.max_positions)
    tokens = torch.zeros(len(which), int(ends.max()), dtype=torch.int64)
    for row, index in enumerate(which):
        tokens[row, : lengths[row]] = torch.tensor(prompts[index])
    streams = [np.random.SeedSequence(seed % 2**64, spawn_key=(index,)) for index in which]
    most = int((ends - lengths).max())
    numbers = torch.from_numpy(np.stack([np.random.default_rng(stream).random(most) for stream in streams]))
    rows = (torch.tensor(which), tokens, lengths, ends, numbers)
    return Rows(*(column.to(model.device) for column in rows))


def write_rows(
    model: Decoder, rows: Rows, params: SamplingParams, eos_ids: Tensor, on_tokens: Callable[[int], None]
) -> Iterator[tuple[int, list[int]]]:
    """Continue all rows together until every text has ended; yields index and output of each, in no order."""
    batch, capacity = rows.tokens.shape
    cache = model.new_cache(capacity, batch=batch)
    position = int(rows.prompts.min())
    while True:
        # Invariant: every row has its token at each position before this one, and one row at least has none here.
        model.prefill(rows.tokens[:, cache.length : position - 1], cache, cache.length)
        logits = model(rows.tokens[:, position - 1 : position], cache, position - 1)[:, -1]
        ids, probs = row_distributions(logits, rows.tokens[:, :position], params)
        written = position - rows.prompts  # how many tokens of output a row has; below 0: still in its prompt
        numbers = rows.numbers.gather(1, written.clamp(0, rows.numbers.shape[1] - 1)[:, None])[:, 0]
        place = inverse_cdf(probs, numbers)[:, None]
        drawn = place[:, 0] if ids is None else ids.gather(1, place)[:, 0]
        own = (written >= 0) & (position < rows.ends)
        rows.tokens[:, position] = torch.where(own, drawn, rows.tokens[:, position])
        rows.ends = torch.where(own & torch.isin(drawn, eos_ids), position + 1, rows.ends)
        alive = rows.ends > position + 1
        # Of probability 0 is only what is drawn from a row of zeros: its logits were no numbers.
        broken = own & (probs.gather(1, place)[:, 0] == 0)
        soonest = torch.where(alive, rows.prompts, capacity).min()
        # The one read of the host in a step.
        new, left, unusable, soonest = torch.stack((own.sum(), alive.sum(), broken.sum(), soonest)).tolist()
        on_tokens(new)
        if unusable:
            text = rows.tokens[broken][0, :position]
            raise explain_nonfinite(model, model.new_cache(position), text)
        if not left:
            break
        if left <= COMPACT_SHARE * len(alive):
            yield from rows.select((~alive).nonzero()[:, 0]).output()
            kept = alive.nonzero()[:, 0]
            rows = rows.select(kept)
            cache.keep_rows(kept)
        position = max(position + 1, soonest)
    yield from rows.output()


def row_distributions(logits: Tensor, tokens: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """``[rows, vocab]`` logits, each row after its own text in ``tokens`` ``[rows, n]`` -> ids and probabilities.

    ``distribution`` takes its rows for one text's successive positions, but only the repetition penalty looks
    at that text: without one, all rows can go together. With a top-k, the rest of the vocabulary is left out
    before the arithmetic, which is half of a step's time otherwise: ids ``[rows, n]`` then name what the columns
    of the probabilities stand for, in their order in the vocabulary, and are None where nothing was left out.
    """
    if params.repetition_penalty != 1:
        rows = zip(logits, tokens, strict=True)
        return None, torch.cat([distribution(row[None], text, params) for row, text in rows])
    if not 0 < TIES * params.top_k < logits.shape[-1]:
        return None, distribution(logits, tokens[0], params)
    ids = logits.topk(TIES * params.top_k).indices.sort().values
    return ids, distribution(logits.gather(1, ids), tokens[0], params)
