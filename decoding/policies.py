"""Policies of draft length.

A policy may read the tokens already drafted and past rounds. It never reads this round's target
probabilities or acceptances. So it changes the speed and not the distribution of the text; the
proof holds for any policy under these rules.

A policy has no clock by default. The writer grants it the times of past rounds only where no text
can change by a draft's length: in greedy decoding and under the race, where rows do not depend on
each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from decoding.rounds import Round
from decoding.text import common_prefix


class Policy:
    """Interface of a policy, as the loop and the drafters use it.

    ``gamma`` is the most tokens that are guessed in a round; forced ones come on top.

    ``reads_draft_confidence`` and ``reads_target_confidence`` ask for confidences, each a softmax
    over the vocabulary.
    """

    reads_draft_confidence = False
    reads_target_confidence = False

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def draft_length(self) -> int:
        """Largest number of tokens to draft in the coming round."""
        return self.gamma

    def keep_drafting(self, confidence: float) -> bool:
        """Whether to continue the draft after a token of this confidence. The token itself stays in
        the draft.
        """
        return True

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        """The offer to take, and the largest number of its tokens, 0 for plain decoding: see
        ``BreakEven``.
        """
        return offers[0], self.draft_length()

    def observe(self, round: Round) -> None:
        """Update the policy with a finished round."""

    def grant_clock(self, past: Past, shares_steps: Callable[[], bool]) -> None:
        """Grant the times of rounds, by ``observe_time``, and the ``past`` of earlier texts.

        ``shares_steps`` tells whether other texts share the model's steps now. Only for a text that
        no draft length can change.
        """

    def observe_time(self, seconds: float) -> None:
        """Update the policy with the duration of the round that it observed last."""


class FixedLength(Policy):
    """Fixed draft length: ``gamma`` tokens every round; 0 is plain decoding."""


class AdaptiveExit(Policy):
    """Draft & Verify's adaptive exit (arXiv 2309.08168, section 3.3): stop after a token of low
    confidence.

    Drafting ends after the first token whose confidence is below ``threshold``; that token is
    verified like the others. Below a smoothed acceptance rate of ``ALPHA`` the threshold rises.
    Otherwise it falls, unless the draft was full.
    """

    reads_draft_confidence = True
    ALPHA = 0.9
    RATE_MEMORY = 0.5

    def __init__(
        self,
        threshold: float,
        longest: int = 8,
        *,
        step: float = 0.01,
        threshold_memory: float = 0.9,
    ):
        super().__init__(longest)
        self.threshold = threshold
        self.step = step
        self.threshold_memory = threshold_memory
        self.rate = 0.0

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def observe(self, round: Round) -> None:
        drafted, accepted = round.guessed
        if not drafted:
            return
        self.rate = self.RATE_MEMORY * self.rate + (1 - self.RATE_MEMORY) * accepted / drafted
        moved = self.threshold
        if self.rate < self.ALPHA:
            moved += self.step
        elif len(round.drafted) < self.gamma:
            moved -= self.step
        self.threshold = (
            self.threshold_memory * self.threshold + (1 - self.threshold_memory) * moved
        )


@dataclass(frozen=True)
class Offer:
    """Possible draft of the coming round: the drafter's ``name``, and the ``kind`` that acceptance
    is estimated for.

    ``tokens``: the tokens to be drafted, where they are known without running a model. The first
    ``forced`` tokens of the draft, of a model's too, are the only ones that constraints allow.
    """

    name: str
    kind: str
    tokens: Sequence[int] | None = None
    forced: int = 0


class PossibleDraft(NamedTuple):
    """Draft of an offer's forced tokens and of some guesses, with its expected speed-up."""

    offer: Offer
    guesses: int
    speed: float


class Slope:
    """Time that a drafted token adds to a round, in plain rounds: a median of measurements.

    The estimate begins at ``first``. Without new measurements it fades back to it, so that a draft
    which was slow once is tried again.
    """

    WINDOW = 9  # measurements in the median
    FLOOR = 0.02
    FADE = 0.97  # per round without a measurement

    def __init__(self, first: float) -> None:
        self.first = first
        # Two copies of the first value, so that one disturbed round does not decide.
        self.measured = deque([first, first], maxlen=self.WINDOW)
        self.median = first
        self.trust = 1.0

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


KNOWN = "known"  # the name of the slope of tokens that are drafted without running a model


@dataclass
class Past:
    """Estimates from past rounds, of one text or of several: see ``BreakEven``.

    ``seen``: tokens accepted and tokens judged, per kind of draft; ``slopes``: per model, by the
    name of its offer, and that of ``KNOWN`` tokens; ``timed``: the names of slopes whose drafts
    have run once; ``saved``: plain rounds that the last drafts saved, above 0 at
    first, so that one bad draft decides nothing; ``rest``: rounds of the next rest.
    """

    seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    slopes: dict[str, Slope] = field(default_factory=dict)
    timed: set[str] = field(default_factory=set)
    saved: float = 2.0
    rest: int = 16


class BreakEven(Policy):
    """Draft choice by break-even: the offer and length of the largest expected speed-up.

    A round that drafts k tokens takes 1 + k·s plain rounds, where the slope s is the time that a
    drafted token adds: its draft step, and its share of the verification. It writes
    1 + α + ... + α^k expected tokens (arXiv 2211.17192, equation 1). The speed-up is their ratio;
    where none is above 1, the round is plain. Tokens that are known without running a model, such
    as a lookup's, have one slope, that of their verification.

    The acceptance rate α of each kind of draft is estimated from recent rounds; older ones fade by
    ``memory``. Known tokens of an offer without a model are compared with the text afterwards, even
    if the offer was not taken. A model whose speed-up is below 1 is probed with a draft of one
    token, ``pause`` plain rounds after the last draft.

    With a clock (``grant_clock``) the slopes are measured while the text is written. T, the time of
    a plain round, is the median of this text's last ones, but at most its fastest round with a
    draft. A round of k drafted tokens measures s = (time / T - 1) / k. So a few rounds are plain
    only to measure T: the first two, and others 16, 32, 48 and then every 64 rounds after those
    before; the next ones where a draft was much faster than T, which must have been disturbed. They
    come in twos, and the second is learned from: behind a draft a plain round of a small model
    finds the draft's weights in the processor's caches, and takes up to twice as long. Nor is the
    first round of each slope learned from. Without a clock the slopes keep their first values.

    The credit, in plain rounds, limits losses: no draft is made whose cost, were all of it
    rejected, exceeds that of a plain round by more than the credit. It begins at ``START_CREDIT``
    and is at most ``LARGEST_CREDIT``. Each round adds 1 + ``CREDIT_PER_TOKEN`` per token of the
    text and subtracts its cost 1 + k·s. So a text never costs more than ``START_CREDIT`` plus 1 +
    ``CREDIT_PER_TOKEN`` times plain decoding, by these slopes, whatever the target accepts.

    Tokens that constraints force are sure to be accepted, and the target verifies them under every
    offer. So they count neither into α nor as a risk, and offers are compared without their
    verification. A model must read them too, which costs another known token's slope each, since a
    row more costs it about as much as the target. It reads those before its first token, and
    behind each of its tokens as many as this text had so far per token that was not forced. So a
    model drafts where few tokens are forced, and stays away from a form that is to be filled in. It
    is not probed behind forced tokens.

    Looking for a draft takes time too, in a small model a tenth of a plain round. So drafting rests
    where the last drafts together gained less than ``WORTHWHILE``: no drafter is asked for 16
    rounds, then for 32, then for 64, until drafts gain again. It does not rest in a text in which
    tokens are forced.

    Where several texts share the model's steps, nothing is drafted: the more rows a step has, the
    more another row costs.

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
    PRIOR_WEIGHT = 2.0  # the weight of the prior, in tokens
    START_CREDIT = 4.0
    CREDIT_PER_TOKEN = 0.02
    LARGEST_CREDIT = 6.0
    FIRST_PAUSE = 16  # rounds from the first measurement of T to the second; twice as many follow
    LONGEST_PAUSE = 64  # rounds between measurements of T
    DISTURBED = 1.5  # T in times of a round with a draft, above which it is measured again
    WORTHWHILE = 1.05  # speed-up of drafts below which looking for them does not pay
    SAVED_MEMORY = 0.95  # share of what was saved before that still counts, per draft
    SHORTEST_REST = 16  # rounds
    LONGEST_REST = 64
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
        ``priors``: α of a kind before its first round.
        """
        super().__init__(longest)
        self.first_slopes = slopes
        self.memory = memory
        self.pause = pause
        self.priors = priors or {}
        self.credit = self.START_CREDIT
        self.waiting = 0
        self.offers: Sequence[Offer] = ()
        self.taken: Offer | None = None
        self.last_guessed = 0  # tokens of the last draft that have the slope of its offer
        self.last_forced = 0  # and those that constraints forced in it
        self.text_forced = 0  # tokens of the text that constraints forced
        self.text_free = 0  # and the others
        self.past = Past()
        self.shares_steps: Callable[[], bool] = lambda: False
        self.rounds = 0
        self.rests_until = 0  # the number of the first round after the rest
        self.next_plain = math.inf  # the number of the round that measures T next
        self.was_plain = False  # the round before
        self.plain_times: deque[float] = deque(maxlen=Slope.WINDOW)
        self.draft_times: deque[float] = deque(maxlen=Slope.WINDOW)

    def draft_length(self) -> int:
        """0 while drafting rests: then no drafter is asked for an offer."""
        return self.LONGEST_WITH_FORCED if self.rounds >= self.rests_until else 0

    def grant_clock(self, past: Past, shares_steps: Callable[[], bool]) -> None:
        self.next_plain = 0
        self.past = past
        self.shares_steps = shares_steps

    def slope(self, name: str) -> Slope:
        """The slope of a model's tokens, by the name of its offer, or of ``KNOWN`` ones."""
        return self.past.slopes.setdefault(name, Slope(self.first_slopes[name]))

    def acceptance(self, kind: str) -> float:
        """Estimate of α: accepted over judged tokens of this kind, where those after a rejected
        token do not count.
        """
        accepted, judged = self.past.seen.get(kind, (0.0, 0.0))
        prior = self.priors.get(kind, self.PRIOR_RATE)
        return (accepted + prior * self.PRIOR_WEIGHT) / (judged + self.PRIOR_WEIGHT)

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        """The offer to take and the number of its tokens: 0 for a round without a draft."""
        self.offers = offers
        self.taken = None
        any_forced = any(offer.forced for offer in offers)
        # A plain round would waste the tokens that are forced.
        measures_plain = self.rounds >= self.next_plain and not any_forced
        if measures_plain or self.shares_steps():
            return offers[0], 0
        drafts = [draft for offer in offers if (draft := self._best_draft(offer))]
        candidates = [draft for draft in drafts if draft.speed > 1]
        if not (candidates or self.waiting or any_forced):  # a probe, of one token
            candidates = [draft for draft in drafts if draft.offer.tokens is None]
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
        longest = self.LONGEST_WITH_FORCED if offer.tokens is None else len(offer.tokens)
        tokens = 1.0
        best = None
        for guesses in range(1, min(self.gamma, longest - offer.forced) + 1):
            cost = guesses * slope + self._reading(offer, guesses)
            if cost > self.credit:
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
        if offer.tokens is not None or not forced_so_far:
            return 0.0
        between = guesses * forced_so_far / (self.text_free + 1)
        return (offer.forced + between) * self.slope(KNOWN).value

    def observe(self, round: Round) -> None:
        offers = self.offers
        self.offers = ()  # of the next round, unless its drafters are asked
        if not offers:
            self.taken = None
        self.rounds += 1
        self.last_guessed, accepted = round.guessed
        self.last_forced = len(round.drafted) - self.last_guessed
        cost = 1.0
        if self.taken:
            cost += self.last_guessed * self.slope(slope_of(self.taken)).value
        cost += self._cost_of_forced()
        newly_forced = sum(round.forced[: len(round.emitted)])
        self.text_forced += newly_forced
        self.text_free += len(round.emitted) - newly_forced
        earned = (1 + self.CREDIT_PER_TOKEN) * len(round.emitted)
        self.credit = min(self.LARGEST_CREDIT, self.credit + earned - cost)
        if self.text_forced:
            self.rests_until = 0  # a grammar's tokens need no luck
        elif self.last_guessed:
            self._rest_if_useless(len(round.emitted) - self.WORTHWHILE * cost)
        self.waiting = self.pause if self.last_guessed else max(0, self.waiting - 1)
        for offer in offers:
            if offer.tokens:
                judged = min(len(offer.tokens), len(round.emitted))
                equal = common_prefix(offer.tokens, round.emitted)
                self._learn(offer.kind, equal - min(offer.forced, equal), equal < judged)
            elif self.last_guessed and offer is self.taken:
                self._learn(offer.kind, accepted, accepted < self.last_guessed)

    def _rest_if_useless(self, saved: float) -> None:
        """Count what a draft saved, in plain rounds, and rest where the last ones saved nothing."""
        self.past.saved = self.past.saved * self.SAVED_MEMORY + saved
        if self.past.saved >= 0:
            self.past.rest = self.SHORTEST_REST
            return
        self.rests_until = self.rounds + self.past.rest
        self.past.rest = min(2 * self.past.rest, self.LONGEST_REST)

    def _cost_of_forced(self) -> float:
        """Cost of the forced tokens of the last draft, in plain rounds: the target has read them,
        and a model that drafted has too.
        """
        if not self.last_forced:
            return 0.0
        by_model = self.taken is not None and self.taken.tokens is None and self.last_guessed
        return (2 if by_model else 1) * self.last_forced * self.slope(KNOWN).value

    def _learn(self, kind: str, accepted: int, rejected: bool) -> None:
        before = self.past.seen.get(kind, (0.0, 0.0))
        judged = accepted + rejected
        self.past.seen[kind] = (
            self.memory * before[0] + accepted,
            self.memory * before[1] + judged,
        )

    def observe_time(self, seconds: float) -> None:
        name = slope_of(self.taken) if self.taken else None
        for other, slope in self.past.slopes.items():
            if other != name:
                slope.fade()
        if name is None:
            if self.was_plain:
                self.plain_times.append(seconds)
                pause = self.FIRST_PAUSE * len(self.plain_times)
                self.next_plain = self.rounds + min(pause, self.LONGEST_PAUSE)
            self.was_plain = True
            return
        self.was_plain = False
        drafted = self.last_guessed + (self.last_forced if name == KNOWN else 0)
        is_first = name not in self.past.timed
        self.past.timed.add(name)
        if is_first or not drafted:  # a model that drafted nothing ran all the same
            return
        self.draft_times.append(seconds)
        if not self.plain_times:
            return
        plain = median_low(self.plain_times)
        if plain > self.DISTURBED * seconds:
            self.next_plain = self.rounds
        # A plain round that took longer than one with a draft was disturbed.
        plain = min(plain, *self.draft_times)
        extra = seconds / plain - 1
        if name != KNOWN:
            extra -= self._cost_of_forced()
        self.slope(name).learn(extra / drafted)


def slope_of(offer: Offer) -> str:
    """Name of the slope of an offer's tokens."""
    return offer.name if offer.tokens is None else KNOWN


class PolicyAround(Policy):
    """Policy around another one, ``inner``: a subclass replaces some of its decisions."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner.gamma)
        self.inner = inner
        self.reads_draft_confidence = inner.reads_draft_confidence
        self.reads_target_confidence = inner.reads_target_confidence

    def draft_length(self) -> int:
        return self.inner.draft_length()

    def keep_drafting(self, confidence: float) -> bool:
        return self.inner.keep_drafting(confidence)

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        return self.inner.choose(offers)

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def grant_clock(self, past: Past, shares_steps: Callable[[], bool]) -> None:
        self.inner.grant_clock(past, shares_steps)

    def observe_time(self, seconds: float) -> None:
        self.inner.observe_time(seconds)


class ConfidenceGate(PolicyAround):
    """Gate by the target's confidence: a round has no draft where drafts are likely to be rejected.

    The gate is closed for a round if, in the round before, the target's confidence in the token
    that it drew was below ``least``. While it is open, ``inner`` decides.
    """

    def __init__(self, inner: Policy, least: float) -> None:
        super().__init__(inner)
        self.reads_target_confidence = True
        self.least = least
        self.open = True

    def draft_length(self) -> int:
        return super().draft_length() if self.open else 0

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.open = round.target_confidence is None or round.target_confidence >= self.least
