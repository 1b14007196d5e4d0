"""Policies of draft length.

A policy may read the tokens already drafted and past rounds. It never reads this round's target
probabilities or acceptances. So it changes the speed and not the distribution of the text; the
proof holds for any policy under these rules.

Knows nothing of models, drafters and clocks.
"""

from decoding.rounds import Round


class Policy:
    """Interface of a policy, as the loop and the drafters use it.

    ``gamma`` is the largest number of tokens drafted per round.

    ``reads_draft_confidence`` and ``reads_target_confidence`` say whether it needs confidences,
    each of which costs a softmax over the vocabulary.
    """

    reads_draft_confidence = False
    reads_target_confidence = False

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def draft_length(self) -> int:
        """Return the largest number of tokens to draft in the coming round."""
        return self.gamma

    def keep_drafting(self, confidence: float) -> bool:
        """Return whether to go on after a drafted token of this confidence, which stays."""
        return True

    def observe(self, round: Round) -> None:
        """Update the policy with a finished round."""


class FixedLength(Policy):
    """Fixed draft length: ``gamma`` tokens every round; 0 is plain decoding."""


class AdaptiveExit(Policy):
    """Draft & Verify's adaptive exit, after a token of low confidence (arXiv 2309.08168, 3.3).

    Drafting ends after the first token whose confidence is below ``threshold``; that token is
    verified like the others. Below a smoothed acceptance rate of ``ALPHA`` the threshold rises.
    Otherwise it falls, unless the draft was full. The paper smooths the threshold too, as in t ←
    0.9 t + 0.1 (t ± 0.01): that is a ``step`` of 0.001. Here it rises no further than 1. A draft
    whose confidences were not asked about, such as one that no model made, changes neither.
    """

    reads_draft_confidence = True
    ALPHA = 0.9
    RATE_MEMORY = 0.5

    def __init__(self, threshold: float, longest: int = 8, *, step: float = 0.001) -> None:
        super().__init__(longest)
        self.threshold = threshold
        self.step = step
        self.rate = 0.0
        self.was_asked = False  # in this round

    def keep_drafting(self, confidence: float) -> bool:
        self.was_asked = True
        return confidence >= self.threshold

    def observe(self, round: Round) -> None:
        count = len(round.drafted) if self.was_asked else 0
        self.was_asked = False
        if not count:
            return
        accepted = round.accepted / count
        self.rate = self.RATE_MEMORY * self.rate + (1 - self.RATE_MEMORY) * accepted
        if self.rate < self.ALPHA:
            self.threshold = min(1.0, self.threshold + self.step)
        elif count < self.gamma:
            self.threshold -= self.step


class ConfidenceGate(Policy):
    """Gate by the target's confidence: a round has no draft where drafts are likely to be rejected.

    The gate is closed for a round if, in the round before, the target's confidence in the token
    that it drew was below ``least``. While it is open, the ``inner`` policy decides: every member
    that the gate does not decide itself is forwarded.
    """

    reads_target_confidence = True

    def __init__(self, inner: Policy, least: float) -> None:
        super().__init__(inner.gamma)
        self.inner = inner
        self.reads_draft_confidence = inner.reads_draft_confidence
        self.keep_drafting = inner.keep_drafting
        self.least = least
        self.open = True

    def draft_length(self) -> int:
        return self.inner.draft_length() if self.open else 0

    def observe(self, round: Round) -> None:
        self.inner.observe(round)
        self.open = round.target_confidence is None or round.target_confidence >= self.least
