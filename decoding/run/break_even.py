"""Break-even policy: the draft and the length with the largest expected speed-up in each round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from decoding.policies import Offer, Policy
from decoding.rounds import Round
from decoding.run.costs import CostTable, predicted_speedup


class BreakEven(Policy):
    """Choice, in each round, of the offer and the length with the largest expected speed-up; plain if none is above 1.

    The speed-up is ``predicted_speedup`` of measured costs and of the acceptance rate α, which is estimated for each
    kind of draft from recent rounds; older ones fade by the factor ``memory`` per round. Offers without a model are
    compared with the text in every round, taken or not. A model that does not pay is tried again, with one token,
    every ``pause`` rounds.

    No draft is made that could cost more than the ``credit``, in plain steps, if all of it were rejected. The credit
    begins with ``START``, and grows by the gain of drafts and by ``SHARE`` of every token, up to ``LARGEST_CREDIT``. So
    by these costs a text never takes longer than 1 + ``SHARE`` times plain decoding plus ``START`` steps.
    """

    PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # α before the first round, and its weight in tokens
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
        """``costs`` by the name of an offer, or one table for any; ``priors``: α of a kind before the first round."""
        self.one_way = isinstance(costs, CostTable)
        self.costs = defaultdict(lambda: costs) if self.one_way else dict(costs)
        tables = [costs] if self.one_way else self.costs.values()
        super().__init__(min(longest, *(table.longest_draft for table in tables)))
        self.memory, self.pause, self.priors = memory, pause, priors or {}
        self.seen: dict[str, tuple[float, float]] = {}  # by kind: tokens accepted, and looked at
        self.credit, self.waiting = self.START, 0
        self.offers: Sequence[Offer] = ()
        self.taken: Offer | None = None

    def acceptance(self, kind: str = "") -> float:
        """The estimate of α: the accepted share of drafted tokens up to the first rejected one."""
        kept, tried = self.seen.get(kind, (0.0, 0.0))
        prior = self.priors.get(kind, self.PRIOR_RATE)
        return (kept + prior * self.PRIOR_WEIGHT) / (tried + self.PRIOR_WEIGHT)

    def draft_length(self) -> int:
        """The draft length if there is one offer; if there are several, ``choose`` decides when they are known."""
        return self.choose([Offer("", "")])[1] if self.one_way else self.gamma

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer | None, int]:
        """The offer to take and its draft length; 0 for a round without a draft."""
        best, taken, length = 1.0, None, 0
        probe, hope = None, 0.0
        for offer in offers:
            costs, rate = self.costs[offer.name], self.acceptance(offer.kind)
            longest = self.gamma if offer.tokens is None else min(self.gamma, len(offer.tokens))
            for count in range(1, longest + 1):
                if count * costs.draft + costs.verify[count] - 1 > self.credit:
                    break  # the cost if all of it were rejected
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
