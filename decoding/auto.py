"""Drafter and policy of ``--draft auto``: the draft of the largest expected speed-up, or none.

A round that drafts k tokens takes v + k·(c + r) plain rounds, with c the cost of a draft step, r
that of a verified row, and v a little more than 1: ``Offer.round_cost`` is v, ``Offer.token_cost``
c + r. It writes 1 + α + α² + ... + αᵏ expected tokens, with α the probability that a drafted token
is accepted if those before it were (arXiv 2211.17192, equation 1). The speed-up is their ratio;
where none is above 1, the round is plain. c and r are given for the text's length:
``measured_costs`` times them. v and α are learned from past rounds, so this is a bandit: a choice
among options whose pay is learned by trying them. Its structure is known: all lengths of a draft
share its α. Costs are in plain rounds. Names of times contain ``seconds``.

Knows nothing of files and options. No other file of this folder knows of it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from decoding.drafters import Draft, Drafter, ModelFreeDrafter, draft_of
from decoding.model_port import Cache, Model
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round, expected_speedup
from decoding.sampling import SamplingParams
from decoding.text import Text, common_prefix
from model.plan import LayerPlan

MOST_DRAFTED = 7  # tokens: a ninth row of a verification may cost much more
MEASURING_SECONDS = 0.1  # of all timed steps
LEAST_TURNS = 3  # of timed steps
PRIOR_RATE = 0.7  # α of a kind of draft of which nothing is known


@dataclass
class Costs:
    """Costs, in plain rounds, of a draft step under each plan at hand and of each further verified
    row.

    Where they are ``timed``, so are rounds. ``plain_seconds`` has those of the latest plain ones.
    ``overheads[name]`` is what a round with this drafter costs beyond 1 and its drafted tokens.
    """

    LATEST = 15  # plain rounds, whose median ignores one that another program held up
    LEARNED = 0.5  # the share of the latest round in ``overheads``
    MOST = 1.0  # the largest value that a round counts with
    DECAY = 0.99  # what is left after a plain round, so that drafters are tried again

    step_costs: Mapping[str, float]
    row_cost: float
    timed: bool = False
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=Costs.LATEST))
    overheads: dict[str, float] = field(default_factory=dict)

    def observe(self, name: str | None, seconds: float, drafted_cost: float) -> None:
        """Learn from the time of a plain round, or of one with a draft whose tokens cost this."""
        if name is None:
            self.plain_seconds.append(seconds)
            self.overheads = {each: self.DECAY * cost for each, cost in self.overheads.items()}
        elif self.plain_seconds:
            cost = seconds / median(self.plain_seconds)
            overhead = min(self.MOST, max(0.0, cost - 1 - drafted_cost))
            known = self.overheads.get(name, 0.0)
            self.overheads[name] = known + self.LEARNED * (overhead - known)


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
    SHARE = 0.02  # of a plain round, which each token of the text earns

    rates_by_kind: dict[str, Rates] = field(default_factory=dict)
    credit: float = 0.5

    def settle(self, written: int, round_cost: float) -> None:
        """Add what the tokens of a round earned, and subtract its cost."""
        earned = written * (1 + self.SHARE) - round_cost
        self.credit = min(self.MOST_CREDIT, max(0.0, self.credit + earned))


class Offer(NamedTuple):
    """Possible draft of the coming round, by the drafter ``name``; None is plain decoding.

    ``rates`` are those of its kind, a model's drafts or guesses of one quality; None where nothing
    is offered. ``token_cost`` is that of a drafted token: its draft step, if it needs one, and its
    row of the verification. ``round_cost`` is that of a round with it, without its tokens.
    ``tokens`` are known without running a model; None where a model drafts.
    """

    name: str | None
    rates: Rates | None
    token_cost: float
    round_cost: float
    tokens: Sequence[int] | None = None


def plain_offer(costs: Costs) -> Offer:
    """Return the offer of plain decoding. Where a drafter around this one drafts all the same, its
    tokens cost their verified rows alone.
    """
    return Offer(None, None, costs.row_cost, 1.0, ())


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
        costs_at: Callable[[int], Costs],
        estimates: Estimates | None = None,
        *,
        priors: Mapping[str, float] | None = None,
        by_confidence: bool = True,
        longest: int | None = None,
    ) -> None:
        """``costs_at``: costs after a text of some length; ``priors``: α of kinds of drafts
        before their first round, by name, for guesses also by quality; ``by_confidence``: whether
        a model's draft ends by the confidence of its tokens, which the host then reads one by one;
        ``longest``: most tokens of a draft, where fewer than ``MOST_DRAFTED``.
        """
        super().__init__(MOST_DRAFTED if longest is None else min(longest, MOST_DRAFTED))
        self.reads_draft_confidence = by_confidence
        self.drafters = drafters
        self.costs_at = costs_at
        self.estimates = estimates or Estimates()
        self.priors = priors or {}
        self.choice: Choice | None = None  # in the current round

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return the draft of the offer with the largest expected speed-up: empty if none pays."""
        costs = self.costs_at(len(text))  # which may measure them
        began = perf_counter()
        offers = [*self._offers(text, limit, costs)]
        drafts = [(*self._best_length(offer, limit), offer) for offer in offers]
        plain = 1.0, 0, plain_offer(costs)
        speedup, length, taken = max([plain, *drafts], key=lambda draft: draft[0])
        self.choice = Choice(taken, speedup, offers, began)
        if taken.tokens is not None:
            return draft_of(text, taken.tokens[:length])
        return self.drafters[taken.name].propose(text, length, params, policy, randomness)

    def _offers(self, text: Text, limit: int, costs: Costs) -> Iterator[Offer]:
        """Return the offers of all drafters that have one."""
        for name, drafter in self.drafters.items():
            round_cost = 1 + costs.overheads.get(name, 0.0)
            if isinstance(drafter, ModelFreeDrafter):
                quality, tokens = drafter.find(text, limit)
                if tokens:
                    rates = self.rates_of(
                        f"{name} {quality}", drafter.RATES.get(quality, PRIOR_RATE)
                    )
                    yield Offer(name, rates, costs.row_cost, round_cost, tokens)
            elif name in costs.step_costs:
                token_cost = costs.row_cost + costs.step_costs[name]
                yield Offer(name, self.rates_of(name), token_cost, round_cost)

    def _best_length(self, offer: Offer, limit: int) -> tuple[float, int]:
        """Return the largest expected speed-up of an offer and the length that has it, as far as
        the credit covers; 1 and 0 where no draft pays.

        A draft that ends by confidence has as many tokens as the credit covers.
        """
        rate = offer.rates.mean()
        longest = limit if offer.tokens is None else len(offer.tokens)
        covered = self.estimates.credit + 1 - offer.round_cost
        lengths = [k for k in range(1, longest + 1) if k * offer.token_cost <= covered]
        # Later tokens are accepted less often than the first: if that one does not pay, none does.
        if not lengths or rate <= offer.token_cost:
            return 1.0, 0
        speedup, best = max(
            (expected_speedup(rate, k, offer.token_cost, offer.round_cost), k) for k in lengths
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
        return choice.reached * rates.mean() > choice.taken.token_cost * choice.speedup

    def observe(self, round: Round) -> None:
        """Learn from a finished round, and settle its credit.

        Known tokens are compared with the text even where their offer was not taken.
        """
        costs = self.costs_at(round.position)
        choice = self.choice or Choice(plain_offer(costs))
        self.choice = None
        taken = choice.taken
        count = len(round.drafted)
        drafted_cost = count * taken.token_cost
        self.estimates.settle(len(round.emitted), taken.round_cost + drafted_cost)
        if costs.timed and choice.began is not None:
            costs.observe(taken.name, perf_counter() - choice.began, drafted_cost)
        for offer in choice.offers:
            # known tokens; else a model's draft that was made, or one that was not
            if offer.tokens:
                compared = [1.0] * min(len(offer.tokens), len(round.emitted))
                offer.rates.learn(compared, common_prefix(offer.tokens, round.emitted))
            elif offer is taken:
                offer.rates.learn(choice.confidences or [1.0] * count, round.accepted)
            else:
                offer.rates.decay()

    def rollback(self, length: int) -> None:
        for drafter in self.drafters.values():
            drafter.rollback(length)

    def rates_of(self, kind: str, prior: float = PRIOR_RATE) -> Rates:
        """Return the rates of a kind of draft; ``prior``: its drafter's own, if any."""
        prior = self.priors.get(kind, prior)
        return self.estimates.rates_by_kind.setdefault(kind, Rates(prior))


def tenth(confidence: float) -> int:
    """Return the number of the tenth, from 0 to 9, in which a confidence is; 0 for NaN."""
    return min(9, int(10 * confidence)) if confidence > 0 else 0


@torch.inference_mode()
def measured_costs(model: Model, cache: Cache, plans: Mapping[str, LayerPlan]) -> Costs:
    """Return the costs of draft steps and verified rows, timed in turns on the model's own cache.

    The steps follow the entries that the cache holds, which stay. Each draft step is timed behind a
    step of the target, as in a round.
    """
    start = cache.length
    rows = min(MOST_DRAFTED + 1, cache.capacity - start)
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
    ends = perf_counter() + MEASURING_SECONDS
    while perf_counter() < ends or len(times["rows"]) < LEAST_TURNS:
        for name, count, plan in turn:
            times[name].append(seconds(count, plan))
    plain_seconds = median(times["plain"])
    row_cost = (median(times["rows"]) / plain_seconds - 1) / max(1, rows - 1)
    step_costs = {name: median(times[name]) / plain_seconds for name in plans}
    return Costs(step_costs, max(0.0, row_cost), timed=True)
