"""Rules of verification: the ratio rule, the race and block verification. Under each of them the
text has the target's distribution.

Knows nothing of models and texts: a rule depends on distributions, drafted tokens and the
randomness that it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.randomness import KeyedRandomness, Place, Randomness, SeededRandomness
from model.errors import InputError


def verify_by_ratio(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Randomness, place: Place
) -> tuple[Tensor, Tensor]:
    """Return the number of accepted tokens and the token after them, by the ratio rule (arXiv
    2211.17192, 2302.01318).

    ``target_probs`` p ``[k + 1, vocab]``, ``draft_probs`` q ``[k, vocab]``, ``drafted`` ``[k]`` ids
    drawn from the rows of q, the first at ``place``. p and q are compared in the wider of their
    dtypes, so that neither is rounded. Both results are ``[]`` int64.

    Drafted token x is accepted with probability min(1, p(x) / q(x)). At the first rejection the
    next token is drawn from the residual norm(max(0, p - q)). Accepted or redrawn, the token at
    this place has the distribution p: q·min(1, p/q) + (1 - Σ min(p, q)) · norm(max(0, p - q)) =
    min(p, q) + max(0, p - q) = p. After the last drafted token q is zero, so the residual there is
    p itself: the bonus token.
    """
    if not len(drafted):  # plain decoding
        return drafted.new_zeros(()), randomness.draw(target_probs[0], place)
    target_probs, draft_probs, ratios = in_ratio(target_probs, draft_probs, drafted)
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
    """Return the number of drafted tokens that equal the target's draws in the race, and the
    target's draw after them.

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


def verify_by_block(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Randomness, place: Place
) -> tuple[Tensor, Tensor]:
    """Return the number of accepted tokens and the token after them, by block verification (arXiv
    2403.10444).

    Shapes as in ``verify_by_ratio``. The draft is judged as a whole: on average at least as many
    tokens are kept as under the ratio rule. With x the drafted tokens,

        reach[0] = 1,  reach[i] = min(1, reach[i-1] · p(x[i]) / q(x[i]))
        R[i] = Σ_y max(0, reach[i] · p(y) − q(y)), with p and q after i drafted tokens
        h[i] = R[i] / (R[i] + 1 − reach[i]),  but h[k] = reach[k] for the whole draft

    and the LARGEST i with u[i] < h[i] is accepted, not those before the first failure. The next
    token is drawn from norm(max(0, reach[i] · p − q)), after the whole draft from p.
    """
    if not len(drafted):  # plain decoding
        return drafted.new_zeros(()), randomness.draw(target_probs[0], place)
    p, q, ratios = in_ratio(target_probs, draft_probs, drafted)
    reached = [ratios.new_ones(())]
    for ratio in ratios:
        reached.append((reached[-1] * ratio).clamp(max=1))
    reach = torch.stack(reached)
    residuals = (reach[:-1, None] * p[:-1] - q).clamp(min=0)
    left = residuals.sum(-1)[1:]
    inner = reach[1:-1]
    # p = q gives 0 / 0: the share is 1, and the draft goes on. Where p is all zeros nothing can
    # follow, and the share is the reach: a text ends there as often as it is reached.
    shares = torch.where(left + 1 - inner > 0, left / (left + 1 - inner), 1.0)
    shares = torch.where(p[1:-1].any(-1), shares, inner)
    passed = randomness.accept(torch.cat((shares, reach[-1:])))
    numbers = torch.arange(1, len(drafted) + 1, device=drafted.device)
    accepted = torch.where(passed, numbers, 0).amax()
    residual = torch.cat((residuals, p[-1:])).index_select(0, accepted[None])[0]
    # an all-zero residual is one up to rounding, as in the ratio rule
    weights = torch.where(residual.sum() > 0, residual, p.index_select(0, accepted[None])[0])
    return accepted, randomness.draw(weights, place)


def in_ratio(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p and q in the wider of their dtypes, and p(x) / q(x) of each drafted token x.

    A token with q(x) = 0 was not drawn from q (the draft's logits were non-finite). Its ratio is 0,
    so that it is never accepted.
    """
    wide = torch.promote_types(target_probs.dtype, draft_probs.dtype)
    p = target_probs.to(wide)
    q = draft_probs.to(wide)
    p_drafted, q_drafted = (rows.gather(1, drafted[:, None])[:, 0] for rows in (p[:-1], q))
    return p, q, torch.where(q_drafted > 0, p_drafted / q_drafted, 0.0)


Verify = Callable[[Tensor, Tensor, Tensor, Randomness, Place], tuple[Tensor, Tensor]]


class RuleParts(NamedTuple):
    """Source of random draws, from seed, device and sample, and the verification by its draws."""

    new_randomness: Callable[[int, torch.device | str, int], Randomness]
    verify: Verify


RULES = {
    "ratio": RuleParts(SeededRandomness, verify_by_ratio),
    "race": RuleParts(KeyedRandomness, verify_by_race),
    "block": RuleParts(SeededRandomness, verify_by_block),
}


@dataclass(frozen=True)
class Rule:
    """Rule of verification with its seed: they determine the text that is drawn after a prompt.

    ``name`` is a key of ``RULES``; ``sample`` numbers the texts of one prompt. Raises InputError
    for an unknown name.
    """

    name: str
    seed: int
    sample: int = 0

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise InputError(f"a rule is one of {', '.join(RULES)}, found {self.name!r:.80}")

    def randomness(self, device: torch.device | str = "cpu") -> Randomness:
        """Return a fresh source of randomness for one text."""
        return RULES[self.name].new_randomness(self.seed, device, self.sample)

    @property
    def verify(self) -> Verify:
        """The rule that goes with this randomness."""
        return RULES[self.name].verify
