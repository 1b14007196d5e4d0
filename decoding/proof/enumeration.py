"""Proof by enumeration: the exact law (distribution of the output) of code that draws randomly.

``output_law`` receives a function that runs the production loop with a given randomness. It runs it
once for every path of outcomes: each draw takes each token of positive probability in turn, each
acceptance both results, and the probabilities along the path are multiplied. The sum over paths is
the law of the output, up to float64 rounding. Knows nothing of models and texts.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from decoding.randomness import Place, Randomness
from model.errors import InputError

WHOLE = (0.0, 1.0)  # part of a uniform number that has decided nothing


class ProofError(AssertionError):
    """Error of code that no law can be right for. Unlike an ``assert``, ``python -O`` keeps it."""


class Enumerator(Randomness):
    """Randomness that replays a path of outcomes, then takes the first outcome of every new draw.

    Each draw and each event of ``accept`` is a fork: a list of outcomes with their probabilities.
    So is each comparison of a uniform number on (0, 1), which may be known to lie in a part of it.
    """

    def __init__(self, path: list[int]) -> None:
        self.path = [*path]  # the number of the outcome taken at each fork
        self.depth = 0  # forks so far
        self.weight = 1.0  # probability of the outcomes so far
        self.other_paths: list[list[int]] = []  # to the outcomes not taken at new forks
        self.parts: dict[Hashable, tuple[float, float]] = {}  # of (0, 1), by uniform number

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        token = self._choose([(p, token) for token, p in enumerate(probs.double().tolist())])
        return torch.tensor(token, device=probs.device)

    def accept(self, probabilities: Tensor) -> Tensor:
        events = [
            self._choose([(p, True), (1 - p, False)])
            for p in probabilities.double().clamp(max=1).tolist()
        ]
        return torch.tensor(events, dtype=torch.bool, device=probabilities.device)

    def is_below(self, number: Hashable, threshold: float) -> bool:
        """Return whether a uniform number is below a threshold, which splits its part."""
        low, high = self.parts.get(number, WHOLE)
        split = min(max(threshold, low), high)
        below, self.parts[number] = self._choose(
            [(split - low, (True, (low, split))), (high - split, (False, (split, high)))]
        )
        return below

    def _choose(self, outcomes: list[tuple[float, Any]]) -> Any:
        """Return the outcome of this path at its next fork, of ``(weight, outcome)`` pairs. Raises
        ProofError where this fork has not the outcomes that the path was made for.
        """
        possible = [number for number, (weight, _) in enumerate(outcomes) if weight > 0]
        if not possible:  # no token is allowed there: its draw is meaningless, as in production
            return outcomes[-1][1]
        if self.depth == len(self.path):
            self.path.append(self._pick(possible, outcomes))
        number = self.path[self.depth]
        if number not in possible:
            raise ProofError("a run did not begin from the same state as the one before it")
        weight, outcome = outcomes[number]
        self.weight *= weight / sum(weight for weight, _ in outcomes)
        self.depth += 1
        return outcome

    def _pick(self, possible: list[int], outcomes: list[tuple[float, Any]]) -> int:
        """Return the number of the outcome to take at a new fork: the first possible one. The
        others are left to other paths.
        """
        first, *others = possible
        self.other_paths += [[*self.path, number] for number in reversed(others)]
        return first


class RaceEnumerator(Enumerator):
    """Enumerator of the race over two tokens, where one number u decides every draw at a place.

    Token a wins, E_a/p_a < E_b/p_b, exactly when u = E_a / (E_a + E_b) < p_a, and u is uniform on
    (0, 1). The draws of a path limit the u of each place to an interval. The next draw at that
    place splits the interval at its p_a. Events of ``accept`` do not depend on these numbers.
    """

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        if len(probs) != 2:
            raise InputError(f"a race is enumerated over two tokens, found {len(probs)}")
        a, b = probs.double().tolist()
        first_wins = self.is_below(place, a / (a + b) if a + b else 1.0)
        return torch.tensor(0 if first_wins else 1, device=probs.device)


def output_law(
    run: Callable[[Randomness], Hashable],
    enumerator: Callable[[list[int]], Enumerator] = Enumerator,
) -> dict[Hashable, float]:
    """Return the exact probability of every result of ``run``.

    ``run`` must begin from the same state at each call, and draw only through the randomness that
    it receives.
    """
    return summed(outcomes(run, enumerator))


def outcomes(
    run: Callable[[Any], Hashable], enumerator: Callable[[list[int]], Enumerator]
) -> Iterator[tuple[Hashable, float]]:
    """Return the result of ``run`` on each path, with the path's probability. On a terminal a bar
    shows the sum of these so far.

    A run finds the paths that fork off its own, so the walk begins with the empty path.
    """
    paths: list[list[int]] = [[]]
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("every outcome of every draw", total=1.0)
        while paths:
            randomness = enumerator(paths.pop())
            yield run(randomness), randomness.weight
            bar.advance(task, randomness.weight)
            paths += randomness.other_paths


def summed(found: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """Return the law of results, each of which may occur several times. Raises ProofError
    where their probabilities do not sum to 1.
    """
    law: defaultdict[Hashable, float] = defaultdict(float)
    for result, weight in found:
        law[result] += weight
    if not abs(sum(law.values()) - 1) < 1e-6:
        raise ProofError(f"a law whose sum is not 1: {dict(law)}")
    return dict(law)


def total_variation(law: dict[Hashable, float], other: dict[Hashable, float]) -> float:
    """Return the total variation, half the sum of |difference|: 1 where no outcome is shared."""
    return (
        sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys()) / 2
    )
