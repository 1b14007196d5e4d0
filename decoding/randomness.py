"""Random draws of the loop, behind three methods that a proof can replace.

In production they are computed from a ``torch.Generator``, or from exponentials keyed by seed and
position, with which the seed determines the text under any draft. In a proof
``decoding.proof.enumeration`` takes every outcome in turn.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from decoding.rows import compute, first_least, running_sums


class Place(NamedTuple):
    """Place of a draw: the token's position in the text, and the number of retractions for banned
    words so far.
    """

    position: int
    retractions: int = 0

    def after(self, tokens: int) -> Place:
        """Return the place ``tokens`` positions later."""
        return self._replace(position=self.position + tokens)


class Randomness(Protocol):
    """Source of all random draws, on tensors, so that no draw needs the host."""

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """Return the token ``[]`` int64 drawn from ``[vocab]`` probabilities, or weights of any
        sum.
        """

    def accept(self, probabilities: Tensor) -> Tensor:
        """Return independent events ``[k]`` bool of ``[k]`` probabilities; above 1 counts as 1."""

    def draw_each(self, probs: Tensor, place: Place) -> Tensor:
        """Return the tokens ``[rows]`` int64 drawn from rows ``[rows, vocab]``, the first at
        ``place``.
        """
        return torch.stack(
            [self.draw(row, place.after(number)) for number, row in enumerate(probs)]
        )


GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / φ: SplitMix64's step
INVERSE = pow(GOLDEN, -1, 2**64)
MIXERS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
UNIFORMS = 64  # uniform numbers drawn at a time
# On a CPU a row of more possible tokens has exponentials only of those with p of at least 1 / FEW,
# and of those with a small 1 - u.
FEW = 4096
# Where more than one of SHARED ids is possible, the exponentials of all are computed and kept.
SHARED = 8


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token of each row whose cumulative probability exceeds u: never one of
    probability 0.

    ``probs`` ``[rows, vocab]``: probabilities, or weights that need not sum to 1. ``uniform`` u
    ``[rows]``: float64 in [0, 1). Returns ``[rows]`` int64. For a row of zeros the result is
    meaningless, and the caller must discard it.
    """
    cumulative = running_sums(probs.double())
    total = cumulative[:, -1:]
    # u · total can round up to total, which is beyond every token. So it is at most the number just
    # below total.
    point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, point, right=True).clamp(max=probs.shape[-1] - 1)
    possible = probs.gather(-1, found) > 0
    if probs.device.type == "cpu" and possible.all():  # on a GPU this condition would synchronise
        return found[:, 0]
    # A parallel sum, as on a GPU, need not be monotone: its last digit may rise at a token of
    # probability 0, and u may fall into that gap. For such a u, at most one in 10¹³, the likeliest
    # token is taken.
    return torch.where(possible[:, 0], found[:, 0], first_least(-probs))


class SeededRandomness(Randomness):
    """Random draws from a seeded ``torch.Generator``, one after another: equal seeds and draft
    lengths, equal tokens.

    Uniform numbers are float64 in [0, 1), since a float32 one is 0 once in 2²⁴ draws. The
    comparison u < p is strict, so that even u = 0 accepts nothing of probability 0.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", sample: int = 0) -> None:
        # Mixed, since a generator on the CPU uses only 32 bits of its seed.
        self.generator = torch.Generator(device).manual_seed(mix(seed, sample))
        self.drawn = torch.empty(0)
        self.used = 0  # of the numbers drawn

    def uniform(self, count: int) -> Tensor:
        """Return ``[count]`` float64 in [0, 1), of which many are drawn at a time."""
        if self.used + count > len(self.drawn):
            self.drawn = torch.rand(
                max(count, UNIFORMS),
                generator=self.generator,
                dtype=torch.float64,
                device=self.generator.device,
            )
            self.used = 0
        self.used += count
        return self.drawn[self.used - count : self.used]

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """Return the token by ``inverse_cdf``: never one of probability 0."""
        return compute(inverse_cdf, probs[None], self.uniform(1))[0]

    def accept(self, probabilities: Tensor) -> Tensor:
        return self.uniform(len(probabilities)) < probabilities


class KeyedRandomness(Randomness):
    """Exponential race, or Gumbel-max with shared randomness (arXiv 2408.07978).

    The seed determines the text. At every place each token id has an exponential random number E.
    The draw from p is argmin E/p, which has the distribution p. Draft and target use the same E, so
    they mostly agree. E is a counter-based hash of (seed, sample, position, retractions, id): it
    has the same bits on every device and does not depend on earlier draws. After a retraction every
    place has new E, since the old ones are not independent of the retraction.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", sample: int = 0) -> None:
        self.key = mix(seed, sample)

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """Return the token of the least E/p: never one of probability 0."""
        return self.draw_each(probs[None], place)[0]

    def draw_each(self, probs: Tensor, place: Place) -> Tensor:
        """Return the tokens ``[rows]`` of the least E/p of rows ``[rows, vocab]``, the first at
        ``place``.
        """
        places = range(place.position, place.position + len(probs))
        keys = [signed(mix(self.key, position, place.retractions)) for position in places]
        if probs.device.type == "cpu":
            return torch.tensor(list(map(race_among_few, probs.numpy(), keys)))
        # from pageable memory the copy would wait
        host_keys = torch.tensor(keys, pin_memory=probs.device.type == "cuda")
        return compute(race_at, probs, host_keys.to(probs.device, non_blocking=True))

    def accept(self, probabilities: Tensor) -> Tensor:
        """Raise TypeError: the verification of the race only draws."""
        raise TypeError("the race has no acceptance probabilities: verify with verify_by_race")


def race_at(probs: Tensor, keys: Tensor) -> Tensor:
    """Return the ``race`` of each row with the exponentials of its key: ``[rows, vocab]`` and
    ``[rows]`` int64 -> ``[rows]`` int64.
    """
    ids = torch.arange(probs.shape[-1], device=probs.device)
    # This is ids * GOLDEN + keys, which torch's compiler would begin in 32 bits.
    counters = (ids + keys[:, None] * signed(INVERSE)) * signed(GOLDEN)
    return race(probs, complements(hashed(counters)))


def race(probs: Tensor, gaps: Tensor) -> Tensor:
    """Return the token of the least E/p of each row, with E = -log u: ``[rows, vocab]`` p and 1 - u
    -> ``[rows]`` int64; 1 - u is int64 in units of 2⁻⁵³.
    """
    exponentials = -torch.log1p(gaps.double().mul_(-(2.0**-53)))
    return first_least(torch.where(probs > 0, exponentials / probs.double(), math.inf))


def race_among_few(probs: np.ndarray, key: int) -> int:
    """Return the ``race`` of one row ``[vocab]`` on a CPU, with logarithms of a few ids only.

    A row of 49,152 possible tokens takes .11 ms, and .23 by ``race_at``; a round has several rows.

    After a filter these are the possible tokens. In a row of many possible tokens they are the
    likely ones, of p at least 1 / FEW, and those of a small 1 - u: E is at least 1 - u, so another
    token can only win if its 1 - u is below the E/p of the likeliest token, divided by FEW.
    """
    few = probs > 0
    count = np.count_nonzero(few)
    if count < 2:  # a row of zeros has token 0, which is meaningless
        return few.argmax().item()
    if count > FEW:  # of which the likeliest gives a bound of the least E/p
        bits = hashed(id_counters(len(probs)) + key).view(np.uint64)
        likeliest = probs.argmax()
        arrival = -math.log(((int(bits[likeliest]) >> 11) + 1) * 2.0**-53) / float(probs[likeliest])
        # 2²⁰ more than the bound in units of 2⁻⁶⁴, since it is rounded
        close = bits >= max(0, 2**64 - 2**20 - int(arrival / FEW * 2**64))
        few &= close | (probs >= 1 / FEW)
    ids = np.flatnonzero(few)
    if len(probs) <= FEW and len(probs) < ids.size * SHARED:
        exponentials = all_exponentials(len(probs), key)[ids]
    else:
        exponentials = exponentials_of(id_counters(len(probs))[ids] + key)
    return ids[(exponentials / probs[ids]).argmin()].item()


@lru_cache(maxsize=32)  # several rounds' places: a rejected place is drawn again in the next round
def all_exponentials(vocab: int, key: int) -> np.ndarray:
    """Return E of all ids at a place, float64 ``[vocab]``, which draft and target share."""
    return exponentials_of(id_counters(vocab) + key)


def exponentials_of(counters: np.ndarray) -> np.ndarray:
    """Return E = -log u of int64 ``counters``, which are overwritten, in float64."""
    return -np.log1p(complements(hashed(counters)) * -(2.0**-53))


@lru_cache(maxsize=1)
def id_counters(vocab: int) -> np.ndarray:
    """Return the counter of each id before a place's key is added, int64 ``[vocab]``."""
    return np.arange(vocab) * signed(GOLDEN)


def complements(bits: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return 1 - u of hashed ``bits``, of which u in (0, 1] takes 53: int64 in units of 2⁻⁵³."""
    return 2**53 - 1 - shifted(bits, 11)


def hashed(counters: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return SplitMix64's finaliser of int64 ``counters`` of any shape, in place, which wrap
    around.
    """
    for shift, factor in MIXERS:
        counters ^= shifted(counters, shift)
        counters *= signed(factor)
    counters ^= shifted(counters, 31)
    return counters


def shifted(numbers: Tensor | np.ndarray, by: int) -> Tensor | np.ndarray:
    """Return the logical right shift by ``by`` bits, which torch lacks for signed numbers."""
    if isinstance(numbers, np.ndarray):
        return (numbers.view(np.uint64) >> by).view(np.int64)
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)


def signed(number: int) -> int:
    """Return the int64 with the 64 bits of an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


def mix(*numbers: int) -> int:
    """Return a 64-bit key hashed from several numbers, by SplitMix64."""
    key = 0
    for number in numbers:
        key = ((key ^ number) + GOLDEN) % 2**64
        for shift, factor in MIXERS:
            key = (key ^ key >> shift) * factor % 2**64
        key ^= key >> 31
    return key
