"""How much to draft: policies of draft length.

A policy may look at tokens already drafted, at past rounds and at a table of measured costs. It never
sees this round's target probabilities or acceptances, and never a clock; so it changes how fast tokens
come, not their law (the proof holds for any policy under these rules).
"""

from __future__ import annotations

from decoding.costs import CostTable, predicted_speedup
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


class BreakEven(Policy):
    """Draft as much as measured costs and past acceptance say will pay, and not at all when nothing would.

    The acceptance rate α is estimated from recent rounds (older ones fade by ``memory``), and the length
    with the largest ``predicted_speedup`` is taken. Where none exceeds 1 the policy decodes plainly and
    probes with a draft of one token after a pause; each rejected probe doubles the pause, up to
    ``longest_pause`` rounds, so that a hopeless draft costs next to nothing.
    """

    PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # what to believe before anything was seen, and how firmly

    def __init__(
        self,
        costs: CostTable,
        longest: int = 8,
        *,
        memory: float = 0.95,
        first_pause: int = 16,
        longest_pause: int = 256,
    ) -> None:
        super().__init__(min(longest, costs.longest_draft))
        self.costs = costs
        self.memory = memory
        self.first_pause, self.longest_pause = first_pause, longest_pause
        self.kept, self.tried = 0.0, 0.0
        self.pause, self.waiting = first_pause, 0

    @property
    def acceptance(self) -> float:
        """The estimate of α: the share of drafted tokens, looked at one by one, that the target keeps."""
        return (self.kept + self.PRIOR_RATE * self.PRIOR_WEIGHT) / (self.tried + self.PRIOR_WEIGHT)

    def best_length(self) -> int:
        """The draft length with the largest predicted speed-up, 0 if plain decoding is fastest."""
        lengths = range(self.gamma + 1)
        return max(lengths, key=lambda length: predicted_speedup(self.acceptance, length, self.costs))

    def draft_length(self) -> int:
        best = self.best_length()
        if best == 0:
            return 0 if self.waiting else min(1, self.gamma)
        return best

    def observe(self, round: Round) -> None:
        if not round.drafted:
            self.waiting = max(0, self.waiting - 1)
            return
        rejected = round.accepted < len(round.drafted)
        self.kept = self.memory * self.kept + round.accepted
        self.tried = self.memory * self.tried + round.accepted + rejected
        if not rejected or self.best_length():
            self.pause = self.first_pause
        if not self.best_length():
            self.waiting = self.pause
            self.pause = min(2 * self.pause, self.longest_pause)


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

    def keep_drafting(self, confidence: float) -> bool:
        return self.inner.keep_drafting(confidence)

    def observe(self, round: Round) -> None:
        self.inner.observe(round)
        self.open = round.target_confidence is None or round.target_confidence >= self.least
