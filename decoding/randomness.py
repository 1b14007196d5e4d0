"""The randomness port of the loop: two methods, one of them also for several rows, that a test can replace.

In production a ``torch.Generator`` serves them, or keyed exponentials, under which a seed determines the text whatever
drafts. In a proof ``decoding.proof.enumeration`` walks every outcome.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a token is drawn: its position in the text, and how often a banned word had taken text back by then."""

    position: int
    retractions: int = 0

    def after(self, tokens: int) -> Place:
        """The place so many tokens later."""
        return self._replace(position=self.position + tokens)


class Randomness(Protocol):
    """Where all chance comes from. Its verbs take and return tensors."""

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """One token: ``[vocab]`` probabilities, or weights that need not sum to 1 -> ``[]`` int64."""

    def accept(self, probabilities: Tensor) -> Tensor:
        """Independent coin tosses: ``[k]`` probabilities (1 and above: surely) -> ``[k]`` bool."""

    def draw_each(self, probs: Tensor, place: Place) -> Tensor:
        """A token from each row, the first at ``place``: ``[rows, vocab]`` -> ``[rows]`` int64."""
        return torch.stack([self.draw(row, place.after(number)) for number, row in enumerate(probs)])


GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / φ: SplitMix64's step
MIXERS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
KEPT_PLACES = 16  # of the race, half a megabyte each for 50,000 ids: more than a draft and the token after it


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token of each row whose cumulative probability exceeds u: never one of probability 0.

    ``[rows, vocab]`` probabilities, or weights that need not sum to 1, and ``[rows]`` float64 in [0, 1) ->
    ``[rows]`` int64. A row of zeros has no such token; what then comes back no caller may use.
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[:, -1:]
    # u · total can round up to total, beyond every token; the number just below total cannot.
    point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, point, right=True).clamp(max=probs.shape[-1] - 1)
    possible = probs.gather(-1, found) > 0
    if probs.device.type == "cpu" and possible.all():  # elsewhere asking would synchronise
        return found[:, 0]
    # A sum made in parallel, as on a GPU, need not be monotone: in the last digit it may rise at a token of probability
    # 0, and u may fall between. Such a u, one in 10¹³ or fewer, goes to the likeliest token.
    return torch.where(possible, found, probs.max(-1, keepdim=True).indices)[:, 0]


class SeededRandomness(Randomness):
    """Draws from a seeded ``torch.Generator``, one after another: equal seeds and draft lengths, equal tokens.

    Uniform numbers are float64 in [0, 1): u < p is strict, so that u = 0 accepts nothing that is
    impossible, and a float32 uniform, which is 0 once in 2²⁴ draws, is not fine enough.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", sample: int = 0) -> None:
        # Mixed, since a generator on the CPU looks at 32 bits of its seed only.
        self.generator = torch.Generator(device).manual_seed(mix(seed, sample))

    def uniform(self, count: int) -> Tensor:
        """``[count]`` float64 in [0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=self.generator.device)

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """One token by ``inverse_cdf``: never one of probability 0."""
        return inverse_cdf(probs[None], self.uniform(1))[0]

    def accept(self, probabilities: Tensor) -> Tensor:
        return self.uniform(len(probabilities)) < probabilities


class KeyedRandomness(Randomness):
    """The exponential race (Gumbel-max with shared randomness, arXiv 2408.07978): a seed determines the text.

    At every place each token id has an exponential E, and the draw from p is argmin E/p, whose law is p. Draft and
    target race with the same E, so they mostly agree. E follows from (seed, sample, position, retractions) and the id
    alone, by a counter-based hash: the same bits on every device, whatever was drawn before. After a retraction every
    place has fresh E: those used before are not independent of the text having been taken back.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", sample: int = 0) -> None:
        self.key, self.device = mix(seed, sample), device
        # A target races with the numbers that its draft has raced with: on a CPU they are kept.
        self.kept_complements = lru_cache(KEPT_PLACES)(
            lambda key, vocab: self.complements(torch.tensor([key]), vocab)[0]
        )

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """The token whose exponential over its probability is least: never one of probability 0."""
        return self.draw_each(probs[None], place)[0]

    def draw_each(self, probs: Tensor, place: Place) -> Tensor:
        """The same for each row at its place."""
        places = range(place.position, place.position + len(probs))
        keys, vocab = [signed(mix(self.key, position, place.retractions)) for position in places], probs.shape[-1]
        if probs.device.type != "cpu":
            return race(probs, self.complements(torch.tensor(keys).to(probs.device, non_blocking=True), vocab))
        gaps = (self.kept_complements(key, vocab) for key in keys)
        return torch.stack([race_among_few(*row) for row in zip(probs, gaps, strict=True)])

    def complements(self, keys: Tensor, vocab: int) -> Tensor:
        """1 - u of every id under each key, u of 53 bits in (0, 1]: ``[rows]`` int64 -> ``[rows, vocab]`` float64."""
        bits = hashed(torch.arange(vocab, device=keys.device) * signed(GOLDEN) + keys[:, None])
        return shifted(bits, 11, bits).neg_().add_(2**53 - 1).double().mul_(2.0**-53)

    def accept(self, probabilities: Tensor) -> Tensor:
        """Not in the race: its verification draws the target's tokens and keeps the drafts that equal them."""
        raise TypeError("the exponential race tosses no coins")


def race(probs: Tensor, gaps: Tensor) -> Tensor:
    """The winner of each row, argmin E/p with E = -log u: ``[rows, vocab]`` p and 1 - u -> ``[rows]`` int64."""
    return torch.where(probs > 0, -torch.log1p(-gaps) / probs.double(), math.inf).argmin(-1)


def race_among_few(probs: Tensor, gaps: Tensor) -> Tensor:
    """``race`` of one row ``[vocab]``, in a tenth of the time on a CPU.

    E is at least 1 - u. So only ids with 1 - u up to p times the arrival time E/p of the likeliest token can arrive
    before that, and no other needs a logarithm.
    """
    likeliest, weights = probs.argmax(), probs.double()
    arrival = -torch.log1p(-gaps[likeliest]) / weights[likeliest]
    if not arrival.isfinite():
        return likeliest  # of a row of zeros, in which no token is meant
    few = (gaps <= weights * arrival).nonzero()[:, 0]
    return few[race(probs[few][None], gaps[few][None])[0]]


def hashed(counters: Tensor) -> Tensor:
    """SplitMix64's finaliser over int64 of any shape, in place: they wrap as the hash's unsigned numbers do."""
    other = torch.empty_like(counters)  # large tensors are slow to allocate
    for shift, factor in MIXERS:
        counters ^= shifted(counters, shift, other)
        counters *= signed(factor)
    counters ^= shifted(counters, 31, other)
    return counters


def shifted(numbers: Tensor, by: int, out: Tensor | None = None) -> Tensor:
    """The logical right shift, which torch lacks for signed numbers."""
    return torch.bitwise_right_shift(numbers, by, out=out).bitwise_and_((1 << (64 - by)) - 1)


def signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def mix(*numbers: int) -> int:
    """One 64-bit key out of several numbers, by the same hash."""
    key = 0
    for number in numbers:
        key = (key ^ number) + GOLDEN & (1 << 64) - 1
        for shift, factor in MIXERS:
            key = (key ^ key >> shift) * factor & (1 << 64) - 1
        key ^= key >> 31
    return key
