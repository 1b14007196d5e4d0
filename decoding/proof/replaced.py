"""Random functions of torch, Python and NumPy, replaced while foreign code runs.

A draw of a token becomes a fork of a walk. Other random numbers are ``noise`` until they decide
something. Whatever cannot be enumerated is refused by name: another use of such a number, another
random function, races that share noise. Knows nothing of laws.
"""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from decoding.proof.enumeration import Enumerator
from decoding.proof.noise import Noise, Refused, as_noise, follow, fresh
from decoding.randomness import Place

# Names of torch's random functions but those in ``DRAWS``; ``states`` finds others. "uniform_" is
# that of torch.nn.init.
REFUSED = (
    "uniform_",
    "randn",
    "randn_like",
    "normal",
    "normal_",
    "randint",
    "randint_like",
    "random_",
    "randperm",
    "poisson",
    "binomial",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "gumbel_softmax",
)
NUMPY_UNIFORM = ("random", "random_sample", "rand", "ranf", "sample")
RESEEDED = "a seed or state set after a draw cannot be enumerated: numbers repeat"


class FollowedTorch(TorchFunctionMode):
    """Mode in which torch's random functions are those of a walk, and its others follow noise."""

    def __init__(self, walk: Enumerator) -> None:
        super().__init__()
        self.walk = walk
        # the states in which the last draws left generators that the code named
        self.left: dict[torch.Generator, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, given: tuple = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        kinds = [each.kind for each in tree_leaves((given, named)) if isinstance(each, Noise)]
        if kinds:
            return self.followed(kinds[0], function, given, named)
        if function in DRAWS:
            source = named.get("generator")
            if source in self.left and not source.get_state().equal(self.left[source]):
                raise Refused(RESEEDED)
            # set back, so that only draws that were not replaced change torch's generator
            state = torch.get_rng_state()
            drawn = DRAWS[function](self.walk, function, *given, **named)
            torch.default_generator.set_state(state)
            if source is not None:
                self.left[source] = source.get_state()
            return drawn
        if function.__name__ in REFUSED:
            raise Refused(
                f"torch's {function.__name__} cannot be enumerated (models are to be made before"
                " the run)"
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
        is_unseen = is_in_place and not (
            isinstance(found, Noise)
            and not isinstance(given[0], Noise)
            and given[0].is_floating_point()  # torch refuses others, and another shape
            and given[0].shape == found.shape
        )
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
    probability. For wrong weights it raises torch's error. Raises Refused where torch may return
    tokens of no probability: without replacement, when too few have one.
    """
    result = function(input, num_samples, replacement, **named)
    if not replacement and ((input > 0).sum(-1) < num_samples).any():
        raise Refused("multinomial of more samples than positive weights cannot be enumerated")
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


def refusal(module: ModuleType, name: str) -> Callable[..., NoReturn]:
    """Return what takes the place of a module's function or class of this name, and refuses."""

    def refuse(*given: Any, **named: Any) -> NoReturn:
        raise Refused(f"{module.__name__}.{name} cannot be enumerated")

    known = getattr(module, name)
    # a subclass, so that isinstance(x, random.Random) raises no TypeError; it is False for every
    # instance
    return (
        type(name, (known,), {"__new__": staticmethod(refuse)})
        if isinstance(known, type)
        else refuse
    )


OF_PYTHON = {name: refusal(random, name) for name in random.__all__ if name != "getstate"}
OF_NUMPY = {name: refusal(np.random, name) for name in np.random.__all__ if name != "get_state"}


@contextmanager
def replaced(walk: Enumerator) -> Iterator[None]:
    """Replace all random functions by those of the walk, or by refusals, while the context lasts.
    Raises Refused at its end where the code has drawn in any other way.
    """

    def uniforms(*shape: Any, size: Any = None) -> Noise:
        """Return noise for rand(2, 3), random((2, 3)), random(size=3) or random()."""
        return fresh(walk, torch.empty, *(shape or [size or ()]), kind="u")

    def seed(*given: Any, **named: Any) -> None:
        """Refuse a seed of a library's generator after the first draw, since numbers would repeat;
        before it, it changes no law.
        """
        if walk.depth or walk.parts:
            raise Refused(RESEEDED)

    before = states()
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
    for library, state in states().items():
        if state != before[library]:
            raise Refused(
                f"{library} is used where it cannot be followed: make models before the run, switch"
                " dropout off, and write random.random, not from random import random"
            )


def states() -> dict[str, bytes]:
    """Return the state of the generator of each library. A draw that was not replaced changes it:
    dropout, or a function that was imported by its own name.
    """
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }
