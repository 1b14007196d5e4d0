"""How much to draft: policies of draft length.

A policy may look at tokens already drafted, at past rounds and at a table of measured costs. It never
sees this round's target probabilities or acceptances, and never a clock; so it changes how fast tokens
come, not their law (the proof holds for any policy under these rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.rounds import Round
from model.errors import InputError


class Policy:
    """What the loop and the drafters ask of a policy; ``gamma`` is the longest draft.

    ``reads_draft_confidence`` and ``reads_target_confidence`` say which of a round's confidences the loop
    must compute; each costs a softmax over the vocabulary.
    """

    reads_draft_confidence = False
    reads_target_confidence = False
    threshold: float | None = None  # the confidence below which drafting ends; None where there is no such rule

    def __init__(self, gamma: int) -> None:
        """Raises InputError for a negative length."""
        if gamma < 0:
            raise InputError(f"gamma must be at least 0, found {gamma}")
        self.gamma = gamma

    def draft_length(self) -> int:
        """The most tokens to draft in the coming round."""
        return self.gamma

    def keep_drafting(self, confidence: float) -> bool:
        """Whether to go on after a token that the draft gave this confidence. The token itself stays."""
        return True

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer | None, int]:
        """Which of several ways to draft, and the most tokens of it: see ``BreakEven``."""
        return offers[0], self.draft_length()

    def observe(self, round: Round) -> None:
        """Learn from a finished round."""


class FixedLength(Policy):
    """Draft ``gamma`` tokens every round; 0 is plain decoding."""


class AdaptiveExit(Policy):
    """Draft & Verify's adaptive exit (arXiv 2309.08168, section 3.3): stop after an unsure token.

    Drafting ends after the first token whose confidence is below ``threshold``; that token is verified
    like the others. The threshold follows the acceptance rate: below the target rate ``alpha`` it rises,
    otherwise it falls unless the draft already reached its full length.
    """

    reads_draft_confidence = True

    def __init__(
        self,
        threshold: float,
        longest: int = 8,
        *,
        alpha: float = 0.9,
        step: float = 0.01,
        rate_memory: float = 0.5,
        threshold_memory: float = 0.9,
    ) -> None:
        super().__init__(longest)
        if not 0 <= threshold <= 1:
            raise InputError(f"the exit threshold must be from 0 to 1, found {threshold}")
        self.threshold = threshold
        self.alpha, self.step = alpha, step
        self.rate_memory, self.threshold_memory = rate_memory, threshold_memory
        self.rate = 0.0

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def observe(self, round: Round) -> None:
        drafted = len(round.drafted)
        if not drafted:
            return
        self.rate = self.rate_memory * self.rate + (1 - self.rate_memory) * round.accepted / drafted
        moved = self.threshold
        if self.rate < self.alpha:
            moved += self.step
        elif drafted < self.gamma:
            moved -= self.step
        self.threshold = self.threshold_memory * self.threshold + (1 - self.threshold_memory) * moved


@dataclass(frozen=True)
class Offer:
    """A way to draft in the coming round: its ``name``, and the ``kind`` of it whose past acceptance tells of it.

    ``tokens``: what it would draft, where that is known without a model.
    """

    name: str
    kind: str
    tokens: Sequence[int] | None = None


class ConfidenceGate(Policy):
    """Draft only while the target is sure of itself; otherwise decode plainly.

    After a round, if the target's own confidence in the token it just drew is below ``least``, the next
    round has no draft: such a text is where drafts are rejected. Whatever it lets through is ``inner``'s.
    """

    reads_target_confidence = True

    def __init__(self, inner: Policy, least: float) -> None:
        """Raises InputError for a confidence outside [0, 1]."""
        super().__init__(inner.gamma)
        if not 0 <= least <= 1:
            raise InputError(f"min-target-confidence must be from 0 to 1, found {least}")
        self.inner, self.least = inner, least
        self.reads_draft_confidence = inner.reads_draft_confidence
        self.open = True

    @property
    def threshold(self) -> float | None:
        return self.inner.threshold

    def draft_length(self) -> int:
        return self.inner.draft_length() if self.open else 0

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer | None, int]:
        return self.inner.choose(offers)

    def keep_drafting(self, confidence: float) -> bool:
        return self.inner.keep_drafting(confidence)

    def observe(self, round: Round) -> None:
        self.inner.observe(round)
        self.open = round.target_confidence is None or round.target_confidence >= self.least
