"""Policies of draft length.

A policy may read the tokens already drafted, past rounds and a table of measured costs. It never reads this round's
target probabilities or acceptances, and never a clock. So it changes the speed and not the distribution of the text;
the proof holds for any policy under these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decoding.rounds import Round


class Policy:
    """Interface of a policy, as the loop and the drafters use it; ``gamma`` is the longest draft.

    ``reads_draft_confidence`` and ``reads_target_confidence`` ask for confidences, each a softmax over the vocabulary.
    """

    reads_draft_confidence = False
    reads_target_confidence = False

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def draft_length(self) -> int:
        """Largest number of tokens to draft in the coming round."""
        return self.gamma

    def keep_drafting(self, confidence: float) -> bool:
        """Whether to continue the draft after a token of this confidence. The token itself stays in the draft."""
        return True

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        """The offer to take, and the largest number of its tokens, 0 for plain decoding: see ``BreakEven``."""
        return offers[0], self.draft_length()

    def observe(self, round: Round) -> None:
        """Update the policy with a finished round."""

    def share(self, texts: Callable[[], int], past: Past) -> None:
        """Tell the policy how to count the texts that share the model's steps now, and the past of their drafting.

        Not under the ratio rule, where lengths that follow from other texts could bias the text.
        """


@dataclass
class Past:
    """Estimates from past rounds of one text, or of several: see ``BreakEven``.

    ``seen``: tokens accepted and tokens judged, per kind of draft; ``waiting``: plain rounds before the next probe.
    """

    seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    waiting: int = 0


class FixedLength(Policy):
    """Fixed draft length: ``gamma`` tokens every round; 0 is plain decoding."""


class AdaptiveExit(Policy):
    """Draft & Verify's adaptive exit (arXiv 2309.08168, section 3.3): stop after a token of low confidence.

    Drafting ends after the first token whose confidence is below ``threshold``; that token is verified like the others.
    Below a smoothed acceptance rate of ``ALPHA`` the threshold rises. Otherwise it falls, unless the draft was full.
    """

    reads_draft_confidence = True
    ALPHA, RATE_MEMORY = 0.9, 0.5

    def __init__(self, threshold: float, longest: int = 8, *, step: float = 0.01, threshold_memory: float = 0.9):
        super().__init__(longest)
        self.threshold, self.step, self.threshold_memory = threshold, step, threshold_memory
        self.rate = 0.0

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def observe(self, round: Round) -> None:
        drafted = len(round.drafted)
        if not drafted:
            return
        self.rate = self.RATE_MEMORY * self.rate + (1 - self.RATE_MEMORY) * round.accepted / drafted
        moved = self.threshold
        if self.rate < self.ALPHA:
            moved += self.step
        elif drafted < self.gamma:
            moved -= self.step
        self.threshold = self.threshold_memory * self.threshold + (1 - self.threshold_memory) * moved


@dataclass(frozen=True)
class Offer:
    """Possible draft of the coming round: the drafter's ``name``, and the ``kind`` that acceptance is estimated for.

    ``tokens``: the tokens to be drafted, where they are known without running a model.
    """

    name: str
    kind: str
    tokens: Sequence[int] | None = None


class ConfidenceGate:
    """Gate by the target's confidence: a round has no draft where drafts are likely to be rejected.

    The gate is closed for a round if, in the round before, the target's confidence in the token that it drew was below
    ``least``. While it is open, ``inner`` decides, whose other methods are the gate's too.
    """

    reads_target_confidence = True

    def __init__(self, inner: Policy, least: float) -> None:
        self.inner, self.least, self.open = inner, least, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def draft_length(self) -> int:
        return self.inner.draft_length() if self.open else 0

    def observe(self, round: Round) -> None:
        self.inner.observe(round)
        self.open = round.target_confidence is None or round.target_confidence >= self.least
