"""Break-even: policy of the draft and the length of largest predicted speed-up, by costs and past acceptance."""

from collections.abc import Callable, Mapping, Sequence

from decoding.policies import Offer, Past, Policy
from decoding.rounds import Round
from decoding.run.costs import CostTable


class BreakEven(Policy):
    """Draft choice by break-even: the offer and length of the largest ``predicted_speedup``; plain if none is above 1.

    The acceptance rate α of each kind of draft is estimated from recent rounds; older ones fade by ``memory``. Known
    tokens of an offer without a model are compared with the text afterwards, even if the offer was not taken. A model
    whose speed-up is below 1 is probed with a draft of one token, ``pause`` plain rounds after the last draft.

    The credit, in plain steps, limits losses: no draft is made whose cost, were all of it rejected, exceeds that of a
    plain step by more than the credit. It begins at ``START_CREDIT`` and is at most ``LARGEST_CREDIT``. Each round adds
    1 + ``CREDIT_PER_TOKEN`` per token of the text and subtracts its cost. So a text never costs more than
    ``START_CREDIT`` plus 1 + ``CREDIT_PER_TOKEN`` times plain decoding, by these costs, whatever the target accepts.

    Where several texts share the model's steps (``share``), the costs are theirs: the more rows a step has, the more
    another row costs, and the shorter the drafts that pay. Their past is shared too, and one of them probes for all.

    Five rounds with one model, where a draft step costs 0.5, the verification of two tokens 1.1, and ``pause`` is 2.
    "Waiting" counts the plain rounds before the next probe.

    | round | α | speed-up of one token | waiting | drafted | accepted | cost | credit after |
    |---|---|---|---|---|---|---|---|
    | 1 | 0.70 | 1.062 | 0 | 1 | 0 | 1.6 | 3.42 |
    | 2 | 0.47 | 0.917 | 2 | 0 | 0 | 1.0 | 3.44 |
    | 3 | 0.47 | 0.917 | 1 | 0 | 0 | 1.0 | 3.46 |
    | 4 | 0.47 | 0.917 | 0 | 1 | 1 | 1.6 | 3.90 |
    | 5 | 0.61 | 1.005 | 2 | 1 | 0 | 1.6 | 3.32 |

    Round 1 drafts by the prior and loses. Rounds 2 and 3 are the pause, round 4 is the probe. Its success raises α, so
    round 5 drafts again. The credit after round 1 is 4 + 1.02 - 1.6.
    """

    PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # α before the first round, and its weight in tokens
    START_CREDIT, CREDIT_PER_TOKEN, LARGEST_CREDIT = 4.0, 0.02, 6.0
    SHARED_GAIN = 1.15  # speed-up that a draft must promise where texts share steps: they wait for each other's drafts

    def __init__(
        self,
        costs: Mapping[str, CostTable],
        longest: int = 8,
        *,
        memory: float = 0.95,
        pause: int = 16,
        priors: Mapping[str, float] | None = None,
    ) -> None:
        """``costs``: a table per name of an offer; ``priors``: α of a kind before its first round."""
        super().__init__(min(longest, *(table.longest_draft for table in costs.values())))
        self.costs, self.memory, self.pause, self.priors = costs, memory, pause, priors or {}
        self.credit = self.START_CREDIT
        self.share(lambda: 1, Past())
        self.offers: Sequence[Offer] = ()
        self.taken: Offer | None = None
        self.taken_costs: CostTable | None = None

    def share(self, texts: Callable[[], int], past: Past) -> None:
        self.texts, self.past = texts, past

    def acceptance(self, kind: str) -> float:
        """Estimate of α: accepted over judged tokens of this kind, where those after a rejected token do not count."""
        accepted, judged = self.past.seen.get(kind, (0.0, 0.0))
        prior = self.priors.get(kind, self.PRIOR_RATE)
        return (accepted + prior * self.PRIOR_WEIGHT) / (judged + self.PRIOR_WEIGHT)

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        """The offer to take and the number of its tokens: 0 for a round without a draft."""
        texts, probe, probe_speed = self.texts(), None, 0.0
        best, taken, length = 1.0 if texts == 1 else self.SHARED_GAIN, None, 0
        for offer in offers:
            costs, rate = self.costs[offer.name].shared_by(texts), self.acceptance(offer.kind)
            longest = self.gamma if offer.tokens is None else min(self.gamma, len(offer.tokens))
            tokens = 1.0  # expected in a round: 1 + α + α² + ...
            for count in range(1, longest + 1):
                if costs.of_round(count, 1) - 1 > self.credit:
                    break  # the loss, were all of it rejected
                tokens += rate**count
                speed = tokens / costs.of_round(count, tokens)  # as ``predicted_speedup``
                if speed > best:
                    best, taken, length = speed, offer, count
                if count == 1 and offer.tokens is None and speed > probe_speed:
                    probe, probe_speed = offer, speed
        if taken is None and probe is not None and not self.past.waiting:
            taken, length, self.past.waiting = probe, 1, self.pause * texts
        self.offers, self.taken = offers, taken
        self.taken_costs = self.costs[taken.name].shared_by(texts) if taken else None
        return taken or offers[0], length

    def observe(self, round: Round) -> None:
        drafted, rejected = len(round.drafted), round.accepted < len(round.drafted)
        cost = self.taken_costs.of_round(drafted, len(round.emitted)) if drafted and self.taken_costs else 1.0
        self.credit = min(self.LARGEST_CREDIT, self.credit + (1 + self.CREDIT_PER_TOKEN) * len(round.emitted) - cost)
        self.past.waiting = self.pause * self.texts() if drafted else max(0, self.past.waiting - 1)
        for offer in self.offers:
            if offer.tokens:
                pairs = list(zip(offer.tokens, round.emitted, strict=False))
                equal = next((at for at, (token, emitted) in enumerate(pairs) if token != emitted), len(pairs))
                self._learn(offer.kind, equal, equal < len(pairs))
            elif drafted and offer is self.taken:
                self._learn(offer.kind, round.accepted, rejected)

    def _learn(self, kind: str, accepted: int, rejected: bool) -> None:
        before = self.past.seen.get(kind, (0.0, 0.0))
        self.past.seen[kind] = (self.memory * before[0] + accepted, self.memory * before[1] + accepted + rejected)
