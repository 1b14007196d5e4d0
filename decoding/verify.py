"""Rules of verification, the ratio rule and the race: the text has the target's distribution.

Knows nothing of models and texts: a rule is a pure function of distributions and drawn tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.randomness import KeyedRandomness, Place, Randomness, SeededRandomness
from model.errors import InputError


def verify_by_ratio(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Randomness, place: Place
) -> tuple[Tensor, Tensor]:
    """The ratio rule: a prefix of the draft and the token after it (arXiv 2211.17192, 2302.01318).

    ``target_probs`` p ``[k + 1, vocab]``, ``draft_probs`` q ``[k, vocab]``, ``drafted`` ``[k]`` ids
    drawn from the rows of q, the first at ``place``. p and q are compared in the wider of their
    dtypes, so that neither is rounded. Returns ``(accepted, next_token)``, both ``[]`` int64: the
    number of accepted tokens and the token after them.

    Drafted token x is accepted with probability min(1, p(x) / q(x)). At the first rejection the
    next token is drawn from the residual norm(max(0, p - q)). Accepted or redrawn, the token at
    this place has the distribution p: q·min(1, p/q) + (1 - Σ min(p, q)) · norm(max(0, p - q)) =
    min(p, q) + max(0, p - q) = p. After the last drafted token q is zero, so the residual there is
    p itself: the bonus token.
    """
    if not len(drafted):  # plain decoding
        none = torch.zeros((), dtype=torch.int64, device=drafted.device)
        return none, randomness.draw(target_probs[0], place)
    wide = torch.promote_types(target_probs.dtype, draft_probs.dtype)
    target_probs = target_probs.to(wide)
    draft_probs = draft_probs.to(wide)
    p_drafted, q_drafted = (
        rows.gather(1, drafted[:, None])[:, 0] for rows in (target_probs[:-1], draft_probs)
    )
    # A token with q(x) = 0 was not drawn from q (the draft's logits were non-finite): it is never
    # accepted.
    ratios = torch.where(q_drafted > 0, p_drafted / q_drafted, 0.0)
    accepted = randomness.accept(ratios).long().cumprod(0).sum()
    # index_select, because an index in brackets is read by the host, which synchronises with a GPU.
    p = target_probs.index_select(0, accepted[None])[0]
    last = len(drafted) - 1
    q = draft_probs.index_select(0, accepted.clamp(max=last)[None])[0] * (accepted <= last)
    residual = (p - q).clamp(min=0)
    # Where p = q up to rounding, the residual is all zeros. Such a rejection has probability ~0,
    # and p is its limit.
    return accepted, randomness.draw(torch.where(residual.sum() > 0, residual, p), place)


def verify_by_race(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Randomness, place: Place
) -> tuple[Tensor, Tensor]:
    """The race: the target's token at every place, and the drafted ones that equal it.

    From arXiv 2408.07978; shapes as in ``verify_by_ratio``. The text is the one that plain decoding
    draws at the same places, for every draft: q is never read, so a drafter that misstates it
    changes nothing. A token drafted by the race with the same exponentials is accepted with
    probability Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x), at most the ratio rule's Σ min(p, q). A token
    x of a one-hot q is accepted with probability p(x).
    """
    drawn = randomness.draw_each(target_probs, place)
    if not len(drafted):  # plain decoding
        return torch.zeros_like(drawn[0]), drawn[0]
    # A row of zeros (no token is allowed, or the logits are non-finite) draws a meaningless token.
    p_drafted = target_probs[:-1].gather(1, drafted[:, None])[:, 0]
    accepted = p_drafted.logical_and(drawn[:-1] == drafted).cumprod(0).sum()
    return accepted, drawn.index_select(0, accepted[None])[0]


Verify = Callable[[Tensor, Tensor, Tensor, Randomness, Place], tuple[Tensor, Tensor]]

COUPLINGS: dict[str, tuple[Callable[[int, torch.device | str, int], Randomness], Verify]] = {
    "ratio": (SeededRandomness, verify_by_ratio),
    "race": (KeyedRandomness, verify_by_race),
}


@dataclass(frozen=True)
class Rule:
    """Rule of verification with its seed: they determine the text that is drawn after a prompt.

    ``name`` is a key of ``COUPLINGS``; ``sample`` numbers the texts of one prompt.
    """

    name: str
    seed: int
    sample: int = 0

    @staticmethod
    def of(name: str | None, seed: int | None) -> Rule:
        """Return the rule of this name, by default the race; a missing seed is random.

        Raises InputError for a seed outside 64 bits.
        """
        if seed is not None and not 0 <= seed < 2**64:
            raise InputError(f"--seed must be from 0 to 2^64 - 1, found {seed}", "seed")
        return Rule(name or "race", secrets.randbelow(2**32) if seed is None else seed)

    def __str__(self) -> str:
        """The command-line options that reproduce the text."""
        return f"--seed {self.seed} --coupling {self.name}"

    def randomness(self, device: torch.device | str = "cpu") -> Randomness:
        """A fresh source of randomness for one text."""
        return COUPLINGS[self.name][0](self.seed, device, self.sample)

    @property
    def verify(self) -> Verify:
        """The rule that goes with this randomness."""
        return COUPLINGS[self.name][1]
