"""Break-even, the policy of ``--draft auto``: the draft of the largest expected speed-up, or none.

A round that drafts k tokens takes 1 + k·s plain rounds, where the slope s is the time that a
drafted token adds: its draft step, and its share of the verification. It writes
1 + α₁ + α₁α₂ + ... + α₁···αₖ expected tokens (arXiv 2211.17192, equation 1, where all α are equal).
Here αⱼ is the probability that the j-th drafted token is accepted if those before it were. It
mostly grows with j, as texts have easy and hard passages, and so favours longer drafts.
The speed-up is their ratio; where none is above 1, the round is plain.

α and s are learned while the text is written. That is a bandit with a known structure: all lengths
of a draft share its α and its s. ``BreakEven`` decides by the estimates in ``Past``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from statistics import median_low
from typing import NamedTuple

from decoding.policies import Offer, Policy
from decoding.rounds import Round, common_prefix

KNOWN = "known"  # the name of the slope of tokens that are drafted without running a model


class BreakEven(Policy):
    """Draft choice by break-even: the offer and length of the largest expected speed-up.

    A round passes through four methods: ``draft_length``; ``choose`` among the offers of the
    drafters; ``observe``, with the finished round; and, with a clock, ``observe_time``.

    Credit: the plain rounds that the text may still lose by drafting. No draft is made that would
    lose more, were all of it rejected. A round adds 1 + ``SHARE`` per token of the text and
    subtracts its cost. So a text never costs more than ``START`` plus 1 + ``SHARE`` times plain
    decoding, by the slopes, whatever the target accepts.

    Allowance: ``SHARE`` of a plain round per token, which pays for learning. Three things cost
    something and may gain nothing: one token of a model whose speed-up is below 1, so that its α is
    learned; two plain rounds where drafts pay, so that T is (before a model's first draft they are
    not paid for); and, where drafts saved nothing lately, asking the drafters for offers. Each
    waits until the allowance covers its expected loss.

    Known tokens: those that no model drafts, such as a lookup's. They have one slope, that of their
    verification. They are compared with the text afterwards, even if their offer was not taken.

    The clock (``grant_clock``) measures slopes while the text is written: a round of k drafted
    tokens that takes the time t measures s = (t / T - 1) / k, with T the time of a plain round.
    Without it they keep their first values. Where several texts share the model's steps no round is
    timed. Then each other text adds ``ANOTHER_TEXT`` to the slopes, since the more rows a step has,
    the more another row costs. So drafts become shorter, and at some number of texts none pays.

    Forced tokens: those that constraints force are sure to be accepted, and the target verifies
    them under every offer. So they count neither into α nor as a risk, and offers are compared
    without their verification. A model must read them too, each at the slope of a known token. It
    reads those before its first token, and behind each of its tokens as many as this text had so
    far per token that was not forced. So a model drafts where few tokens are forced, and stays away
    from a form that is to be filled in. It is not tried out behind forced tokens.

    Five rounds with one model, without a clock, where the slope is 0.65 and the allowance is nearly
    spent:

    | round | α | speed-up of one token | allowance | drafted | accepted | cost | credit after |
    |---|---|---|---|---|---|---|---|
    | 1 | 0.70 | 1.030 | 0.04 | 1 | 0 | 1.65 | 3.37 |
    | 2 | 0.56 | 0.945 | 0.06 | 0 | 0 | 1.0 | 3.39 |
    | 3 | 0.56 | 0.945 | 0.08 | 0 | 0 | 1.0 | 3.41 |
    | 4 | 0.56 | 0.945 | 0.10 | 1 | 1 | 1.65 | 3.80 |
    | 5 | 0.64 | 0.993 | 0.05 | 1 | 0 | 1.65 | 3.17 |

    Round 1 drafts by the prior and loses. One token would now lose 1.65 - 1.56 = 0.09 plain rounds,
    so rounds 2 and 3 wait for the allowance, and it pays for round 4. Its success makes the loss
    small, so round 5 drafts again. The credit after round 1 is 4 + 1.02 - 1.65.
    """

    PRIOR_RATE = 0.7  # α before the first round
    LONGEST_WITH_FORCED = 15  # tokens, forced ones included: a GPU verifies 16 rows in one step
    START = 4.0  # credit of a text
    MOST_CREDIT = 6.0
    SHARE = 0.02
    MOST_ALLOWANCE = 2.0
    ANOTHER_TEXT = 0.08  # plain rounds: what a drafted token costs more for each text beside
    ASKING = 0.05  # plain rounds: in a small model it takes up to a tenth

    def __init__(
        self,
        slopes: Mapping[str, float],
        longest: int = 8,
        *,
        memory: float = 0.95,
        priors: Mapping[str, float] | None = None,
    ) -> None:
        """``slopes``: the first slope per name of a model's offer, and of ``KNOWN`` tokens;
        ``priors``: α of a kind before its first round; ``memory``: the share of its past that
        counts after another round.
        """
        super().__init__(longest)
        self.first_slopes = slopes
        self.memory = memory
        self.priors = priors or {}
        self.past = Past()
        self.plain_time: PlainTime | None = None  # without a clock
        self.credit = self.START
        self.sharers: Callable[[], int] = lambda: 1
        # of the current round: the offers, and the one that is taken, if any
        self.offers: Sequence[Offer] = ()
        self.taken: Offer | None = None
        # of its draft: the tokens that were guessed, and those that constraints forced
        self.guessed = 0
        self.forced = 0
        # of the text so far: the tokens that constraints forced, and the others
        self.text_forced = 0
        self.text_free = 0

    def grant_clock(self, past: Past, sharers: Callable[[], int]) -> None:
        self.plain_time = PlainTime()
        self.past = past
        self.sharers = sharers

    def slope(self, name: str) -> float:
        """Estimate of the slope of a model's tokens, by the name of its offer, or of ``KNOWN``
        ones.
        """
        alone = self.past.slopes.get(name, self.first_slopes[name])
        return alone + self.ANOTHER_TEXT * (self.sharers() - 1)

    def acceptance(self, kind: str) -> Iterator[float]:
        """Estimates of α₁, α₂ ... of a kind of draft, without end."""
        return self.past.rates(kind, self.priors.get(kind, self.PRIOR_RATE))

    def draft_length(self) -> int:
        """0 where no drafter is asked for an offer: drafts saved nothing lately, and the allowance
        does not cover another look.
        """
        # A grammar's tokens need no luck.
        asks = self.text_forced or self.past.saved >= 0 or self._pay(self.ASKING)
        return self.LONGEST_WITH_FORCED if asks else 0

    def _pay(self, loss: float) -> bool:
        """Whether the allowance covers an expected loss, which is then subtracted."""
        if self.past.allowance < loss:
            return False
        self.past.allowance -= loss
        return True

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        """The offer to take and the number of its tokens: 0 for a round without a draft."""
        self.offers = offers
        self.taken = None
        any_forced = any(offer.forced for offer in offers)
        drafts = [draft for offer in offers if (draft := self._best_draft(offer))]
        best = max(drafts, key=PossibleDraft.speedup, default=None)
        if best and best.speedup() > 1:
            # A plain round would waste the tokens that are forced.
            draws = any_forced or not self._measures_plain(best)
        else:
            models = [draft for draft in drafts if draft.offer.by_model and not any_forced]
            best = max(models, key=PossibleDraft.speedup, default=None)
            draws = best is not None and self._pay(best.cost - best.tokens)
        if best and draws:
            self.taken = best.offer
            return best.offer, best.offer.forced + best.guesses
        if any_forced:
            self.taken = next((offer for offer in offers if offer.tokens), offers[0])
            return self.taken, self.taken.forced
        return offers[0], 0

    def _measures_plain(self, best: PossibleDraft) -> bool:
        """Whether the round is plain only to measure T, although the best draft would pay."""
        if self.plain_time is None or self.sharers() > 1:
            return False
        if not self.plain_time.times and slope_of(best.offer) not in self.past.slopes:
            return True
        if self.past.rounds_since_plain < Past.STALE:
            return False
        return self.plain_time.was_plain or self._pay(2 * (1 - 1 / best.speedup()))

    def _best_draft(self, offer: Offer) -> PossibleDraft | None:
        """The draft of an offer, of one guess or more, with the largest speed-up.

        None where the offer has no guess, or the credit does not cover the loss of one. Another
        guess adds less than the one before it. So the first length without a gain ends the search,
        and where no length gains the draft has one guess.
        """
        slope = self.slope(slope_of(offer))
        longest = self.LONGEST_WITH_FORCED if offer.by_model else len(offer.tokens)
        tokens = 1.0
        reached = 1.0  # the probability that all guesses are accepted
        best = None
        lengths = range(1, min(self.gamma, longest - offer.forced) + 1)
        for guesses, rate in zip(lengths, self.acceptance(offer.kind), strict=False):
            extra = guesses * slope + self._reading(offer, guesses)
            if extra > self.credit:
                break
            reached *= rate
            tokens += reached
            draft = PossibleDraft(offer, guesses, tokens, 1 + extra)
            if best and draft.speedup() <= best.speedup():
                break
            best = draft
        return best

    def _reading(self, offer: Offer, guesses: int) -> float:
        """Expected time in plain rounds in which a model reads the forced tokens of its draft."""
        forced_so_far = self.text_forced + offer.forced
        if not offer.by_model or not forced_so_far:
            return 0.0
        between = guesses * forced_so_far / (self.text_free + 1)
        return (offer.forced + between) * self.slope(KNOWN)

    def observe(self, round: Round) -> None:
        self.guessed, accepted = round.guessed
        self.forced = len(round.drafted) - self.guessed
        if not self.offers:  # no drafter was asked
            self.taken = None
        cost = 1 + self._cost_of_forced()
        if self.taken:
            cost += self.guessed * self.slope(slope_of(self.taken))
        written = len(round.emitted)
        newly_forced = sum(round.forced[:written])
        self.text_forced += newly_forced
        self.text_free += written - newly_forced
        earned = self.SHARE * written
        self.credit = min(self.MOST_CREDIT, self.credit + written + earned - cost)
        self.past.allowance = min(self.MOST_ALLOWANCE, self.past.allowance + earned)
        if self.offers:
            self.past.saved *= self.memory
            self.past.saved += written - cost - self.ASKING
        self._learn_rates(round.emitted, accepted)
        self.offers = ()  # of the next round, unless its drafters are asked

    def _learn_rates(self, emitted: Sequence[int], accepted: int) -> None:
        """Learn acceptance rates from the tokens of a round, of which ``accepted`` were guessed: of
        known tokens also where their offer was not taken.
        """
        for offer in self.offers:
            if offer.tokens:
                equal = common_prefix(offer.tokens, emitted)
                rejected = equal < min(len(offer.tokens), len(emitted))
                self.past.learn_rates(
                    offer.kind, max(0, equal - offer.forced), rejected, self.memory
                )
            elif self.guessed and offer is self.taken:
                self.past.learn_rates(offer.kind, accepted, accepted < self.guessed, self.memory)

    def _cost_of_forced(self) -> float:
        """Cost of the forced tokens of the last draft, in plain rounds: the target has read them,
        and a model that drafted has too.
        """
        if not self.forced:
            return 0.0
        by_model = self.taken is not None and self.taken.by_model and self.guessed
        return (2 if by_model else 1) * self.forced * self.slope(KNOWN)

    def observe_time(self, seconds: float) -> None:
        self.past.rounds_since_plain += 1
        name = slope_of(self.taken) if self.taken else None
        for other in self.past.slopes.keys() - {name}:
            self.past.fade_slope(other, self.first_slopes[other])
        if name is None:
            if self.plain_time.add_plain(seconds):
                self.past.rounds_since_plain = 0
            return
        extra = self.plain_time.extra(seconds)
        drafted = self.guessed
        beside = self._cost_of_forced()
        if name == KNOWN:  # forced tokens are known ones
            drafted += self.forced
            beside = 0.0
        if self.plain_time.was_disturbed:
            self.past.rounds_since_plain = Past.STALE
        if extra is not None and drafted:  # a model that drafted nothing ran all the same
            self.past.learn_slope(name, self.slope(name), (extra - beside) / drafted)


class PossibleDraft(NamedTuple):
    """Draft of an offer's forced tokens and of some guesses: its expected tokens, and its cost in
    plain rounds.
    """

    offer: Offer
    guesses: int
    tokens: float
    cost: float

    def speedup(self) -> float:
        """Expected speed-up over plain decoding."""
        return self.tokens / self.cost


def slope_of(offer: Offer) -> str:
    """Name of the slope of an offer's tokens."""
    return offer.name if offer.by_model else KNOWN


class PlainTime:
    """Time T of a plain round of a text: the median of its last ones, but at most the fastest of
    its last rounds with a draft.

    Of plain rounds in a row the first is not counted: behind a draft a plain round of a small model
    finds the draft's weights in the processor's caches, and takes up to twice as long.
    """

    WINDOW = 9  # rounds
    DISTURBED = 1.5  # T in times of a round with a draft, above which T must have been disturbed

    def __init__(self) -> None:
        self.was_plain = False  # the round before
        self.was_disturbed = False
        self.times: deque[float] = deque(maxlen=self.WINDOW)
        self.draft_times: deque[float] = deque(maxlen=self.WINDOW)

    def add_plain(self, seconds: float) -> bool:
        """Add a plain round; returns whether it was counted."""
        counted = self.was_plain
        self.was_plain = True
        if counted:
            self.times.append(seconds)
        return counted

    def extra(self, seconds: float) -> float | None:
        """Time of a round with a draft beyond T, in plain rounds; None before T is known."""
        self.was_plain = False
        self.draft_times.append(seconds)
        if not self.times:
            return None
        plain = median_low(self.times)
        self.was_disturbed = plain > self.DISTURBED * seconds
        return seconds / min(plain, *self.draft_times) - 1


@dataclass
class Past:
    """Estimates from past rounds, of one text or, where these have a clock, of several.

    ``seen``: the tokens of recent rounds accepted and judged, by kind of draft and place in it. The
    tokens behind a rejected one are not judged. ``slopes``: by the name of a model's offer, and of
    ``KNOWN`` tokens. ``saved``: plain rounds that recent rounds saved for which drafters were
    asked; it begins above 0, so that one bad draft decides nothing.
    """

    PRIOR_WEIGHT = 4.0  # of the first α, in tokens
    LEAST_SLOPE = 0.02
    LARGEST_CHANGE = 2.0  # of a slope's estimate: factor up to which a measurement counts
    FADE = 0.98  # the part of its distance to the first value that a slope keeps, per round
    STALE = 64  # rounds after which T is measured again

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    saved: float = 2.0
    allowance: float = 0.3
    rounds_since_plain: int = 0

    def rates(self, kind: str, prior: float) -> Iterator[float]:
        """Estimates of α₁, α₂ ... of a kind of draft; the estimate of each is the prior of the
        next.
        """
        for accepted, judged in self.seen.get(kind, ()):
            prior = (accepted + prior * self.PRIOR_WEIGHT) / (judged + self.PRIOR_WEIGHT)
            yield prior
        yield from repeat(prior)

    def learn_rates(self, kind: str, accepted: int, rejected: bool, memory: float) -> None:
        """Add a round: the tokens accepted, and whether one was rejected behind them. Earlier
        tokens at the same places count ``memory`` times what they did.
        """
        seen = self.seen.setdefault(kind, [])
        for place in range(accepted + rejected):
            if place == len(seen):
                seen.append((0.0, 0.0))
            before, judged = seen[place]
            seen[place] = (memory * before + (place < accepted), memory * judged + 1)

    def learn_slope(self, name: str, estimate: float, measured: float) -> None:
        """Add a measurement to the estimate of a slope: their geometric mean, where the measurement
        counts only up to a factor, so that one disturbed round does not decide.
        """
        ratio = min(max(measured / estimate, 1 / self.LARGEST_CHANGE), self.LARGEST_CHANGE)
        self.slopes[name] = max(self.LEAST_SLOPE, estimate * ratio**0.5)

    def fade_slope(self, name: str, first: float) -> None:
        """Count a round without a measurement: the estimate goes back to the first one, so that a
        draft which was slow once is tried again.
        """
        self.slopes[name] = first * (self.slopes[name] / first) ** self.FADE
