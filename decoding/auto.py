"""Drafter and policy of ``--draft auto``: the draft of the largest expected speed-up, or none.

A round that drafts k tokens takes v + k·(c + r) plain rounds, with c the cost of a draft step, r
that of a verified row, and v a little more than 1. It writes 1 + α + α² + ... + αᵏ expected tokens,
with α the probability that a drafted token is accepted if those before it were (arXiv 2211.17192,
equation 1). The speed-up is their ratio; where none is above 1, the round is plain. c and r are
given for the text's length: ``measured_costs`` times them. v and α are learned from past rounds, so
this is a bandit: a choice among options whose pay is learned by trying them. Its structure is
known: all lengths of a draft share its α.

Knows nothing of files and options. No other file of this folder knows of it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from decoding.drafters import Draft, Drafter, ModelFreeDrafter, draft_of
from decoding.model_port import Model
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round, expected_speedup
from decoding.sampling import SamplingParams
from decoding.text import Text, common_prefix
from model.plan import LayerPlan

LONGEST = 7  # tokens of a draft: a ninth row may cost much more
MEASURED = 0.1  # seconds that all timed steps take
LEAST_TURNS = 3  # of timed steps
# α of a kind of draft before its first round: of lookups by their quality, and where nothing is
# known
PRIOR_RATES = {"lookup 1": 0.3, "lookup 2": 0.5, "lookup 8": 0.8, "lookup 16": 0.9}
PRIOR_RATE = 0.7


@dataclass
class Costs:
    """Costs, in plain rounds, of a draft step under each plan at hand and of each further verified
    row.

    Where they are ``timed``, so are rounds. ``plain`` has the seconds of the latest plain ones, and
    ``beyond`` by drafter what rounds with its drafts take beyond the costs of their steps.
    """

    LATEST = 15  # plain rounds, whose median ignores one that another program held up
    LEARNED = 0.5  # the share of the latest round in ``beyond``
    MOST = 1.0  # the largest value that a round counts with
    DECAY = 0.99  # what is left after a plain round, so that drafters are tried again

    steps: Mapping[str, float]
    row: float
    timed: bool = False
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=Costs.LATEST))
    beyond: dict[str, float] = field(default_factory=dict)

    def observe(self, name: str | None, seconds: float, of_tokens: float) -> None:
        """Learn from the time of a round, plain or with a draft of tokens at this cost."""
        if name is None:
            self.plain.append(seconds)
            self.beyond = {each: self.DECAY * cost for each, cost in self.beyond.items()}
        elif self.plain:
            beyond = seconds / median(self.plain) - 1 - of_tokens
            known = self.beyond.get(name, 0.0)
            self.beyond[name] = known + self.LEARNED * (min(self.MOST, max(0.0, beyond)) - known)


class Rates:
    """Acceptance rates of a kind of draft, by the confidence of a token in tenths.

    ``accepted`` and ``judged`` count the tokens of past rounds per tenth, the later ones more.
    With few observations the rate of all tokens shrinks towards ``prior``, and that of a
    confidence towards the rate of all.
    """

    PRIOR_WEIGHT = 4.0  # of a prior rate, in tokens
    MEMORY = 0.98  # the share of the past that counts after another round of the kind
    DECAY = 0.95  # the same after a round in which another draft was made

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
        """Add a draft by the confidences of its tokens. The first ``accepted`` of them were
        accepted, the next one was rejected, and those after it were not judged.
        """
        self.decay(self.MEMORY)
        for number, confidence in enumerate(confidences[: accepted + 1]):
            self.judged[tenth(confidence)] += 1
            self.accepted[tenth(confidence)] += number < accepted

    def decay(self, memory: float = DECAY) -> None:
        """Let the past count less, so that bad luck in a few rounds does not decide for long."""
        self.accepted = [memory * each for each in self.accepted]
        self.judged = [memory * each for each in self.judged]


@dataclass
class Estimates:
    """What is known from past rounds: the rates by kind of draft, and the ``credit``, the plain
    steps that may still be lost by drafting. At first it covers one token drafted in four bits.
    """

    MOST_CREDIT = 10.0
    SHARE = 0.02  # of a plain step, which each token of the text earns

    rates: dict[str, Rates] = field(default_factory=dict)
    credit: float = 0.5

    def settle(self, written: int, cost: float) -> None:
        """Add what the tokens of a round earned, and subtract its cost in plain steps."""
        earned = written * (1 + self.SHARE) - cost
        self.credit = min(self.MOST_CREDIT, max(0.0, self.credit + earned))


class Offer(NamedTuple):
    """Possible draft of the coming round, by the drafter ``name``; None is plain decoding.

    ``rates`` are those of its kind: a model's drafts, or guesses of one quality. ``cost`` is that
    of a drafted token: its draft step, if it needs one, and its row of the verification.
    ``of_round`` is the cost of a round with it, without its tokens. ``tokens`` are given where they
    are known without running a model.
    """

    name: str | None
    rates: Rates
    cost: float
    of_round: float
    tokens: Sequence[int] | None = None


def plain(costs: Costs) -> Offer:
    """Return the offer of plain decoding. A draft in its round is another drafter's: it costs its
    rows.
    """
    return Offer(None, Rates(0.0), costs.row, 1.0, ())


@dataclass
class Choice:
    """Offer that is taken for a round, its expected speed-up, and all offers that were made.

    ``began``: when the draft was asked for, by the clock, if it was. While its model drafts,
    ``confidences`` has those of the drafted tokens, and ``reached`` is the probability that all of
    them are accepted.
    """

    taken: Offer
    speedup: float = 1.0
    offers: Sequence[Offer] = ()
    began: float | None = None
    confidences: list[float] = field(default_factory=list)
    reached: float = 1.0


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
        """``costs``: those after a text of some length; ``priors``: α of kinds of drafts before
        their first round; ``by_confidence``: whether a model's draft ends by the confidence of its
        tokens, which the host then reads one by one; ``longest``: most tokens of a draft, where
        fewer than ``LONGEST``.
        """
        super().__init__(min(longest or LONGEST, LONGEST))
        self.reads_draft_confidence = by_confidence
        self.drafters = drafters
        self.costs_at = costs
        self.estimates = estimates or Estimates()
        self.priors = PRIOR_RATES | dict(priors or {})
        self.choice: Choice | None = None  # in the current round

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return the draft of the offer with the largest expected speed-up: empty if none pays."""
        costs = self.costs_at(len(text))  # which may measure them
        began = perf_counter()
        offers = [*self._offers(text, limit, costs)]
        drafts = [(1.0, 0, plain(costs))]
        drafts += [(*self._best_length(offer, limit), offer) for offer in offers]
        speedup, length, taken = max(drafts, key=lambda draft: draft[0])
        self.choice = Choice(taken, speedup, offers, began)
        if taken.tokens is not None:
            return draft_of(text, taken.tokens[:length])
        return self.drafters[taken.name].propose(text, length, params, policy, randomness)

    def _offers(self, text: Text, limit: int, costs: Costs) -> Iterator[Offer]:
        """Return the offers of all drafters that have one."""
        for name, drafter in self.drafters.items():
            of_round = 1 + costs.beyond.get(name, 0.0)
            if isinstance(drafter, ModelFreeDrafter):
                quality, tokens = drafter.find(text, limit)
                if tokens:
                    rates = self.rates(f"{name} {quality}")
                    yield Offer(name, rates, costs.row, of_round, tokens)
            elif name in costs.steps:
                yield Offer(name, self.rates(name), costs.row + costs.steps[name], of_round)

    def _best_length(self, offer: Offer, limit: int) -> tuple[float, int]:
        """Return the largest expected speed-up of an offer and the length that has it, as far as
        the credit covers; 1 and 0 where no draft pays.

        A draft that ends by confidence has as many tokens as the credit covers.
        """
        rate = offer.rates.mean()
        longest = limit if offer.tokens is None else len(offer.tokens)
        covered = self.estimates.credit + 1 - offer.of_round
        lengths = [k for k in range(1, longest + 1) if k * offer.cost <= covered]
        # Later tokens are accepted less often than the first: if that one does not pay, none does.
        if not lengths or rate <= offer.cost:
            return 1.0, 0
        speedup, best = max(
            (expected_speedup(rate, k, offer.cost, offer.of_round), k) for k in lengths
        )
        ends_by_confidence = offer.tokens is None and self.reads_draft_confidence
        return speedup, lengths[-1] if ends_by_confidence else best

    def keep_drafting(self, confidence: float) -> bool:
        """Return whether another token is worth its cost: its probability of acceptance is more
        than its cost times the speed-up that was expected of the draft.
        """
        choice = self.choice
        rates = choice.taken.rates
        choice.confidences.append(confidence)
        choice.reached *= rates.at(confidence)
        return choice.reached * rates.mean() > choice.taken.cost * choice.speedup

    def observe(self, round: Round) -> None:
        """Learn from a finished round, and settle its credit.

        Known tokens are compared with the text even where their offer was not taken.
        """
        costs = self.costs_at(round.position)
        choice = self.choice or Choice(plain(costs))
        self.choice = None
        taken = choice.taken
        drafted = len(round.drafted)
        of_tokens = drafted * taken.cost
        self.estimates.settle(len(round.emitted), taken.of_round + of_tokens)
        if costs.timed and choice.began is not None:
            costs.observe(taken.name, perf_counter() - choice.began, of_tokens)
        for offer in choice.offers:
            if offer.tokens:
                compared = [1.0] * min(len(offer.tokens), len(round.emitted))
                offer.rates.learn(compared, common_prefix(offer.tokens, round.emitted))
            elif offer is taken:
                offer.rates.learn(choice.confidences or [1.0] * drafted, round.accepted)
            else:
                offer.rates.decay()

    def rollback(self, length: int) -> None:
        for drafter in self.drafters.values():
            drafter.rollback(length)

    def rates(self, kind: str) -> Rates:
        """Return the rates of a kind of draft."""
        prior = self.priors.get(kind, PRIOR_RATE)
        return self.estimates.rates.setdefault(kind, Rates(prior))


def tenth(confidence: float) -> int:
    """Return the number of the tenth, from 0 to 9, in which a confidence is; 0 for NaN."""
    return min(9, int(10 * confidence)) if confidence > 0 else 0


@torch.inference_mode()
def measured_costs(model: Model, cache: Any, plans: Mapping[str, LayerPlan]) -> Costs:
    """Return the costs of draft steps and verified rows, timed in turns on the model's own cache.

    The steps follow the entries that the cache holds, which stay. Each draft step is timed behind a
    step of the target, as in a round.
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

    turn = [("rows", rows, None), ("plain", 1, None)]
    for name, plan in plans.items():
        turn += [(name, 1, plan), ("plain", 1, None)]
    for _, count, plan in turn:
        seconds(count, plan)  # warm
    times: defaultdict[str, list[float]] = defaultdict(list)
    ends = perf_counter() + MEASURED
    while perf_counter() < ends or len(times["rows"]) < LEAST_TURNS:
        for name, count, plan in turn:
            times[name].append(seconds(count, plan))
    plain = median(times["plain"])
    row = (median(times["rows"]) / plain - 1) / max(1, rows - 1)
    costs = {name: median(times[name]) / plain for name in plans}
    return Costs(costs, max(0.0, row), timed=True)
