"""The port through which the loop draws: two verbs, so that chance can be replaced.

In production a ``torch.Generator`` serves them; in a proof, ``decoding.proof.enumeration`` walks every outcome.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Randomness(Protocol):
    """Where all chance comes from. Both verbs take and return tensors and never read the host."""

    def draw(self, probs: Tensor) -> Tensor:
        """One token: ``[vocab]`` probabilities, or weights that need not sum to 1 -> ``[]`` int64."""

    def accept(self, probabilities: Tensor) -> Tensor:
        """Independent coin tosses: ``[k]`` probabilities (1 and above: surely) -> ``[k]`` bool."""


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
    # A sum made in parallel, as on a GPU, need not be monotone: in the last digit it may rise at a token of probability
    # 0, and u may fall between. Such a u, one in 10¹³ or fewer, goes to the likeliest token.
    return torch.where(probs.gather(-1, found) > 0, found, probs.max(-1, keepdim=True).indices)[:, 0]


class SeededRandomness:
    """Draws from a seeded ``torch.Generator``. The same seed gives the same tokens.

    Uniform numbers are float64 in [0, 1): u < p is strict, so that u = 0 accepts nothing that is
    impossible, and a float32 uniform, which is 0 once in 2²⁴ draws, is not fine enough.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, count: int) -> Tensor:
        """``[count]`` float64 in [0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=self.generator.device)

    def draw(self, probs: Tensor) -> Tensor:
        """One token by ``inverse_cdf``: never one of probability 0."""
        return inverse_cdf(probs[None], self.uniform(1))[0]

    def accept(self, probabilities: Tensor) -> Tensor:
        return self.uniform(len(probabilities)) < probabilities
