"""Break-even, the policy of ``--draft auto``: the draft of the largest expected speed-up, or none.

A round that drafts k tokens takes 1 + k·s plain rounds, where the slope s is the time that a
drafted token adds: its draft step, and its share of the verification. It writes
1 + α + ... + α^k expected tokens (arXiv 2211.17192, equation 1), where α is the probability that a
drafted token is accepted if those before it were.
The speed-up is their ratio; where none is above 1, the round is plain.

α and s are learned while the text is written. ``BreakEven`` decides. It consists of these parts:

``AcceptanceRates``  α of each kind of draft
``Slope``            s of the tokens of one model, or of known tokens
``PlainTime``        T, the time of a plain round, in which slopes are counted
``Credit``           a limit of the losses
``Rest``             a pause where drafts gain too little
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import NamedTuple

from decoding.policies import Offer, Policy
from decoding.rounds import Round, common_prefix

WINDOW = 9  # measurements in a median
KNOWN = "known"  # the name of the slope of tokens that are drafted without running a model


class BreakEven(Policy):
    """Draft choice by break-even: the offer and length of the largest expected speed-up.

    A round passes through four methods: ``draft_length``, which is 0 during a rest; ``choose``
    among the offers of the drafters; ``observe``, with the finished round; and, with a clock,
    ``observe_time``.

    Known tokens: those that no model drafts, such as a lookup's. They have one slope, that of their
    verification. They are compared with the text afterwards, even if their offer was not taken.

    Probes: a model whose speed-up is below 1 drafts one token, ``pause`` plain rounds after the
    last draft, so that its α is learned.

    The clock (``grant_clock``) measures slopes while the text is written: a round of k drafted
    tokens that takes the time t measures s = (t / T - 1) / k. Without it they keep their first
    values. Where several texts share the model's steps, nothing is drafted: the more rows a step
    has, the more another row costs.

    Forced tokens: those that constraints force are sure to be accepted, and the target verifies
    them under every offer. So they count neither into α nor as a risk, and offers are compared
    without their verification. A model must read them too, each at the slope of a known token. It
    reads those before its first token, and behind each of its tokens as many as this text had so
    far per token that was not forced. So a model drafts where few tokens are forced, and stays away
    from a form that is to be filled in. It is not probed behind forced tokens, and a text with
    forced tokens has no ``Rest``.

    Five rounds with one model, without a clock, where the slope is 0.6 and ``pause`` is 2.
    "Waiting" counts the plain rounds before the next probe.

    | round | α | speed-up of one token | waiting | drafted | accepted | cost | credit after |
    |---|---|---|---|---|---|---|---|
    | 1 | 0.70 | 1.062 | 0 | 1 | 0 | 1.6 | 3.42 |
    | 2 | 0.47 | 0.917 | 2 | 0 | 0 | 1.0 | 3.44 |
    | 3 | 0.47 | 0.917 | 1 | 0 | 0 | 1.0 | 3.46 |
    | 4 | 0.47 | 0.917 | 0 | 1 | 1 | 1.6 | 3.90 |
    | 5 | 0.61 | 1.005 | 2 | 1 | 0 | 1.6 | 3.32 |

    Round 1 drafts by the prior and loses. Rounds 2 and 3 are the pause, round 4 is the probe. Its
    success raises α, so round 5 drafts again. The credit after round 1 is 4 + 1.02 - 1.6.
    """

    PRIOR_RATE = 0.7  # α before the first round
    LONGEST_WITH_FORCED = 15  # tokens, forced ones included: a GPU verifies 16 rows in one step

    def __init__(
        self,
        slopes: Mapping[str, float],
        longest: int = 8,
        *,
        memory: float = 0.95,
        pause: int = 16,
        priors: Mapping[str, float] | None = None,
    ) -> None:
        """``slopes``: the first slope per name of a model's offer, and of ``KNOWN`` tokens;
        ``priors``: α of a kind before its first round; ``memory``: the share of its past that
        counts after another round.
        """
        super().__init__(longest)
        self.first_slopes = slopes
        self.memory = memory
        self.pause = pause
        self.priors = priors or {}
        self.past = Past()
        self.plain_time = PlainTime()
        self.credit = Credit()
        self.shares_steps: Callable[[], bool] = lambda: False
        self.rounds = 0
        self.rests_until = 0  # the number of the first round after the rest
        self.waiting = 0  # rounds before the next probe
        # of the current round: the offers, and the one that is taken, if any
        self.offers: Sequence[Offer] = ()
        self.taken: Offer | None = None
        # of its draft: the tokens that were guessed, and those that constraints forced
        self.guessed = 0
        self.forced = 0
        # of the text so far: the tokens that constraints forced, and the others
        self.text_forced = 0
        self.text_free = 0

    def grant_clock(self, past: Past, shares_steps: Callable[[], bool]) -> None:
        self.plain_time.next = 0
        self.past = past
        self.shares_steps = shares_steps

    def draft_length(self) -> int:
        """0 while drafting rests: then no drafter is asked for an offer."""
        return self.LONGEST_WITH_FORCED if self.rounds >= self.rests_until else 0

    def slope(self, name: str) -> Slope:
        """The slope of a model's tokens, by the name of its offer, or of ``KNOWN`` ones."""
        return self.past.slopes.setdefault(name, Slope(self.first_slopes[name]))

    def acceptance(self, kind: str) -> float:
        """Estimate of α of a kind of draft."""
        return self.past.rates.rate(kind, self.priors.get(kind, self.PRIOR_RATE))

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        """The offer to take and the number of its tokens: 0 for a round without a draft."""
        self.offers = offers
        self.taken = None
        any_forced = any(offer.forced for offer in offers)
        # A plain round would waste the tokens that are forced.
        measures_plain = self.rounds >= self.plain_time.next and not any_forced
        if measures_plain or self.shares_steps():
            return offers[0], 0
        drafts = [draft for offer in offers if (draft := self._best_draft(offer))]
        candidates = [draft for draft in drafts if draft.speed > 1]
        if not (candidates or self.waiting or any_forced):  # a probe, of one token
            candidates = [draft for draft in drafts if draft.offer.by_model]
        if candidates:
            best = max(candidates, key=lambda draft: draft.speed)
            self.taken = best.offer
            return best.offer, best.offer.forced + best.guesses
        if any_forced:
            self.taken = next((offer for offer in offers if offer.tokens), offers[0])
            return self.taken, self.taken.forced
        return offers[0], 0

    def _best_draft(self, offer: Offer) -> PossibleDraft | None:
        """The draft of an offer, of one guess or more, with the largest speed-up.

        None where the offer has no guess, or the credit does not cover the loss of one. Another
        guess adds less than the one before it. So the first length without a gain ends the search,
        and where no length gains the draft has one guess.
        """
        rate = self.acceptance(offer.kind)
        slope = self.slope(slope_of(offer)).value
        longest = self.LONGEST_WITH_FORCED if offer.by_model else len(offer.tokens)
        tokens = 1.0
        best = None
        for guesses in range(1, min(self.gamma, longest - offer.forced) + 1):
            cost = guesses * slope + self._reading(offer, guesses)
            if cost > self.credit.left:
                break
            tokens += rate**guesses
            speed = tokens / (1 + cost)
            if best and speed <= best.speed:
                break
            best = PossibleDraft(offer, guesses, speed)
        return best

    def _reading(self, offer: Offer, guesses: int) -> float:
        """Expected time in plain rounds in which a model reads the forced tokens of its draft."""
        forced_so_far = self.text_forced + offer.forced
        if not offer.by_model or not forced_so_far:
            return 0.0
        between = guesses * forced_so_far / (self.text_free + 1)
        return (offer.forced + between) * self.slope(KNOWN).value

    def observe(self, round: Round) -> None:
        self.rounds += 1
        self.guessed, accepted = round.guessed
        self.forced = len(round.drafted) - self.guessed
        if not self.offers:  # no drafter was asked
            self.taken = None
        cost = 1 + self._cost_of_forced()
        if self.taken:
            cost += self.guessed * self.slope(slope_of(self.taken)).value
        written = len(round.emitted)
        newly_forced = sum(round.forced[:written])
        self.text_forced += newly_forced
        self.text_free += written - newly_forced
        self.credit.add_round(written, cost)
        if self.text_forced:
            self.rests_until = 0  # a grammar's tokens need no luck
        elif self.guessed:
            self.rests_until = self.rounds + self.past.rest.after_draft(written, cost)
        self.waiting = self.pause if self.guessed else max(0, self.waiting - 1)
        self._learn_rates(round.emitted, accepted)
        self.offers = ()  # of the next round, unless its drafters are asked

    def _learn_rates(self, emitted: Sequence[int], accepted: int) -> None:
        """Learn acceptance rates from the tokens of a round, of which ``accepted`` were guessed: of
        known tokens also where their offer was not taken.
        """
        learn = partial(self.past.rates.learn, memory=self.memory)
        for offer in self.offers:
            if offer.tokens:
                equal = common_prefix(offer.tokens, emitted)
                judged = min(len(offer.tokens), len(emitted))
                learn(offer.kind, max(0, equal - offer.forced), rejected=equal < judged)
            elif self.guessed and offer is self.taken:
                learn(offer.kind, accepted, rejected=accepted < self.guessed)

    def _cost_of_forced(self) -> float:
        """Cost of the forced tokens of the last draft, in plain rounds: the target has read them,
        and a model that drafted has too.
        """
        if not self.forced:
            return 0.0
        by_model = self.taken is not None and self.taken.by_model and self.guessed
        return (2 if by_model else 1) * self.forced * self.slope(KNOWN).value

    def observe_time(self, seconds: float) -> None:
        name = slope_of(self.taken) if self.taken else None
        for other, slope in self.past.slopes.items():
            if other != name:
                slope.fade()
        if name is None:
            self.plain_time.add_plain(seconds, self.rounds)
            return
        self.plain_time.was_plain = False
        slope = self.slope(name)
        was_warm = slope.is_warm
        slope.is_warm = True
        drafted = self.guessed
        beside = self._cost_of_forced()
        if name == KNOWN:  # forced tokens are known ones
            drafted += self.forced
            beside = 0.0
        if not (was_warm and drafted):  # a model that drafted nothing ran all the same
            return
        extra = self.plain_time.extra(seconds, self.rounds)
        if extra is not None:
            slope.learn((extra - beside) / drafted)


class PossibleDraft(NamedTuple):
    """Draft of an offer's forced tokens and of some guesses, with its expected speed-up."""

    offer: Offer
    guesses: int
    speed: float


def slope_of(offer: Offer) -> str:
    """Name of the slope of an offer's tokens."""
    return offer.name if offer.by_model else KNOWN


class AcceptanceRates:
    """Acceptance rate α of each kind of draft: accepted over judged tokens of recent rounds.

    The tokens behind a rejected one are not judged. A rate begins at its prior, which weighs as
    much as ``PRIOR_WEIGHT`` tokens.
    """

    PRIOR_WEIGHT = 2.0

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, float]] = {}  # tokens accepted and judged, by kind

    def rate(self, kind: str, prior: float) -> float:
        """Estimate of α."""
        accepted, judged = self.seen.get(kind, (0.0, 0.0))
        return (accepted + prior * self.PRIOR_WEIGHT) / (judged + self.PRIOR_WEIGHT)

    def learn(self, kind: str, accepted: int, *, rejected: bool, memory: float) -> None:
        """Add a round: the tokens accepted, and whether one was rejected behind them. The rounds
        before it count ``memory`` times what they did.
        """
        before = self.seen.get(kind, (0.0, 0.0))
        judged = accepted + rejected
        self.seen[kind] = (memory * before[0] + accepted, memory * before[1] + judged)


class Slope:
    """Time that a drafted token adds to a round, in plain rounds: a median of measurements.

    The estimate begins at ``first``. Without new measurements it fades back to it, so that a draft
    which was slow once is tried again.
    """

    FLOOR = 0.02
    FADE = 0.97  # per round without a measurement

    def __init__(self, first: float) -> None:
        self.first = first
        # Two copies of the first value, so that one disturbed round does not decide.
        self.measured = deque([first, first], maxlen=WINDOW)
        self.median = first
        self.trust = 1.0
        self.is_warm = False  # its drafts have run once: the first round is slower, and not learned

    @property
    def value(self) -> float:
        faded = self.first + self.trust * (self.median - self.first)
        return max(self.FLOOR, faded)

    def learn(self, slope: float) -> None:
        """Add a measurement."""
        self.measured.append(slope)
        self.median = median(self.measured)
        self.trust = 1.0

    def fade(self) -> None:
        """Count a round without a measurement."""
        self.trust *= self.FADE


class PlainTime:
    """Time T of a plain round: the median of this text's last ones, but at most the fastest of its
    last rounds with a draft.

    A few rounds are plain only to measure T: the first two, and others 16, 32, 48 and then every
    64 rounds after those before. They come in twos, and the second is learned from: behind a draft
    a plain round of a small model finds the draft's weights in the processor's caches, and takes
    up to twice as long. Where a draft was much faster than T, T must have been disturbed, and is
    measured at once.
    """

    FIRST_PAUSE = 16  # rounds from the first measurement to the second; as many more follow
    LONGEST_PAUSE = 64
    DISTURBED = 1.5  # T in times of a round with a draft, above which it is measured again

    def __init__(self) -> None:
        self.next = math.inf  # the number of the round that measures T next; never without a clock
        self.was_plain = False  # the round before
        self.times: deque[float] = deque(maxlen=WINDOW)
        self.draft_times: deque[float] = deque(maxlen=WINDOW)

    def add_plain(self, seconds: float, rounds: int) -> None:
        """Add the time of a plain round; ``rounds`` is the number of rounds so far."""
        if self.was_plain:
            self.times.append(seconds)
            self.next = rounds + min(self.FIRST_PAUSE * len(self.times), self.LONGEST_PAUSE)
        self.was_plain = True

    def extra(self, seconds: float, rounds: int) -> float | None:
        """Time of a round with a draft beyond T, in plain rounds; None before T is known."""
        self.draft_times.append(seconds)
        if not self.times:
            return None
        plain = median_low(self.times)
        if plain > self.DISTURBED * seconds:
            self.next = rounds
        # A plain round that took longer than one with a draft was disturbed.
        return seconds / min(plain, *self.draft_times) - 1


class Credit:
    """Limit of losses: plain rounds that a text may still lose by drafting.

    No draft is made whose cost, were all of it rejected, exceeds that of a plain round by more
    than the credit. Each round adds 1 + ``PER_TOKEN`` per token of the text and subtracts its
    cost. So a text never costs more than ``START`` plus 1 + ``PER_TOKEN`` times plain decoding, by
    the slopes, whatever the target accepts.
    """

    START = 4.0
    PER_TOKEN = 0.02
    LARGEST = 6.0

    def __init__(self) -> None:
        self.left = self.START

    def add_round(self, written: int, cost: float) -> None:
        """Count a round that wrote this number of tokens, with its cost in plain rounds."""
        self.left = min(self.LARGEST, self.left + (1 + self.PER_TOKEN) * written - cost)


class Rest:
    """Rest from drafting where the last drafts together gained less than ``WORTHWHILE``.

    Looking for a draft takes time too, in a small model a tenth of a plain round. So no drafter is
    asked for 16 rounds, then for 32, then for 64, until drafts gain again.
    """

    WORTHWHILE = 1.05  # speed-up of drafts below which looking for them does not pay
    MEMORY = 0.95  # share of what was saved before that still counts, per draft
    SHORTEST = 16  # rounds
    LONGEST = 64

    def __init__(self) -> None:
        # plain rounds that the last drafts saved: above 0, so that one bad draft decides nothing
        self.saved = 2.0
        self.rounds = self.SHORTEST  # of the next rest

    def after_draft(self, written: int, cost: float) -> int:
        """Rounds to rest after a draft whose round wrote this number of tokens at this cost."""
        self.saved = self.MEMORY * self.saved + written - self.WORTHWHILE * cost
        if self.saved >= 0:
            self.rounds = self.SHORTEST
            return 0
        rest = self.rounds
        self.rounds = min(2 * rest, self.LONGEST)
        return rest


@dataclass
class Past:
    """Estimates from past rounds, of one text or of several; ``slopes`` by the name of a model's
    offer, and that of ``KNOWN`` tokens.
    """

    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    slopes: dict[str, Slope] = field(default_factory=dict)
    rest: Rest = field(default_factory=Rest)
