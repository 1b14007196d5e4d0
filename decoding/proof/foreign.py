"""Law of unchanged code that draws by the random functions of torch, Python and NumPy.

    assert_lossless(lambda: sample(model, prompt, 3), lambda: assisted(model, prompt, 3))

While the function runs, random functions are ``replaced``. A draw of a token is a fork of the paths
that ``enumeration`` walks. Above a number of paths the law is sampled, and a comparison states the
error.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice

from decoding.proof.enumeration import Enumerator, ProofError, outcomes, summed, total_variation
from decoding.proof.noise import Refused
from decoding.proof.replaced import replaced

PATHS = 100_000  # enumerated before the law is sampled instead
CONFIDENCE = 0.99  # of the error of a sampled law


class SampledWalk(Enumerator):
    """Path whose outcomes are drawn, for laws of too many paths."""

    def __init__(self, source: random.Random) -> None:
        super().__init__([])
        self.source = source

    def _pick(self, possible: list[int], outcomes: list[tuple[float, object]]) -> int:
        return self.source.choices(possible, [outcomes[number][0] for number in possible])[0]


@dataclass(frozen=True)
class Law:
    """Probabilities of the results of some code, found on this number of ``paths``.

    They are exact where the law was enumerated, and frequencies where it ``is_sampled``.
    """

    probs: dict[Hashable, float]
    paths: int
    is_sampled: bool = False


def law_of(run: Callable[[], object], paths: int = PATHS) -> Law:
    """Return the law of the result of ``run``, which must begin from the same state at each call.

    Tensors and lists count as tuples. Above this number of paths as many runs are sampled instead.
    Raises Refused for code that cannot be enumerated.
    """
    found = [*islice(outcomes(lambda walk: result_of(run, walk), Enumerator), paths + 1)]
    if len(found) <= paths:
        return Law(summed(found), len(found))
    source = random.Random(0)
    counts = Counter(result_of(run, SampledWalk(source)) for _ in range(paths))
    return Law({result: count / paths for result, count in counts.items()}, paths, is_sampled=True)


def result_of(run: Callable[[], object], walk: Enumerator) -> Hashable:
    """Return the result of a run on the walk's path. Raises Refused where it cannot be followed."""
    with replaced(walk):
        return hashable(run())


def hashable(result: object) -> Hashable:
    """Return the result with tensors, arrays and lists as tuples."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    return tuple(map(hashable, result)) if isinstance(result, list | tuple) else result


@dataclass(frozen=True)
class Comparison:
    """Laws of plain and of speculative code. In print: their distance, and how it was found."""

    plain: Law
    speculative: Law

    @property
    def distance(self) -> float:
        return total_variation(self.plain.probs, self.speculative.probs)

    @property
    def error(self) -> float:
        """Bound on the error of the distance: 0 where both laws were enumerated.

        Else it holds with probability ``CONFIDENCE``, if no result is possible but those found in
        one law or the other, by the bound of Weissman et al. 2003 for the L1 deviation. Two sampled
        laws share the probability that it does not hold.
        """
        results = len(self.plain.probs.keys() | self.speculative.probs.keys())
        sampled = [law for law in (self.plain, self.speculative) if law.is_sampled]
        deviation = results * math.log(2) - math.log((1 - CONFIDENCE) / max(len(sampled), 1))
        return sum(math.sqrt(deviation / (2 * law.paths)) for law in sampled)

    def is_within(self, bound: float) -> bool:
        """Return whether the distance is at most ``bound`` and the error of sampling. Raises
        Refused where no distance could be more.
        """
        if self.error >= 1:
            raise Refused(
                f"the laws may differ by {self.error:.2g} by chance: they are samples of too many"
                " results, so allow more paths (--paths), or shorten the texts"
            )
        return self.distance <= bound + self.error

    def __str__(self) -> str:
        counts = f"{self.plain.paths} and {self.speculative.paths} paths"
        how = f"sampled: up to {self.error:.2g} by chance" if self.error else "enumerated"
        return f"total variation {self.distance:.3g} ({counts}, {how})"

    def worst(self) -> str:
        """Return a table of the five results that differ most, with their probabilities."""
        plain = self.plain.probs
        other = self.speculative.probs
        rows = sorted(
            ((str(key), plain.get(key, 0.0), other.get(key, 0.0)) for key in plain | other),
            key=lambda row: -abs(row[1] - row[2]),
        )[:5]
        width = max(len(text) for text, *_ in rows) + 2
        lines = [f"{text:<{width}}{p:>10.6f}{q:>14.6f}" for text, p, q in rows]
        return "\n".join([f"{'text':<{width}}{'plain':>10}{'speculative':>14}", *lines])


def assert_lossless(
    plain: Callable[[], object],
    speculative: Callable[[], object],
    bound: float = 1e-6,
    paths: int = PATHS,
) -> None:
    """Assert that two functions have the same law, up to a total variation of ``bound``; of more
    ``paths`` each is sampled. Raises ProofError, an AssertionError, where they have not, and
    Refused where that cannot be told.
    """
    found = Comparison(law_of(plain, paths), law_of(speculative, paths))
    if not found.is_within(bound):
        raise ProofError(f"{found}\n{found.worst()}")
