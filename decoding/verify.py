"""The acceptance rule: what makes speculation exact."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.randomness import Randomness


def verify(target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Randomness) -> tuple[Tensor, Tensor]:
    """Accept a prefix of the draft and draw the token after it (arXiv 2211.17192, algorithm 1; 2302.01318).

    ``target_probs`` p ``[k + 1, vocab]``, ``draft_probs`` q ``[k, vocab]``, ``drafted`` ``[k]`` ids drawn
    from the rows of q; p and q are compared in the wider of their dtypes, so that neither is rounded.
    Returns ``(accepted, next_token)``: how many drafted tokens to keep, ``[]`` int64, and the token that
    follows them, ``[]`` int64.

    Drafted token x is kept with probability min(1, p(x) / q(x)); at the first one that is not, the next
    token comes from the residual norm(max(0, p - q)). Either way its law is p:
    q·min(1, p/q) + (1 - Σ min(p, q)) · norm(max(0, p - q)) = min(p, q) + max(0, p - q) = p.
    After the last drafted token q is nothing, so the residual there is p itself: the bonus token.
    """
    wide = torch.promote_types(target_probs.dtype, draft_probs.dtype)
    target_probs, draft_probs = target_probs.to(wide), draft_probs.to(wide)
    p_drafted, q_drafted = (rows.gather(1, drafted[:, None])[:, 0] for rows in (target_probs[:-1], draft_probs))
    # A token that its own q calls impossible (a draft whose numbers broke) was not drawn from q: never accepted.
    kept = torch.where(q_drafted > 0, p_drafted / q_drafted, 0.0)
    accepted = randomness.accept(kept).long().cumprod(0).sum()
    # By index_select: an index in brackets is read by the host, which on a GPU would wait for it.
    p = target_probs.index_select(0, accepted[None])[0]
    q = torch.cat((draft_probs, torch.zeros_like(target_probs[-1:]))).index_select(0, accepted[None])[0]
    residual = (p - q).clamp(min=0)
    # p = q up to rounding leaves nothing over; such a rejection has probability ~0, and p is its limit.
    return accepted, randomness.draw(torch.where(residual.sum() > 0, residual, p))
