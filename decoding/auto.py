"""Drafter and policy of ``--draft auto``: the draft of the largest expected speed-up, or none.

A round that drafts k tokens takes 1 + k·(c + r) plain steps, with c the cost of a draft step and r
that of a verified row. It writes 1 + α + α² + ... + αᵏ expected tokens, with α the probability that
a drafted token is accepted if those before it were (arXiv 2211.17192, equation 1). The speed-up is
their ratio; where none is above 1, the round is plain. c and r are given for the text's length:
``measured_costs`` times them. α is learned from past rounds, so this is a bandit, a choice among
options whose pay is learned by trying them, but of a known structure: all lengths of a draft share
its α.

Knows nothing of files and options. No other file of this folder knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from decoding.drafters import Draft, Drafter, ModelFreeDrafter, draft_of, empty_draft
from decoding.model_port import Model
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round, common_prefix, expected_speedup
from decoding.sampling import SamplingParams
from decoding.text import Text
from model.plan import LayerPlan

LONGEST = 7  # tokens of a draft: a ninth row may cost much more
MEASURED = 0.1  # seconds that all timed steps take
LEAST_TURNS = 3  # of timed steps
# α of a kind before its first round
PRIOR_RATES = {"lookup 1": 0.3, "lookup 2": 0.5, "lookup 8": 0.8, "lookup 16": 0.9}
PRIOR_RATE = 0.7


class Costs(NamedTuple):
    """Costs, in plain steps, of a draft step under each plan at hand and of each further verified
    row.
    """

    steps: Mapping[str, float]
    row: float


class Rates:
    """Acceptance rates of a kind of draft, by the confidence of a token in tenths.

    ``accepted`` and ``judged`` count the tokens of past rounds per tenth, the later ones more.
    Tokens after a rejected one are not judged. With few observations the rate of all tokens shrinks
    towards ``prior``, and that of a confidence towards the rate of all.
    """

    PRIOR_WEIGHT = 4.0  # of a prior rate, in tokens
    MEMORY = 0.98  # the share of the past that counts after another round of the kind
    FADE = 0.95  # the same after a round in which another draft was made

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.accepted = [0.0] * 10
        self.judged = [0.0] * 10

    def mean(self) -> float:
        """Return the rate of all tokens, α."""
        return self._rate(sum(self.accepted), sum(self.judged), self.prior)

    def at(self, confidence: float) -> float:
        """Return the rate of tokens of this confidence."""
        place = tenth(confidence)
        return self._rate(self.accepted[place], self.judged[place], self.mean())

    def _rate(self, accepted: float, judged: float, prior: float) -> float:
        return (accepted + prior * self.PRIOR_WEIGHT) / (judged + self.PRIOR_WEIGHT)

    def learn(self, confidences: Sequence[float], accepted: int) -> None:
        """Add the judged tokens of a round; the first ``accepted`` ones were accepted."""
        self.fade(self.MEMORY)
        for number, confidence in enumerate(confidences):
            self.judged[tenth(confidence)] += 1
            self.accepted[tenth(confidence)] += number < accepted

    def fade(self, memory: float = FADE) -> None:
        """Let the past count less, so that bad luck in a few rounds does not decide for long."""
        self.accepted = [memory * each for each in self.accepted]
        self.judged = [memory * each for each in self.judged]


@dataclass
class Estimates:
    """What is known from past rounds: the rates by kind of draft, and the ``credit``, the plain
    steps that may still be lost by drafting.
    """

    MOST_CREDIT = 10.0
    SHARE = 0.02  # of a plain step, which each token of the text earns

    rates: dict[str, Rates] = field(default_factory=dict)
    credit: float = 4.0

    def settle(self, written: int, cost: float) -> None:
        """Add what the tokens of a round earned, and subtract its cost in plain steps."""
        earned = written * (1 + self.SHARE) - cost
        self.credit = min(self.MOST_CREDIT, max(0.0, self.credit + earned))


class Offer(NamedTuple):
    """Possible draft of the coming round; acceptance is learned per ``kind``. ``tokens`` are given
    where they are known without running a model.
    """

    name: str
    kind: str
    tokens: Sequence[int] | None = None


class Auto(Policy):
    """Drafter that takes the best of several each round, and the policy that ends its drafts.

    The longest draft of an offer is the one whose loss the credit covers, were all of it rejected.
    So by its estimates a text never costs more than its credit and 1 + ``Estimates.SHARE`` times
    plain decoding.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        costs: Callable[[int], Costs],
        estimates: Estimates | None = None,
        *,
        priors: Mapping[str, float] | None = None,
        by_confidence: bool = True,
        longest: int | None = None,
    ) -> None:
        """``costs``: those after a text of some length; ``priors``: α of a kind before its first
        round; ``by_confidence``: whether a model's draft ends by the confidence of its tokens,
        which the host then reads one by one; ``longest``: most tokens of a draft, where fewer than
        ``LONGEST``.
        """
        super().__init__(min(longest or LONGEST, LONGEST))
        self.reads_draft_confidence = by_confidence
        self.drafters = drafters
        self.costs_at = costs
        self.costs = Costs({}, 0.0)  # of the current round
        self.estimates = estimates or Estimates()
        self.priors = PRIOR_RATES | dict(priors or {})
        # of the current round: all offers, the one that is taken, and its speed-up
        self.offers: list[Offer] = []
        self.taken: Offer | None = None
        self.speedup = 1.0
        self.confidences: list[float] = []
        self.reached = 1.0  # the probability that all tokens drafted so far are accepted

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return the draft of the offer with the largest expected speed-up: empty if none pays."""
        self.costs = self.costs_at(len(text))
        self.offers = [
            self._offer(name, drafter, text, limit)
            for name, drafter in self.drafters.items()
            if name in self.costs.steps or isinstance(drafter, ModelFreeDrafter)
        ]
        drafts = [(*self._best_length(offer, limit), offer) for offer in self.offers]
        speedup, length, taken = max(drafts, key=lambda draft: draft[0])
        if speedup <= 1:
            return empty_draft(text.vocab_size, text.device)
        self.taken = taken
        self.speedup = speedup
        if taken.tokens is not None:
            return draft_of(text, taken.tokens[:length])
        return self.drafters[taken.name].propose(text, length, params, policy, randomness)

    def _offer(self, name: str, drafter: Drafter, text: Text, limit: int) -> Offer:
        """Return a drafter's offer: a lookup's acceptance is learned per length of its n-gram."""
        if isinstance(drafter, ModelFreeDrafter):
            quality, tokens = drafter.find(text, limit)
            return Offer(name, f"{name} {quality}", tokens)
        return Offer(name, name)

    def _best_length(self, offer: Offer, limit: int) -> tuple[float, int]:
        """Return the largest expected speed-up of an offer and the length that has it, as far as
        the credit covers; 0 and 0 for no draft.

        A draft that ends by confidence has as many tokens as the credit covers.
        """
        rate = self.rates(offer).mean()
        cost = self.cost(offer)
        longest = limit if offer.tokens is None else min(limit, len(offer.tokens))
        if longest * cost > self.estimates.credit:
            longest = int(self.estimates.credit / cost)
        lengths = range(1, longest + 1)
        best = max(((expected_speedup(rate, k, cost, 1.0), k) for k in lengths), default=(0.0, 0))
        ends_by_confidence = offer.tokens is None and self.reads_draft_confidence
        return (best[0], longest) if ends_by_confidence else best

    def keep_drafting(self, confidence: float) -> bool:
        """Return whether another token is worth its cost: its probability of acceptance is more
        than its cost times the speed-up that was expected of the draft.
        """
        if self.taken is None:
            return True
        rates = self.rates(self.taken)
        self.confidences.append(confidence)
        self.reached *= rates.at(confidence)
        return self.reached * rates.mean() > self.cost(self.taken) * self.speedup

    def observe(self, round: Round) -> None:
        """Learn from a finished round, and settle its credit.

        Known tokens are compared with the text even where their offer was not taken.
        """
        drafted = len(round.drafted)
        if self.taken:
            cost = self.cost(self.taken)
        else:  # another drafter drafted, if any did
            cost = self.costs_at(round.position).row if drafted else 0.0
        self.estimates.settle(len(round.emitted), 1 + drafted * cost)
        for offer in self.offers:
            if offer.tokens:
                equal = common_prefix(offer.tokens, round.emitted)
                rejected = equal < min(len(offer.tokens), len(round.emitted))
                self.rates(offer).learn([1.0] * (equal + rejected), equal)
            elif offer is self.taken and drafted:
                judged = min(drafted, round.accepted + 1)
                confidences = self.confidences or [1.0] * judged
                self.rates(offer).learn(confidences[:judged], round.accepted)
            elif offer.tokens is None:
                self.rates(offer).fade()
        self.offers = []
        self.taken = None
        self.confidences = []
        self.reached = 1.0

    def rollback(self, length: int) -> None:
        for drafter in self.drafters.values():
            drafter.rollback(length)

    def cost(self, offer: Offer) -> float:
        """Return the cost of a drafted token in plain steps: its draft step, if it needs one, and
        its row of the verification.
        """
        return self.costs.row + self.costs.steps.get(offer.name, 0.0)

    def rates(self, offer: Offer) -> Rates:
        """Return the rates of an offer's kind of draft."""
        if offer.kind not in self.estimates.rates:
            self.estimates.rates[offer.kind] = Rates(self.priors.get(offer.kind, PRIOR_RATE))
        return self.estimates.rates[offer.kind]


def tenth(confidence: float) -> int:
    """Return the number of the tenth, from 0 to 9, in which a confidence is; 0 for NaN."""
    return min(9, int(10 * confidence)) if confidence > 0 else 0


@torch.inference_mode()
def measured_costs(model: Model, cache: Any, plans: Mapping[str, LayerPlan]) -> Costs:
    """Return the costs of draft steps and verified rows, timed in turns on the model's own cache.

    The steps follow the entries that the cache holds, which stay. A draft step is timed behind a
    verification, as in a round.
    """
    start = cache.length
    rows = min(LONGEST + 1, cache.capacity - start)
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=model.device)

    def seconds(count: int, plan: LayerPlan | None = None) -> float:
        began = perf_counter()
        model(tokens[:, :count], cache, start, plan)[0, -1, 0].item()
        elapsed = perf_counter() - began
        cache.truncate(start)
        return elapsed

    steps = {"plain": (1, None), "rows": (rows, None)}
    steps |= {name: (1, plan) for name, plan in plans.items()}
    for step in steps.values():
        seconds(*step)  # warm
    times: dict[str, list[float]] = {name: [] for name in steps}
    ends = perf_counter() + MEASURED
    while perf_counter() < ends or len(times["plain"]) < LEAST_TURNS:
        for name, step in steps.items():
            times[name].append(seconds(*step))
    plain = median(times["plain"])
    row = (median(times["rows"]) / plain - 1) / max(1, rows - 1)
    return Costs({name: median(times[name]) / plain for name in plans}, max(0.0, row))
