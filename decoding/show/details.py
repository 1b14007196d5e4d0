"""The probabilities behind a round, for those who want to look: what draft and target thought of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.drafters import Draft
from decoding.sampling import SamplingParams

TOP = 5  # how many of the likeliest tokens are kept


@dataclass(frozen=True)
class Detail:
    """What draft and target thought of one token: a drafted one, or the target's.

    ``draft_prob``    q(token), with which a drafted token was drawn; None where the draft had nothing to say
    ``target_prob``   p(token)
    ``draft_top``, ``target_top``  ``(token, probability)`` of the likeliest tokens at this position, best
    first, and of this token. They are those of q and p, but in greedy decoding, where q and p are one-hot,
    raw softmax probabilities (a drafter that keeps none shows its one-hot q).
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

    ``logits`` and ``target_probs`` p are ``[k + 1, vocab]``. That token stands in row ``accepted``: where
    that is the row of a rejected token, the draft had a probability for it too. Reads the host.
    """
    length = len(draft.tokens)
    rows = [*range(length), accepted]
    tokens = torch.cat((draft.tokens, token[None]))
    draft_shown, target_shown = draft.probs, target_probs
    if params.temperature == 0:
        if draft.logits:
            draft_shown = torch.softmax(torch.cat(list(draft.logits)).float(), dim=-1)
        target_shown = torch.softmax(logits.float(), dim=-1)
    details = []
    for row, token in zip(rows, tokens.tolist(), strict=True):
        drafted = row < length
        details.append(
            Detail(
                token,
                draft.probs[row, token].nan_to_num(0.0).item() if drafted else None,
                target_probs[row, token].item(),
                likeliest(draft_shown[row], token) if drafted else [],
                likeliest(target_shown[row], token),
            )
        )
    return details


def likeliest(probs: Tensor, token: int) -> list[tuple[int, float]]:
    """The ``TOP`` likeliest tokens of ``[vocab]`` probabilities, best first, then ``token`` if not among them.

    Tokens of probability 0 are left out of the first, as are all of a draft whose numbers broke.
    """
    best = probs.nan_to_num(0.0).topk(min(TOP, len(probs)))
    top = [(i, p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if p > 0]
    return top if any(i == token for i, _ in top) else [*top, (token, probs[token].nan_to_num(0.0).item())]
