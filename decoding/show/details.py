"""Probabilities of draft and target for each token of a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.drafters import Draft
from decoding.sampling import SamplingParams

TOP = 5  # likeliest tokens that are kept


@dataclass(frozen=True)
class Detail:
    """Probabilities of one token, a drafted one or the target's, and the likeliest tokens at its position.

    ``draft_prob``    q(token), with which a drafted token was drawn; None where nothing was drafted
    ``target_prob``   p(token)
    ``draft_top``, ``target_top``  ``(token, probability)`` of the likeliest tokens, best first, and of this token.
    They are those of q and p, but in greedy decoding, where q and p are one-hot, raw softmax probabilities (a drafter
    that keeps no logits shows its one-hot q). ``draft_top`` is empty where nothing was drafted.
    """

    token: int
    draft_prob: float | None
    target_prob: float
    draft_top: list[tuple[int, float]]
    target_top: list[tuple[int, float]]


def examine(
    draft: Draft, logits: Tensor, target_probs: Tensor, accepted: int, token: Tensor, params: SamplingParams
) -> list[Detail]:
    """A ``Detail`` of each drafted token, then one of the target's ``token`` (``[]`` int64).

    ``logits`` and ``target_probs`` p are ``[k + 1, vocab]``. The target's token belongs to row ``accepted``, for which
    the draft has probabilities too where its token was rejected. Reads the host.
    """
    drafted, shown = draft.probs, target_probs
    if params.temperature == 0:
        drafted = torch.softmax(torch.cat(list(draft.logits)).float(), dim=-1) if draft.logits else drafted
        shown = torch.softmax(logits.float(), dim=-1)

    def detail(row: int, token: int) -> Detail:
        p, target_top = target_probs[row, token].item(), likeliest(shown[row], token)
        if row == len(draft.tokens):
            return Detail(token, None, p, [], target_top)
        return Detail(token, probability(draft.probs[row], token), p, likeliest(drafted[row], token), target_top)

    return [*map(detail, range(len(draft.tokens)), draft.tokens.tolist()), detail(accepted, token.item())]


def likeliest(probs: Tensor, token: int) -> list[tuple[int, float]]:
    """The ``TOP`` likeliest tokens of ``[vocab]`` probabilities, best first, then ``token`` if not among them.

    Tokens of probability 0 are left out of the first, as are all of a draft with non-finite numbers.
    """
    best = probs.nan_to_num(0.0).topk(min(TOP, len(probs)))
    top = [(i, p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if p > 0]
    return top if token in dict(top) else [*top, (token, probability(probs, token))]


def probability(probs: Tensor, token: int) -> float:
    """A token's entry of ``[vocab]`` probabilities; 0 for NaN."""
    return probs[token].nan_to_num(0.0).item()
