"""Proof by enumeration: the exact law (distribution of the output) of code that draws randomly.

``output_law`` receives a function that runs the production loop with a given randomness. It runs it
once for every path of outcomes: each draw takes each token of positive probability in turn, each
acceptance both results, and the probabilities along the path are multiplied. The sum over paths is
the law of the output, up to float64 rounding. Knows nothing of models and texts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from decoding.randomness import Place, Randomness
from model.errors import InputError


class Enumerator(Randomness):
    """Randomness that replays a path of outcomes, then takes the first outcome of every new draw.

    Each draw and each call of ``accept`` is a fork: a list of outcomes with their probabilities.
    So is each comparison of a uniform number on (0, 1), which may be known to lie in a part of it.
    """

    def __init__(self) -> None:
        self.path: list[int] = []  # the number of the outcome taken at each fork
        self.forks: list[int] = []  # the number of outcomes of each fork
        self.weight = 1.0
        self.parts: dict[Hashable, tuple[float, float]] = {}  # of (0, 1), by uniform number

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        weights = probs.double() / probs.double().sum().clamp(min=torch.finfo(torch.float64).tiny)
        outcomes = [(weight, token) for token, weight in enumerate(weights.tolist()) if weight > 0]
        # A position without an allowed token is a row of zeros: its draw is meaningless, as in
        # production.
        return torch.tensor(self._choose(outcomes or [(1.0, len(probs) - 1)]), device=probs.device)

    def accept(self, probabilities: Tensor) -> Tensor:
        sides = [[(p, True), (1 - p, False)] for p in probabilities.double().clamp(max=1).tolist()]
        outcomes = [
            (math.prod(p for p, _ in events), [result for _, result in events])
            for events in product(*sides)
        ]
        possible = [outcome for outcome in outcomes if outcome[0] > 0]
        return torch.tensor(self._choose(possible), dtype=torch.bool, device=probabilities.device)

    def is_below(self, number: Hashable, threshold: float) -> bool:
        """Return whether a uniform number is below a threshold, which splits its part."""
        low, high = self.parts.get(number, (0.0, 1.0))
        split = min(max(threshold, low), high)
        sides = [
            ((split - low) / (high - low), (True, (low, split))),
            ((high - split) / (high - low), (False, (split, high))),
        ]
        below, self.parts[number] = self._choose([side for side in sides if side[0] > 0])
        return below

    def _choose(self, outcomes: list[tuple[float, Any]]) -> Any:
        """Return the outcome of this path at its next fork, of ``(probability, outcome)`` pairs."""
        depth = len(self.forks)
        if depth == len(self.path):
            self.path.append(0)
        self.forks.append(len(outcomes))
        weight, outcome = outcomes[self.path[depth]]
        self.weight *= weight
        return outcome

    def next_path(self) -> bool:
        """Move on to the next path that was not taken; returns False when there is none."""
        self.parts = {}
        path = self.path[: len(self.forks)]
        while path and path[-1] + 1 == self.forks[len(path) - 1]:
            path.pop()
        if not path:
            return False
        path[-1] += 1
        self.path = path
        self.forks = []
        self.weight = 1.0
        return True


class RaceEnumerator(Enumerator):
    """Enumerator of the race over two tokens, where one number u decides every draw at a place.

    Token a wins, E_a/p_a < E_b/p_b, exactly when u = E_a / (E_a + E_b) < p_a, and u is uniform on
    (0, 1). The draws of a path limit the u of each place to an interval. The next draw at that
    place splits the interval at its p_a.
    """

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        if len(probs) != 2:
            raise InputError(f"a race is enumerated over two tokens, found {len(probs)}")
        a, b = probs.double().tolist()
        first_wins = self.is_below(place, a / (a + b) if a + b else 1.0)
        return torch.tensor(0 if first_wins else 1, device=probs.device)


def output_law(
    run: Callable[[Randomness], Hashable],
    enumerator: Callable[[], Enumerator] = Enumerator,
    progress: Callable[[float], object] = lambda weight: None,
) -> dict[Hashable, float]:
    """Return the exact probability of every result of ``run``.

    ``run`` must begin from the same state at each call, and draw only through the randomness that
    it receives. ``progress`` is called with the probability of each path of draws; they sum to 1.
    """
    return summed(outcomes(run, enumerator(), progress))


def outcomes(
    run: Callable[[Any], Hashable], walk: Enumerator, progress: Callable[[float], object]
) -> Iterator[tuple[Hashable, float]]:
    """Return the result of ``run`` on each path of the walk, with the path's probability."""
    while True:
        yield run(walk), walk.weight
        progress(walk.weight)
        if not walk.next_path():
            return


def summed(found: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """Return the law of results, each of which may occur several times: its sum must be 1."""
    law: defaultdict[Hashable, float] = defaultdict(float)
    for result, weight in found:
        law[result] += weight
    assert abs(sum(law.values()) - 1) < 1e-6, f"a law whose sum is not 1: {dict(law)}"
    return dict(law)


def total_variation(law: dict[Hashable, float], other: dict[Hashable, float]) -> float:
    """Return the total variation, half the sum of |difference|: 1 where no outcome is shared."""
    return (
        sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys()) / 2
    )
