"""How much to draft: policies of draft length.

A policy may look at tokens already drafted, at past rounds and at a table of measured costs. It never
sees this round's target probabilities or acceptances, and never a clock; so it changes how fast tokens
come, not their law (the proof holds for any policy under these rules).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


class BreakEven(Policy):
    """Draft in whichever way, and as much, as measured costs and past acceptance say pays most; if none does, plainly.

    The acceptance rate α of each kind of draft is estimated from recent rounds (older ones fade by ``memory``), and
    the offer and length of the largest ``predicted_speedup`` are taken. What an offer without a model would have
    drafted is compared with the text afterwards, whether it was taken or not. A model that does not pay is tried
    again, one token long, every ``pause`` rounds.

    No draft is made that could lose more than the ``credit`` holds, in plain steps. It begins with ``START``, and
    takes in what drafts win and ``SHARE`` of every token. So a text never costs more than ``START`` and 1 + ``SHARE``
    of plain decoding, by these costs, whatever the target accepts.
    """

    PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # what to believe before anything was seen, and how firmly
    START, SHARE, LARGEST_CREDIT = 1.0, 0.02, 6.0

    def __init__(
        self,
        costs: CostTable | Mapping[str, CostTable],
        longest: int = 8,
        *,
        memory: float = 0.95,
        pause: int = 16,
        priors: Mapping[str, float] | None = None,
    ) -> None:
        """``costs`` by the name of an offer, or one table for any; ``priors``: what to believe of a kind at first."""
        self.one_way = isinstance(costs, CostTable)
        self.costs = defaultdict(lambda: costs) if self.one_way else dict(costs)
        tables = [costs] if self.one_way else self.costs.values()
        super().__init__(min(longest, *(table.longest_draft for table in tables)))
        self.memory, self.pause, self.priors = memory, pause, priors or {}
        self.seen: dict[str, tuple[float, float]] = {}  # of each kind: tokens kept, and looked at one by one
        self.credit, self.waiting = self.START, 0
        self.offers: Sequence[Offer] = ()
        self.taken: Offer | None = None

    def acceptance(self, kind: str = "") -> float:
        """The estimate of α: the share of drafted tokens, looked at one by one, that the target keeps."""
        kept, tried = self.seen.get(kind, (0.0, 0.0))
        prior = self.priors.get(kind, self.PRIOR_RATE)
        return (kept + prior * self.PRIOR_WEIGHT) / (tried + self.PRIOR_WEIGHT)

    def draft_length(self) -> int:
        """With one way to draft, how much of it; with several, ``choose`` decides when the offers are known."""
        return self.choose([Offer("", "")])[1] if self.one_way else self.gamma

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer | None, int]:
        """The offer to take and how many tokens of it; 0 for a round without a draft."""
        best, taken, length = 1.0, None, 0
        probe, hope = None, 0.0
        for offer in offers:
            costs, rate = self.costs[offer.name], self.acceptance(offer.kind)
            longest = self.gamma if offer.tokens is None else min(self.gamma, len(offer.tokens))
            for count in range(1, longest + 1):
                if count * costs.draft + costs.verify[count] - 1 > self.credit:
                    break  # were it all rejected
                speed = predicted_speedup(rate, count, costs)
                if speed > best:
                    best, taken, length = speed, offer, count
                if count == 1 and offer.tokens is None and speed > hope:
                    probe, hope = offer, speed
        if taken is None and probe is not None and not self.waiting:
            taken, length = probe, 1
        self.offers, self.taken = offers, taken
        return taken, length

    def observe(self, round: Round) -> None:
        drafted, rejected = len(round.drafted), round.accepted < len(round.drafted)
        cost = 1.0
        if drafted and self.taken is not None:
            costs = self.costs[self.taken.name]
            cost = drafted * costs.draft + costs.verify[drafted]
        self.credit = min(self.LARGEST_CREDIT, self.credit + (1 + self.SHARE) * len(round.emitted) - cost)
        self.waiting = self.pause if drafted else max(0, self.waiting - 1)
        for offer in self.offers:
            if offer.tokens is not None:
                pairs = list(zip(offer.tokens, round.emitted, strict=False))
                kept = next((at for at, (token, said) in enumerate(pairs) if token != said), len(pairs))
                self._learn(offer.kind, kept, kept < len(pairs))
            elif drafted and offer is self.taken:
                self._learn(offer.kind, round.accepted, rejected)

    def _learn(self, kind: str, kept: int, rejected: bool) -> None:
        before = self.seen.get(kind, (0.0, 0.0))
        self.seen[kind] = (self.memory * before[0] + kept, self.memory * before[1] + kept + rejected)


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
