"""Probabilities of draft and target for each token of a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.drafters import Draft
from decoding.sampling import SamplingParams

TOP = 5  # likeliest tokens that are kept
DIGITS = 6  # of a probability on the page: more than a reader compares, in half the bytes


@dataclass(frozen=True)
class Detail:
    """Probabilities of one token, a drafted one or the target's, and the likeliest tokens at its position.

    ``q``  the draft's probability of the token; None where nothing was drafted
    ``p``  the target's
    ``draft_top``, ``target_top``  ``(token, probability)`` of the likeliest tokens, best first, and of this token.
    They are those of q and p. In greedy decoding, where q and p are one-hot, they are raw softmax probabilities, but
    q's where the drafter keeps no logits. ``draft_top`` is empty where nothing was drafted.
    """

    id: int
    q: float | None
    p: float
    draft_top: list[tuple[int, float]]
    target_top: list[tuple[int, float]]


def examine(
    draft: Draft, logits: Tensor, target_probs: Tensor, accepted: int, token: Tensor, params: SamplingParams
) -> list[Detail]:
    """A ``Detail`` of each drafted token, then one of the target's ``token`` (``[]`` int64).

    ``logits`` and ``target_probs`` p are ``[k + 1, vocab]``. The target's token belongs to row ``accepted``; where a
    drafted token was rejected, the draft has probabilities of that row too. Reads the host.
    """
    drafted, shown = draft.probs, target_probs
    if params.temperature == 0:
        drafted = torch.softmax(torch.cat(list(draft.logits)).float(), dim=-1) if draft.logits else drafted
        shown = torch.softmax(logits.float(), dim=-1)

    def detail(row: int, token: int) -> Detail:
        p, target_top = probability(target_probs[row], token), likeliest(shown[row], token)
        if row == len(draft.tokens):
            return Detail(token, None, p, [], target_top)
        return Detail(token, probability(draft.probs[row], token), p, likeliest(drafted[row], token), target_top)

    return [*map(detail, range(len(draft.tokens)), draft.tokens.tolist()), detail(accepted, token.item())]


def likeliest(probs: Tensor, token: int) -> list[tuple[int, float]]:
    """The ``TOP`` likeliest tokens of ``[vocab]`` probabilities, best first, then ``token`` if not among them.

    Tokens of probability 0 or NaN are left out of the first.
    """
    best = probs.nan_to_num(0.0).topk(min(TOP, len(probs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    top = [(each, rounded(value)) for each, value in pairs if value > 0]
    return top if token in dict(top) else [*top, (token, probability(probs, token))]


def probability(probs: Tensor, token: int) -> float:
    """A token's entry of ``[vocab]`` probabilities, rounded; 0 for NaN."""
    return rounded(probs[token].nan_to_num(0.0).item())


def rounded(value: float) -> float:
    """A probability to ``DIGITS`` significant digits."""
    return float(f"{value:.{DIGITS}g}")
