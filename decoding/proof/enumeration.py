"""Proof by enumeration: the exact law of anything that draws through the randomness port.

Hand ``output_law`` a function that runs the production loop with the randomness it is given. It is run
once for every path of outcomes: each draw takes each token of positive probability in turn, each
acceptance both of its results, and the probabilities along the path are multiplied. The sum over paths is
not an estimate: it is the law of the output, up to float64 rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from decoding.randomness import Place, Randomness


class Enumerator(Randomness):
    """A randomness that replays a path of choices, then takes the first choice at every new fork."""

    def __init__(self) -> None:
        self.path: list[int] = []  # which outcome is taken at each fork
        self.forks: list[int] = []  # how many outcomes each fork has
        self.weight = 1.0

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        weights = probs.double() / probs.double().sum().clamp(min=torch.finfo(torch.float64).tiny)
        outcomes = [(weight, token) for token, weight in enumerate(weights.tolist()) if weight > 0]
        # All zeros is what a forbidden position looks like; its draw may not be used, as in production.
        return torch.tensor(self._choose(outcomes or [(1.0, len(probs) - 1)]), device=probs.device)

    def accept(self, probabilities: Tensor) -> Tensor:
        chances = [min(chance, 1.0) for chance in probabilities.double().tolist()]
        sides = [[(chance, True), (1 - chance, False)] for chance in chances]
        outcomes = [
            (math.prod(chance for chance, _ in tosses), [kept for _, kept in tosses]) for tosses in product(*sides)
        ]
        possible = [outcome for outcome in outcomes if outcome[0] > 0]
        return torch.tensor(self._choose(possible), dtype=torch.bool, device=probabilities.device)

    def _choose(self, outcomes: list[tuple[float, Any]]) -> Any:
        """The outcome that this path takes at its next fork, of ``(probability, outcome)`` pairs."""
        depth = len(self.forks)
        if depth == len(self.path):
            self.path.append(0)
        self.forks.append(len(outcomes))
        weight, outcome = outcomes[self.path[depth]]
        self.weight *= weight
        return outcome

    def next_path(self) -> bool:
        """Move to the next unexplored path; False when there is none."""
        path = self.path[: len(self.forks)]
        while path and path[-1] + 1 == self.forks[len(path) - 1]:
            path.pop()
        if not path:
            return False
        path[-1] += 1
        self.path, self.forks, self.weight = path, [], 1.0
        return True


class RaceEnumerator(Enumerator):
    """The same for the exponential race over two tokens, whose whole chance at a place is one number.

    Token a wins, E_a/p_a < E_b/p_b, just when u = E_a / (E_a + E_b) < p_a, and u is uniform on (0, 1). What a path's
    draws have told of each place's u is an interval; the next draw there splits it at its own p_a.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Place, tuple[float, float]] = {}

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        low, high = self.known.get(place, (0.0, 1.0))
        a, b = probs.double().tolist()
        split = min(max(a / (a + b), low), high) if a + b else high
        sides = [((split - low) / (high - low), 0, (low, split)), ((high - split) / (high - low), 1, (split, high))]
        token, self.known[place] = self._choose([(chance, (token, part)) for chance, token, part in sides if chance])
        return torch.tensor(token, device=probs.device)

    def next_path(self) -> bool:
        self.known = {}
        return super().next_path()


def output_law(
    run: Callable[[Randomness], Hashable], enumerator: Callable[[], Enumerator] = Enumerator
) -> dict[Hashable, float]:
    """The exact probability of every result of ``run``.

    ``run`` must start afresh at each call and draw only through the randomness it is given.
    """
    law: defaultdict[Hashable, float] = defaultdict(float)
    walk = enumerator()
    while True:
        result = run(walk)
        law[result] += walk.weight
        if not walk.next_path():
            return dict(law)


def total_variation(law: dict[Hashable, float], other: dict[Hashable, float]) -> float:
    """Half the sum of |difference|: 0 for equal laws, 1 for laws that share no outcome."""
    return sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys()) / 2
