"""Law of unchanged code that draws by the random functions of torch, Python and NumPy.

    law_of(lambda: sample(model, prompt, 3))

While the function runs, random functions are replaced. A draw of a token is a fork of the paths
that ``enumeration`` walks. Other random numbers are ``noise`` until they decide something. Whatever
cannot be enumerated is refused by name: another use of such a number, another random function,
races that share noise.
"""

import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from decoding.proof.bar import with_bar
from decoding.proof.enumeration import Enumerator, ProofError, outcomes, summed, total_variation
from decoding.proof.noise import Noise, Refused, as_noise, follow, fresh
from decoding.randomness import Place

PATHS = 100_000  # enumerated before the law is sampled instead
CONFIDENCE = 0.99  # of the error of a sampled law
# Names of torch's random functions but those in ``DRAWS``; ``states`` finds others. "uniform_" is
# that of torch.nn.init.
REFUSED = (
    *(
        "uniform_",
        "randn",
        "randn_like",
        "normal",
        "normal_",
        "randint",
        "randint_like",
        "random_",
        "randperm",
    ),
    *("poisson", "binomial", "geometric_", "cauchy_", "log_normal_", "gumbel_softmax"),
)
NUMPY_UNIFORM = ("random", "random_sample", "rand", "ranf", "sample")


class SampledWalk(Enumerator):
    """Path whose outcomes are drawn, for laws of too many paths."""

    def __init__(self, source: random.Random) -> None:
        super().__init__([])
        self.source = source

    def _pick(self, possible: list[int], outcomes: list[tuple[float, Any]]) -> int:
        return self.source.choices(possible, [outcomes[number][0] for number in possible])[0]


class FollowedTorch(TorchFunctionMode):
    """Mode in which torch's random functions are those of a walk, and its others follow noise."""

    def __init__(self, walk: Enumerator) -> None:
        super().__init__()
        self.walk = walk

    def __torch_function__(
        self, function: Any, types: Any, given: tuple = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        kinds = [each.kind for each in tree_leaves((given, named)) if isinstance(each, Noise)]
        if kinds:
            return self.followed(kinds[0], function, given, named)
        if function in DRAWS:
            # set back, so that only draws that were not replaced change torch's generator
            state = torch.get_rng_state()
            drawn = DRAWS[function](self.walk, function, *given, **named)
            torch.default_generator.set_state(state)
            return drawn
        name = function.__name__
        if name in REFUSED:
            raise Refused(
                f"torch's {name} cannot be enumerated (models are to be made before the run)"
            )
        return function(*given, **named)

    def followed(self, kind: str, function: Any, given: tuple, named: dict[str, Any]) -> Any:
        """Return the result of a function of noise of this kind. Raises Refused where it cannot be
        enumerated.

        Where noise is written into a tensor of plain numbers, that becomes noise. Nothing is
        written into noise, whose views would not see it.
        """
        name = function.__name__
        # float(u) is no conversion of a tensor
        plain = name if name == "__float__" else name.strip("_")
        found = follow(self.walk, plain, function, given, named)
        is_in_place = name.endswith("_") and not name.endswith("__")
        is_unseen = is_in_place and (not isinstance(found, Noise) or isinstance(given[0], Noise))
        if found is NotImplemented or is_unseen or named.get("out") is not None:
            raise Refused(f"{name} of {kind}, a random number, cannot be enumerated")
        return as_noise(**vars(found), data=given[0]) if is_in_place else found


def multinomial(
    walk: Enumerator,
    function: Callable[..., Tensor],
    input: Tensor,  # named as torch does
    num_samples: int,
    replacement: bool = False,
    **named: Any,
) -> Tensor:
    """Replace ``torch.multinomial``: a fork per row and sample, over the tokens of positive
    probability. For wrong weights it raises torch's error.
    """
    result = function(input, num_samples, replacement, **named)
    drawn = []
    for row in input.reshape(-1, input.shape[-1]):
        left = row.clone()
        for _ in range(num_samples):
            token = walk.draw(left, Place(0))
            drawn.append(token)
            if not replacement:
                left[token] = 0
    return result.copy_(torch.stack(drawn).view(result.shape))


def bernoulli(
    walk: Enumerator, function: Callable[..., Tensor], input: Tensor, *given: Any, **named: Any
) -> Tensor:
    """Replace ``torch.bernoulli`` and its forms as methods: a fork per element. In place, p is .5
    unless it is given.
    """
    default = 0.5 if function.__name__ == "bernoulli_" else input
    p, *_ = *given, named.get("p", default)
    probs = torch.as_tensor(p, dtype=torch.float64).clone()  # before the tensor is overwritten
    result = function(input, *given, **named)
    tossed = [walk.accept(each[None]).item() for each in probs.expand(result.shape).flatten()]
    return result.copy_(torch.tensor(tossed).view(result.shape))


def uniform(walk: Enumerator, function: Callable[..., Tensor], *given: Any, **named: Any) -> Noise:
    """Replace ``uniform_`` from 0 to 1."""
    bounds = {"from": 0, "to": 1} | dict(zip(("from", "to"), given[1:], strict=False)) | named
    if (bounds["from"], bounds["to"]) != (0, 1):
        raise Refused("uniform_ cannot be enumerated but from 0 to 1")
    return fresh(walk, function, *given, kind="u", **named)


# By the function itself, since others have the same names: torch.nn.init.uniform_ has other bounds
DRAWS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.multinomial: multinomial,
    Tensor.multinomial: multinomial,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
    Tensor.bernoulli_: bernoulli,
    torch.rand: partial(fresh, kind="u"),
    torch.rand_like: partial(fresh, kind="u"),
    Tensor.uniform_: uniform,
    Tensor.exponential_: partial(fresh, kind="E"),  # of any rate: the same token wins
}


def refusing(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return all public functions and classes of a module by name, each replaced by one that
    refuses.
    """

    def refuse(name: str, *given: Any, **named: Any) -> NoReturn:
        raise Refused(f"{module.__name__}.{name} cannot be enumerated")

    found = {}
    for name in module.__all__:
        known = getattr(module, name)
        found[name] = partial(refuse, name)
        # a subclass, so that isinstance(x, random.Random) raises no TypeError; it is False for
        # every instance
        if isinstance(known, type):
            new = staticmethod(found[name])
            found[name] = type(name, (known,), {"__new__": new})
    return found


OF_PYTHON = refusing(random) | {"getstate": random.getstate}
OF_NUMPY = refusing(np.random) | {"get_state": np.random.get_state}


@contextmanager
def replaced(walk: Enumerator) -> Iterator[None]:
    """Replace all random functions by those of the walk, or by refusals, while the context
    lasts.
    """

    def uniforms(*shape: Any, size: Any = None) -> Noise:
        """Return noise for rand(2, 3), random((2, 3)), random(size=3) or random()."""
        return fresh(walk, torch.empty, *(shape or [size or ()]), kind="u")

    def seed(*given: Any, **named: Any) -> None:
        """Refuse a seed after the first draw, since numbers would repeat; before it, no law
        changes.
        """
        if walk.depth or walk.parts:
            raise Refused("a seed or state set after a draw cannot be enumerated: numbers repeat")

    of_python = OF_PYTHON | {"random": uniforms, "seed": seed, "setstate": seed}
    of_numpy = OF_NUMPY | dict.fromkeys(NUMPY_UNIFORM, uniforms)
    with (
        mock.patch.multiple(torch, manual_seed=seed, set_rng_state=seed),
        mock.patch.multiple(torch.random, manual_seed=seed, set_rng_state=seed),
        mock.patch.dict(vars(random), of_python),
        mock.patch.dict(vars(np.random), of_numpy | {"seed": seed, "set_state": seed}),
        FollowedTorch(walk),
    ):
        yield


def states() -> dict[str, bytes]:
    """Return the state of the generator of each library. A draw that was not replaced changes it:
    dropout, or a function that was imported by its own name.
    """
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }


@dataclass(frozen=True)
class Law:
    """Probabilities of the results of some code, found on this number of ``paths``.

    They are exact where the law was enumerated, and frequencies where it ``is_sampled``.
    """

    probs: dict[Hashable, float]
    paths: int
    is_sampled: bool = False


def law_of(run: Callable[[], Any], paths: int = PATHS) -> Law:
    """Return the law of the result of ``run``, which must begin from the same state at each call.

    Tensors and lists count as tuples. Above this number of paths as many runs are sampled instead.
    Raises Refused for code that cannot be enumerated.
    """
    found = [*islice(with_bar(outcomes(partial(result_of, run), Enumerator)), paths + 1)]
    if len(found) <= paths:
        return Law(summed(found), len(found))
    source = random.Random(0)
    counts = Counter(result_of(run, SampledWalk(source)) for _ in range(paths))
    return Law({result: count / paths for result, count in counts.items()}, paths, is_sampled=True)


def result_of(run: Callable[[], Any], walk: Enumerator) -> Hashable:
    """Return the result of a run on the walk's path. Raises Refused where it draws in any other
    way.
    """
    before = states()
    with replaced(walk):
        result = hashable(run())
    for library, state in states().items():
        if state != before[library]:
            raise Refused(
                f"{library} is used where it cannot be followed: make models before the run, switch"
                " dropout off, and write random.random, not from random import random"
            )
    return result


def hashable(result: Any) -> Hashable:
    """Return the result with tensors, arrays and lists as tuples."""
    if isinstance(result, Tensor | np.ndarray):
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
                " results, so give more --paths, or shorten the texts"
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
        rows = [(str(key), plain.get(key, 0.0), other.get(key, 0.0)) for key in plain | other]
        rows.sort(key=lambda row: -abs(row[1] - row[2]))
        width = max(len(text) for text, *_ in rows[:5]) + 2
        lines = [f"{text:<{width}}{p:>10.6f}{q:>14.6f}" for text, p, q in rows[:5]]
        return "\n".join([f"{'text':<{width}}{'plain':>10}{'speculative':>14}", *lines])


def assert_lossless(
    plain: Callable[[], Any], speculative: Callable[[], Any], bound: float = 1e-6
) -> None:
    """Assert that two functions have the same law, up to a total variation of ``bound``. Raises
    ProofError, an AssertionError, where they have not, and Refused where that cannot be told.
    """
    found = Comparison(law_of(plain), law_of(speculative))
    if not found.is_within(bound):
        raise ProofError(f"{found}\n{found.worst()}")
