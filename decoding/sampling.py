"""Distribution that tokens are drawn from, computed from logits.

One function serves draft, target, residual and bonus token: speculation is exact only if
"temperature 0.7, top-p 0.9" means the same for all four. Knows nothing of models and texts.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoding.rows import compute, first_least, running_sums
from model.errors import InputError

# On a CPU the filters see the tokens whose scores are at most this far below the largest: at the
# first distance that has enough of them.
DISTANCES = *range(4, 16, 2), math.inf


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, with the meaning and order that they have in transformers, and OpenAI's
    two penalties.

    Temperature 0 is greedy. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``repetition_penalty`` 1 and the
    other penalties 0 are off. Raises InputError.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        # Each condition is written so that NaN fails it.
        for name, is_valid, wanted in (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0 and finite"),
            (
                "top_k",
                type(self.top_k) is int and self.top_k >= 0,
                "a whole number of at least 0 (0: off)",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "from 1e-6 to 1e6"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
        ):
            if not is_valid:
                raise InputError(
                    f"{name.replace('_', '-')} must be {wanted}, found {getattr(self, name)}", name
                )


class Filters(NamedTuple):
    """Temperature and filters in the order in which they are applied; None: greedy, or no such
    filter. All are floats, ``top_k`` too, since ``compute`` makes tensors of floats alone: of
    another type, each number would be compiled anew.
    """

    temperature: float | None
    top_k: float | None
    top_p: float | None
    min_p: float | None

    @classmethod
    def of(cls, params: SamplingParams, vocab: int, dtype: torch.dtype) -> "Filters":
        """Return the filters of these parameters for scores ``[rows, vocab]`` of this dtype."""
        limits = torch.finfo(dtype)
        temperature = min(max(params.temperature, limits.tiny), limits.max)
        return cls(
            temperature=temperature if params.temperature else None,
            top_k=float(min(params.top_k, vocab)) or None,
            top_p=params.top_p if params.top_p < 1 else None,
            min_p=params.min_p or None,
        )


def distribution(
    logits: Tensor, context: Tensor, params: SamplingParams, allowed: Tensor | None = None
) -> Tensor:
    """Return the probabilities ``[rows, vocab]`` of logits ``[rows, vocab]``, in at least float32.

    ``context`` ``[n]`` holds the tokens up to the last row. Row t follows ``context[: n - rows + 1
    + t]``, so the penalties of a drafted position see the prefix of that position only.
    ``allowed`` is a bool mask ``[rows, vocab]``, applied before temperature and filters. A row
    without an allowed token of finite score, or with a NaN or +infinity, is all zeros. At
    temperature 0 a row is exactly one-hot at the first of the largest logits.
    """
    scores = logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0):
        scores = penalised(logits.to(wide), context, params)
    if allowed is not None:
        # The smaller of the score and -inf or inf: vectorised, unlike masked_fill. A NaN stays.
        ceiling = allowed.view(torch.uint8).to(scores.dtype).sub_(0.5).mul_(math.inf)
        scores = torch.minimum(scores, ceiling)
    scores = scores.to(wide)
    filters = Filters.of(params, scores.shape[-1], wide)
    if scores.device.type == "cpu":
        return torch.from_numpy(probabilities_by_few(scores.numpy(), filters))
    return compute(probabilities, scores, *filters)


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """Return the distributions ``[k, vocab]`` float32 of known tokens ``[k]``."""
    probs = torch.zeros(len(tokens), vocab, device=tokens.device)
    return probs.scatter_(1, tokens[:, None], 1.0)


def penalised(scores: Tensor, context: Tensor, params: SamplingParams) -> Tensor:
    """Return the scores ``[rows, vocab]`` after the penalties of the tokens in each row's prefix of
    the context, prompt included.

    The repetition penalty divides a positive score of such a token and multiplies a negative one.
    Then the frequency penalty is subtracted once per occurrence, the presence penalty once.
    """
    rows = torch.arange(len(scores), device=context.device)
    places = torch.arange(len(context), device=context.device)
    is_earlier = places <= rows[:, None] + len(context) - len(scores)
    counts = torch.zeros_like(scores)
    counts.scatter_add_(-1, context.expand(len(scores), -1), is_earlier.to(scores.dtype))
    once = counts.clamp(max=1)
    factor = params.repetition_penalty
    repeated = torch.where(scores < 0, scores * factor, scores / factor)
    scores = torch.where(once > 0, repeated, scores)
    return scores - params.frequency_penalty * counts - params.presence_penalty * once


def probabilities(
    scores: Tensor,
    temperature: float | None,
    top_k: float | None,
    top_p: float | None,
    min_p: float | None,
) -> Tensor:
    """Return the probabilities of scores ``[rows, vocab]``, in their dtype: see ``distribution``.

    The numbers are those of ``Filters``, one by one, since ``compute`` makes each a tensor.
    """
    filters = Filters(temperature, top_k, top_p, min_p)
    largest = scores.amax(-1, keepdim=True)  # or a NaN
    if temperature is None:
        ids = torch.arange(scores.shape[-1], device=scores.device)
        is_likeliest = ids == first_least(-scores)[:, None]
        return is_likeliest.logical_and(largest.isfinite()).to(scores.dtype)
    # Subtracting the largest score changes no probability, and prevents overflow at a tiny
    # temperature.
    probs = softmax(filtered((scores - largest) / temperature, filters))
    return torch.where(largest.isfinite(), probs, 0.0)


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax of rows whose largest score is 0, as it is in all rows here."""
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True)


def filtered(scores: Tensor, filters: Filters) -> Tensor:
    """Return the scores after the filters: a removed token has score -inf.

    A filter must be known to ``candidates`` too.
    """
    if filters.top_k is not None:
        descending = scores.sort(dim=-1, descending=True).values
        places = torch.arange(scores.shape[-1], device=scores.device)
        kth = descending.masked_fill(places >= filters.top_k, math.inf).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < kth, -math.inf)  # ties with the k-th stay
    if filters.top_p is not None:
        scores = scores.masked_fill(unlikely(softmax(scores), 1 - filters.top_p), -math.inf)
    if filters.min_p is not None:
        probs = softmax(scores)
        least = filters.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(probs < least, -math.inf)
    return scores


def unlikely(probs: Tensor, mass: float) -> Tensor:
    """Return the mask, bool ``[rows, vocab]``, of the most tokens whose probabilities sum to at
    most ``mass``, least likely first.

    Of equally likely tokens, the one with the smaller id comes first. The likeliest token is never
    in the mask.
    """
    ascending, order = probs.sort(dim=-1, stable=True)
    removed = running_sums(ascending) <= mass
    removed[..., -1] = False
    return torch.zeros_like(removed).scatter(-1, order, removed)


# The twin of `probabilities` on a CPU. It assumes that a filter removes the less likely tokens.


def probabilities_by_few(scores: np.ndarray, filters: Filters) -> np.ndarray:
    """Return the probabilities of scores on a CPU: the twin of ``probabilities``, row by row on one
    thread, whose filters see few tokens.

    A top-p row of 49,152 tokens takes .11 ms here and 3.8 by torch's sort, half a plain step. Torch
    would also divide a row among threads, which is much slower where another program has taken one
    of their cores.
    """
    probs = np.zeros_like(scores)
    for row, kept in zip(scores, probs, strict=True):
        likeliest = row.argmax()  # the first one, or a NaN
        if not np.isfinite(row[likeliest]):
            continue
        if filters.temperature is None:
            kept[likeliest] = 1
            continue
        # a score far below the largest, divided by a tiny temperature
        with np.errstate(over="ignore"):
            scaled = (row - row[likeliest]) / filters.temperature
        ids, of_few = candidates(scaled, filters)
        few = filtered(torch.from_numpy(scaled[ids]), of_few)
        kept[ids] = softmax(few).numpy()
    return probs


def candidates(scores: np.ndarray, filters: Filters) -> tuple[np.ndarray | slice, Filters]:
    """Return few ids, among them all that the filters keep, and the filters of these ids alone.

    Every token that passes all filters must be among the few, and pass all filters of the few. They
    are the tokens within some distance of the largest score, 0: so a filter must not remove a token
    and keep a less likely one. At least k of them are needed under top-k, else enough for top-p or
    min-p. Top-p is divided by their share of all probability; under top-k it counts among the k
    likeliest tokens alone.
    """
    _, top_k, top_p, min_p = filters  # a filter that is not known here is an error
    if not (top_k or top_p or min_p):
        return slice(None), filters
    weights = np.exp(scores) if top_p and not top_k else None
    of_few = filters
    for distance in DISTANCES:
        ids = np.flatnonzero(scores >= -distance)
        if weights is not None:
            mass = (weights[ids].sum() / weights.sum()).item()
            of_few = filters._replace(top_p=top_p / mass)
            enough = mass >= top_p
        elif top_k:
            enough = len(ids) >= top_k
        else:
            enough = math.exp(-distance) < min_p
        if enough:
            break
    return ids, of_few
