"""Break-even, the policy of ``--draft auto``: the draft of the largest expected speed-up, or none.

A round that drafts k tokens takes 1 + k·s plain rounds, where the slope s is the time that a
drafted token adds: its draft step, and its share of the verification. It writes
1 + α + α² + ... + αᵏ expected tokens, with α the probability that a token of a kind of draft is
accepted if those before it were (arXiv 2211.17192, equation 1). The speed-up is their ratio; where
none is above 1, the round is plain.

α and s are learned while the text is written (``Past``). So this is a bandit, a choice among
options whose pay is learned by trying them, but of a known structure: all lengths of a draft share
its α and its s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter

from decoding.policies import Offer, Policy
from decoding.rounds import Round, common_prefix

KNOWN = "known"  # the name of the slope of tokens that are drafted without running a model


class BreakEven(Policy):
    """Draft choice by break-even: the offer of the largest expected speed-up, ended in time.

    A round passes through four methods: ``draft_length``, whether to ask the drafters for offers;
    ``choose`` among these; ``keep_drafting`` after each token that a model draws; and ``observe``,
    which learns from the finished round.

    Four rounds with one model, without a clock, where the slope is 0.65 and all confidences are
    0.75:

    | round | α | speed-up of one token | drafted | accepted | cost | credit after |
    |---|---|---|---|---|---|---|
    | 1 | 0.70 | 1.030 | 1 | 1 | 1.70 | 4.34 |
    | 2 | 0.76 | 1.067 | 1 | 0 | 1.70 | 3.66 |
    | 3 | 0.63 | 0.989 | 0 | 0 | 1.05 | 3.63 |
    | 4 | 0.63 | 0.991 | 0 | 0 | 1.05 | 3.60 |

    Round 1 drafts by the prior. A second token would be accepted with the probability 0.7 · 0.7 =
    0.49, and is worth it only above 0.65 · 1.03 = 0.67. The failure of round 2 makes drafts lose,
    so rounds 3 and 4 are plain. Meanwhile the past fades, α goes back to 0.70, and some rounds
    later a token is tried again. The cost includes ``ASKING``. The credit after round 1 is 4 + 2 ·
    1.02 - 1.70.
    """

    PRIOR_RATE = 0.7  # α before the first round
    LONGEST_WITH_FORCED = 15  # tokens, forced ones included: a GPU verifies 16 rows in one step
    RESERVE = 1.0  # plain rounds: a token of a larger slope never pays
    SHARE = 0.02
    ANOTHER_TEXT = 0.08  # plain rounds: what a drafted token costs more for each text beside
    ASKING = 0.05  # plain rounds: in a small model it takes up to a tenth
    MEMORY = 0.98  # the share of the past of a kind that counts after another round of it
    FADE = 0.95  # the share of a past that counts after a round in which another offer is taken

    def __init__(
        self,
        slopes: Mapping[str, float],
        longest: int = 8,
        *,
        priors: Mapping[str, float] | None = None,
        by_confidence: bool = True,
    ) -> None:
        """``slopes``: the first slope per name of a model's offer, and of ``KNOWN`` tokens;
        ``priors``: α of a kind before its first round; ``by_confidence``: whether drafts end by the
        confidence of their tokens, which the host then reads one by one, or have the best length.
        """
        super().__init__(longest)
        self.reads_draft_confidence = by_confidence
        self.first_slopes = slopes
        self.priors = priors or {}
        self.past = Past()
        self.clock: Callable[[], float] | None = None
        self.sharers: Callable[[], int] = lambda: 1
        # of the current round: the offers, and the draft that is made, if any
        self.offers: Sequence[Offer] = ()
        self.taken: PossibleDraft | None = None
        # of the text so far: the tokens that constraints forced, and the others
        self.text_forced = 0
        self.text_free = 0

    def grant_clock(
        self, past: Past, sharers: Callable[[], int], clock: Callable[[], float] = perf_counter
    ) -> None:
        self.past = past
        self.sharers = sharers
        self.clock = clock

    def draft_length(self) -> int:
        """Largest number of tokens to draft; 0 where no drafter is asked for an offer.

        Asking has a cost too. It is saved while the credit is below ``RESERVE``, which is enough
        for another trial. Tokens that a grammar forces need no luck.
        """
        asks = self.text_forced or self.past.credit >= self.RESERVE
        return self.LONGEST_WITH_FORCED if asks else 0

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int]:
        """The offer to take and the largest number of its tokens: 0 for a round without a draft.

        Tokens that constraints force are sure to be accepted, and the target verifies them under
        every offer. So they count neither into α nor as a risk, and offers are compared without
        their verification. Where no guess pays they are drafted alone.
        """
        only_forced = next((offer for offer in offers if offer.tokens), offers[0])
        drafts = [draft for offer in offers if (draft := self._best_draft(offer))]
        best = max([PossibleDraft(only_forced, 0, 1.0), *drafts], key=attrgetter("speedup"))
        length = best.offer.forced + best.guesses
        self.offers = offers
        self.taken = best if length else None
        if self.clock:
            best.began = self.clock()
        return best.offer, length

    def _reading(self, offer: Offer) -> tuple[float, float]:
        """Expected times in plain rounds in which a model reads the forced tokens of its draft,
        each at the slope of a known token: those before its first guess, and those after each
        guess, as many as this text had so far per token that was not forced.

        So a model drafts where few tokens are forced, and stays away from a form that is to be
        filled in.
        """
        forced_so_far = self.text_forced + offer.forced
        if not offer.by_model or not forced_so_far:
            return 0.0, 0.0
        slope = self.slope(KNOWN)
        return offer.forced * slope, forced_so_far / (self.text_free + 1) * slope

    def _best_draft(self, offer: Offer) -> PossibleDraft | None:
        """The draft of an offer, of one guess or more, with the largest speed-up.

        None where the offer has no guess, or the credit does not cover the loss of one: no draft is
        made that would use up more, were all of it rejected. A draft that ends by confidence has as
        many guesses as the credit covers.
        """
        slope = self.slope(slope_of(offer))
        longest = self.LONGEST_WITH_FORCED if offer.by_model else len(offer.tokens)
        rate = self.rates_of(offer).mean()
        before, between = self._reading(offer)
        speedups: list[float] = []  # of one guess, two guesses ...
        tokens = reached = 1.0
        cost = 1 + before
        for _ in range(min(self.gamma, longest - offer.forced)):
            cost += slope + between
            if cost - 1 > self.past.credit:
                break
            reached *= rate
            tokens += reached
            speedups.append(tokens / cost)
        if not speedups:
            return None
        speedup = max(speedups)
        ends_by_confidence = offer.by_model and self.reads_draft_confidence
        best = len(speedups) if ends_by_confidence else 1 + speedups.index(speedup)
        return PossibleDraft(offer, best, speedup)

    def keep_drafting(self, confidence: float) -> bool:
        """Whether another token is worth its time: the probability that it is accepted is more than
        its slope times the speed-up that was expected of the draft.

        This probability is the product of the acceptance rates of the draft's tokens, each at its
        confidence, and of α.
        """
        draft = self.taken
        if draft is None:  # a drafter that makes no offers
            return True
        if self.clock:
            draft.ended = self.clock()
        rates = self.rates_of(draft.offer)
        draft.confidences.append(confidence)
        draft.reached *= rates.at(confidence)
        worth = self.slope(slope_of(draft.offer)) * draft.speedup
        return draft.reached * rates.mean() > worth

    def observe(self, round: Round) -> None:
        """Learn from a finished round, and settle its credit: a token of the text adds 1 +
        ``SHARE``, and the cost is subtracted.

        So texts never cost more than the credit plus 1 + ``SHARE`` times plain decoding, by the
        slopes, whatever the target accepts.
        """
        guessed, accepted = round.guessed
        forced = len(round.drafted) - guessed
        written = len(round.emitted)
        newly_forced = sum(round.forced[:written])
        self.text_forced += newly_forced
        self.text_free += written - newly_forced
        self.past.spend(self._cost(guessed, forced) - (1 + self.SHARE) * written)
        self._learn_rates(round.emitted, guessed, accepted)
        self._learn_slopes(guessed, forced)
        # the next round has none, unless its drafters are asked
        self.offers = ()
        self.taken = None

    def _cost(self, guessed: int, forced: int) -> float:
        """Time of the round in plain rounds, by the slopes."""
        cost = 1.0
        if forced:  # the target has read them, and a model that drafted has too
            by_model = self.taken and self.taken.offer.by_model and guessed
            cost += (2 if by_model else 1) * forced * self.slope(KNOWN)
        if self.offers:
            cost += self.ASKING
        if self.taken:
            cost += guessed * self.slope(slope_of(self.taken.offer))
        return cost

    def _learn_rates(self, emitted: Sequence[int], guessed: int, accepted: int) -> None:
        """Learn acceptance rates from the tokens of a round, of which ``guessed`` were not forced
        and ``accepted`` of these were kept.

        Known tokens are compared with the text even where their offer was not taken. The past of a
        model that was not taken counts less, so that its α goes back to the prior: bad luck in a
        few rounds does not decide for long.
        """
        for offer in self.offers:
            rates = self.rates_of(offer)
            if offer.tokens:
                equal = common_prefix(offer.tokens, emitted)
                rejected = equal < min(len(offer.tokens), len(emitted))
                judged = max(0, equal - offer.forced) + rejected
                rates.learn([1.0] * judged, judged - rejected, self.MEMORY)
            elif self.taken and offer is self.taken.offer:
                judged = min(guessed, accepted + 1)
                confidences = self.taken.confidences or [1.0] * judged
                rates.learn(confidences[:judged], accepted, self.MEMORY)
            elif offer.by_model:
                rates.fade(self.FADE)

    def _learn_slopes(self, guessed: int, forced: int) -> None:
        """Learn the slope of the model that drafted, if there is a clock: from the time of a draft
        step, and that of the rest of the round, a plain round but for the verification.

        Both are of the same moment, so that a busy machine does not change the slope. Slopes keep
        their first values where no confidence is read after each step, and no time is taken where
        other texts share the model's steps.
        """
        draft = self.taken
        name = slope_of(draft.offer) if draft else None
        for other in self.past.slopes.keys() - {name}:
            self.past.fade_slope(other, self.first_slopes[other])
        by_model = draft and draft.confidences  # read after each step
        if self.clock is None or self.sharers() > 1 or forced or not by_model:
            return
        verification = self.first_slopes[KNOWN]
        plain = (self.clock() - draft.ended) / (1 + guessed * verification)
        step = (draft.ended - draft.began) / len(draft.confidences)
        before = self.slope(name)
        measured = self.past.learn_slope(name, before, step / plain + verification)
        self.past.spend(guessed * (measured - before))

    def slope(self, name: str) -> float:
        """Estimate of the slope of a model's tokens, by the name of its offer, or of ``KNOWN``
        ones, which need no more than their verification.

        The more rows a step has, the more another row costs. So with each other text that shares
        the model's steps drafts become shorter, and at some number of texts none pays.
        """
        alone = self.past.slopes.get(name, self.first_slopes[name])
        return alone + self.ANOTHER_TEXT * (self.sharers() - 1)

    def rates_of(self, offer: Offer) -> Rates:
        """The acceptance rates of an offer's kind of draft."""
        prior = self.priors.get(offer.kind, self.PRIOR_RATE)
        return self.past.rates.setdefault(offer.kind, Rates(prior))


@dataclass
class PossibleDraft:
    """Draft of an offer's forced tokens and of some guesses, with the expected ``speedup`` of its
    round over plain decoding.

    While a model makes it: the ``confidences`` of its tokens, the probability ``reached`` that all
    of them are accepted, and the times before the first one (``began``) and after the last
    (``ended``).
    """

    offer: Offer
    guesses: int
    speedup: float
    confidences: list[float] = field(default_factory=list)
    reached: float = 1.0
    began: float = 0.0
    ended: float = 0.0


def slope_of(offer: Offer) -> str:
    """Name of the slope of an offer's tokens."""
    return offer.name if offer.by_model else KNOWN


@dataclass
class Past:
    """Estimates from past rounds, of one text or, where these have a clock, of several.

    ``rates``: by kind of draft. ``slopes``: those measured, by the name of a model's offer.
    ``credit``: the plain rounds that may still be lost by drafting.
    """

    MOST_CREDIT = 10.0
    LEAST_SLOPE = 0.02
    LARGEST_CHANGE = 2.0  # of a slope's estimate: factor up to which a measurement counts
    FADE = 0.99  # the part of its distance to the first value that a slope keeps, per round

    rates: dict[str, Rates] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    credit: float = 4.0

    def spend(self, rounds: float) -> None:
        """Subtract plain rounds from the credit, or add them where they are negative."""
        self.credit = min(self.MOST_CREDIT, max(0.0, self.credit - rounds))

    def learn_slope(self, name: str, estimate: float, measured: float) -> float:
        """Add a measurement to the estimate of a slope: their geometric mean, where the measurement
        counts only up to a factor, so that one disturbed round does not decide. Returns the
        measurement as it was counted.
        """
        least = estimate / self.LARGEST_CHANGE
        counted = min(max(measured, least), estimate * self.LARGEST_CHANGE)
        self.slopes[name] = max(self.LEAST_SLOPE, (estimate * counted) ** 0.5)
        return counted

    def fade_slope(self, name: str, first: float) -> None:
        """Count a round without a measurement: an estimate above the first one goes back to it, so
        that a draft which was slow once is tried again.
        """
        if self.slopes[name] > first:
            self.slopes[name] = first * (self.slopes[name] / first) ** self.FADE


class Rates:
    """Acceptance rate of a kind of draft, by the confidence of a token in tenths.

    ``accepted`` and ``judged`` count the tokens of past rounds per tenth, the later ones more. The
    tokens after a rejected one are not judged. Where little was judged the rate is close to a
    prior one: that of all tokens to the first α, ``prior``, that of a confidence to the rate of
    all.
    """

    PRIOR_WEIGHT = 4.0  # of a prior rate, in tokens

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.accepted = [0.0] * 10
        self.judged = [0.0] * 10

    def mean(self) -> float:
        """The rate of all tokens."""
        return self._rate(sum(self.accepted), sum(self.judged), self.prior)

    def at(self, confidence: float) -> float:
        """The rate of tokens of this confidence."""
        place = tenth(confidence)
        return self._rate(self.accepted[place], self.judged[place], self.mean())

    def _rate(self, accepted: float, judged: float, prior: float) -> float:
        return (accepted + prior * self.PRIOR_WEIGHT) / (judged + self.PRIOR_WEIGHT)

    def learn(self, confidences: Sequence[float], accepted: int, memory: float) -> None:
        """Add the judged tokens of a round, of which the first ones were ``accepted``."""
        self.fade(memory)
        for number, confidence in enumerate(confidences):
            self.judged[tenth(confidence)] += 1
            self.accepted[tenth(confidence)] += number < accepted

    def fade(self, memory: float) -> None:
        """Count the past ``memory`` times as much as before."""
        self.accepted = [memory * each for each in self.accepted]
        self.judged = [memory * each for each in self.judged]


def tenth(confidence: float) -> int:
    """Number of the tenth, from 0 to 9, in which a confidence is."""
    return min(9, int(10 * confidence))
