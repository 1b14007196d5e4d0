"""The port through which the loop draws: two verbs, one of them also for several rows, so that chance can be replaced.

In production a ``torch.Generator`` serves them, or keyed exponentials, under which a seed means one text whatever
drafts; in a proof, ``decoding.proof.enumeration`` walks every outcome.
"""

from __future__ import annotations

import math
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
    """The exponential race (Gumbel-max with shared randomness, arXiv 2408.07978): a seed means a text.

    At every place each token id has an exponential E of its own, and the draw from p is argmin E/p, whose law is p.
    Draft and target race with the same E, so they mostly agree. E follows from (seed, sample, position, retractions)
    and the id alone, by a counter-based hash: the same bits on every device, whatever was drawn before. After a
    retraction every place has fresh E: those used before are not independent of the text having been taken back.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", sample: int = 0) -> None:
        self.key, self.device = mix(seed, sample), device

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """The token whose exponential over its probability is least: never one of probability 0."""
        return self.draw_each(probs[None], place)[0]

    def draw_each(self, probs: Tensor, place: Place) -> Tensor:
        """As above, each row at its own place: on a GPU all at once, among all ids.

        On a CPU only possible tokens race, few where a filter is; counting them would synchronise a GPU.
        """
        keys = self.keys(place, len(probs)).to(probs.device, non_blocking=True)
        if probs.device.type != "cpu":
            return self.race(probs, torch.arange(probs.shape[-1], device=probs.device), keys)
        drawn = []
        for row, key in zip(probs, keys.split(1), strict=True):
            ids = row.nonzero()[:, 0]
            # Of a row of zeros none can win, and what comes back no caller may use.
            drawn.append(ids[self.race(row[ids][None], ids, key)] if len(ids) else torch.zeros_like(key))
        return torch.cat(drawn)

    def race(self, probs: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
        """Where among the ``[n]`` ids the winner of each row stands: ``[rows, n]`` probabilities -> ``[rows]``."""
        arrivals = torch.where(probs > 0, self.exponentials(ids, keys) / probs.double(), math.inf)
        return arrivals.argmin(-1)

    def keys(self, place: Place, rows: int) -> Tensor:
        """What the exponentials at so many places follow from: ``[rows]`` int64, made by the host."""
        places = range(place.position, place.position + rows)
        return torch.tensor([signed(mix(self.key, position, place.retractions)) for position in places])

    def accept(self, probabilities: Tensor) -> Tensor:
        """Not in the race: its verification draws the target's tokens and keeps the drafts that equal them."""
        raise TypeError("the exponential race tosses no coins")

    def exponentials(self, ids: Tensor, keys: Tensor) -> Tensor:
        """E = -log u of ``[n]`` ids under each of ``[rows]`` keys, u of 53 bits in (0, 1]: ``[rows, n]`` float64."""
        bits = hashed(ids * signed(GOLDEN) + keys[:, None])
        return ((shifted(bits, 11) + 1).double() * 2.0**-53).log_().neg_()


def hashed(counters: Tensor) -> Tensor:
    """SplitMix64's finaliser over int64 of any shape, which wraps as the hash's unsigned numbers do."""
    for shift, factor in MIXERS:
        counters = (counters ^ shifted(counters, shift)) * signed(factor)
    return counters ^ shifted(counters, 31)


def shifted(numbers: Tensor, by: int) -> Tensor:
    """The logical right shift, which torch lacks for signed numbers."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


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
