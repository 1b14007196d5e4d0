"""Break-even: the draft and the length that measured costs and past acceptance say pay most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from decoding.policies import Offer, Policy
from decoding.rounds import Round
from decoding.run.costs import CostTable, predicted_speedup


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
    START, SHARE, LARGEST_CREDIT = 4.0, 0.02, 6.0

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
