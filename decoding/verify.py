"""Rules of verification: the ratio rule and the race. Under either, speculation has the target's distribution."""

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
    """Accept a prefix of the draft and draw the token after it (arXiv 2211.17192, algorithm 1; 2302.01318).

    ``target_probs`` p ``[k + 1, vocab]``, ``draft_probs`` q ``[k, vocab]``, ``drafted`` ``[k]`` ids drawn
    from the rows of q, the first at ``place``; p and q are compared in the wider of their dtypes, so that neither is
    rounded. Returns ``(accepted, next_token)``: how many drafted tokens to keep, ``[]`` int64, and the token that
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
    # By index_select: an index in brackets is read by the host, which on a GPU synchronises.
    p = target_probs.index_select(0, accepted[None])[0]
    if not len(drafted):
        return accepted, randomness.draw(p, place)
    last = len(drafted) - 1
    q = draft_probs.index_select(0, accepted.clamp(max=last)[None])[0] * (accepted <= last)
    residual = (p - q).clamp(min=0)
    # p = q up to rounding leaves nothing over; such a rejection has probability ~0, and p is its limit.
    return accepted, randomness.draw(torch.where(residual.sum() > 0, residual, p), place)


def verify_by_race(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Randomness, place: Place
) -> tuple[Tensor, Tensor]:
    """Draw the target's token at every place and keep the drafts that equal it (arXiv 2408.07978); as above.

    The text is then what plain decoding draws at the same places, whatever was drafted: q is never read, and even a
    drafter that misstates it changes nothing. A draft that raced with the same exponentials is kept with probability
    Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x), less than the ratio rule's Σ min(p, q); one that was sure of x, with p(x).
    """
    drawn = randomness.draw_each(target_probs, place)
    accepted = (drawn[:-1] == drafted).long().cumprod(0).sum()
    return accepted, drawn.index_select(0, accepted[None])[0]


Verify = Callable[[Tensor, Tensor, Tensor, Randomness, Place], tuple[Tensor, Tensor]]


COUPLINGS: dict[str, tuple[Callable[[int, torch.device | str, int], Randomness], Verify]] = {
    "ratio": (SeededRandomness, verify_by_ratio),
    "race": (KeyedRandomness, verify_by_race),
}


@dataclass(frozen=True)
class Coupling:
    """Rule of verification and seed: all that a drawn text depends on besides its request.

    ``name`` is a key of ``COUPLINGS``; ``sample`` numbers the texts of one request.
    """

    name: str
    seed: int
    sample: int = 0

    @staticmethod
    def of(name: str | None, seed: int | None) -> Coupling:
        """The race where a seed is given and the ratio rule where none is, unless named; a missing seed is made up.

        Raises InputError for a seed outside 64 bits.
        """
        if seed is not None and not 0 <= seed < 2**64:
            raise InputError(f"--seed must be from 0 to 2^64 - 1, found {seed}")
        name = name or ("ratio" if seed is None else "race")
        return Coupling(name, secrets.randbelow(2**32) if seed is None else seed)

    def __str__(self) -> str:
        """The options that repeat the text."""
        return f"--seed {self.seed} --coupling {self.name}"

    def randomness(self, device: torch.device | str = "cpu") -> Randomness:
        """Randomness of the text, from its beginning."""
        return COUPLINGS[self.name][0](self.seed, device, self.sample)

    @property
    def verify(self) -> Verify:
        """The rule that goes with this randomness."""
        return COUPLINGS[self.name][1]
