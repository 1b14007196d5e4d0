"""Random draws of the loop, behind three methods that a proof can replace.

In production they are computed from a ``torch.Generator``, or from exponentials keyed by seed and
position: then the seed determines the text under any draft. In a proof
``decoding.proof.enumeration`` takes every outcome in turn.
"""

from abc import abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from decoding.race import mix, race_among_few, race_at, signed
from decoding.rows import compute, first_least, running_sums


class Place(NamedTuple):
    """Place of a draw: the token's position in the text, and the number of retractions for banned
    words so far.
    """

    position: int
    retractions: int = 0


class Randomness(Protocol):
    """Source of all random draws, on tensors, so that no draw needs the host."""

    @abstractmethod
    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """Return the token ``[]`` int64 drawn from ``[vocab]`` probabilities, or weights of any
        sum.
        """

    @abstractmethod
    def accept(self, probabilities: Tensor) -> Tensor:
        """Return independent events ``[k]`` bool of ``[k]`` probabilities; above 1 counts as 1."""

    def draw_each(self, probs: Tensor, place: Place) -> Tensor:
        """Return the tokens ``[rows]`` int64 drawn from rows ``[rows, vocab]``, the first at
        ``place``.
        """
        drawn = [
            self.draw(row, Place(place.position + number, place.retractions))
            for number, row in enumerate(probs)
        ]
        return torch.stack(drawn)


UNIFORMS = 64  # uniform numbers drawn at a time


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token of each row whose cumulative probability exceeds u: never one of
    probability 0.

    ``probs`` ``[rows, vocab]``: probabilities, or weights that need not sum to 1. ``uniform`` u
    ``[rows]``: float64 in [0, 1). Returns ``[rows]`` int64. For a row of zeros the result is
    meaningless, and the caller must discard it.
    """
    cumulative = running_sums(probs.double())
    point = uniform[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, point, right=True).clamp(max=probs.shape[-1] - 1)
    possible = probs.gather(-1, found) > 0
    if probs.device.type == "cpu" and possible.all():  # on a GPU this condition would synchronise
        return found[:, 0]
    # u times the sum can round up to the sum, which is beyond every token. And a parallel sum, as
    # on a GPU, need not be monotone: its last digit may rise at a token of probability 0, and u may
    # fall into that gap. For such a u, at most one in 10¹³, the likeliest token is taken.
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
        """Return ``[count]`` float64 in [0, 1). Many are drawn at a time, for later calls too."""
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
    they mostly agree. E is made from a counter-based hash of (seed, sample, position, retractions,
    id), whose bits are the same on every device and do not depend on earlier draws. After a
    retraction every place has new E, since the old ones are not independent of the retraction.
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
