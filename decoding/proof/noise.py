"""Random numbers that are not yet known, and what functions of torch make of them.

    torch.rand, uniform_, random.random     u     a comparison splits the interval of u
    exponential_, -log u                    E     argmax of probs / E draws by probs
    -log E                                  G     argmax of logits + G draws by softmax(logits)

Such a number stands for itself until it decides something. Each has an id, which it keeps in views
and copies, so that code which uses one number twice has the law that follows from that. Comparisons
are of real numbers, so a u that is exactly 0 is not seen. Knows nothing of the code that is judged.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.proof.enumeration import Enumerator
from decoding.randomness import Place
from model.errors import InputError

WHOLE = (0.0, 1.0)  # part of a uniform number that has decided nothing
RACED = (0.0, 0.0)  # part of a number that has decided a race
ALONE = 2  # holders of a storage, if no other tensor shares it: a tensor and what asks for it
UNSCALED = torch.ones((), dtype=torch.float64)  # factor of numbers that were not multiplied
# kind of the result, by function and kind of the argument
BECOMES = {
    ("log", "u"): "log u",
    ("neg", "log u"): "E",
    ("log", "E"): "log E",
    ("neg", "log E"): "G",
}
LESS = ("lt", "le", "less", "less_equal")
GREATER = ("gt", "ge", "greater", "greater_equal")
ASKS = ("size", "dim", "numel", "len", "get", "is_floating_point", "ndimension", "stride")
CONVERSIONS = ("item", "cpu", "to", "float", "double", "half", "bfloat16")
# functions that move elements and do not change them; "get" is that of x.T
MOVES = (
    *("getitem", "view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "select", "get"),
    *("narrow", "index_select", "gather", "take", "transpose", "permute"),
    *("clone", "contiguous", "detach"),
)


class Refused(InputError):
    """Error of code whose law cannot be enumerated."""


class Noise(Tensor):
    """Tensor of random numbers that are not yet known.

    ``kind``: u, E or G, a logarithm of u or E, or "a race", a quotient or sum whose argmax draws
    by the ``weights``. ``ids``: of the numbers, int64 in the same shape. ``factor``: what a u was
    multiplied by.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    kind: str
    ids: Tensor
    factor: Tensor
    weights: Tensor


def as_noise(
    data: Tensor, kind: str, ids: Tensor, factor: Tensor = UNSCALED, weights: Any = None
) -> Noise:
    """Return the tensor itself as noise, so that functions which write into a tensor can be
    replaced. Raises Refused for a tensor with views, which would not see the noise.
    """
    if torch._C._storage_Use_Count(data.untyped_storage()._cdata) > ALONE:
        raise Refused(f"{kind}, a random number, in a part of a tensor cannot be enumerated")
    data.__class__ = Noise
    factor = factor.expand(ids.shape)
    vars(data).update(kind=kind, ids=ids, factor=factor, weights=weights)
    return data


class Walk(Enumerator):
    """Enumerator of the paths of code that draws random numbers, whose ids count from 0."""

    def fresh(self, make: Callable[..., Tensor], *given: Any, kind: str, **named: Any) -> Noise:
        """Return noise of new numbers, in the tensor that ``make`` returns."""
        data = make(*given, **named)
        first = len(self.parts)
        ids = torch.arange(first, first + data.numel())
        self.parts |= dict.fromkeys(ids.tolist(), WHOLE)
        return as_noise(data, kind, ids.view(data.shape))

    def is_below(self, number: Hashable, threshold: float) -> bool:
        if self.parts[number] == RACED:
            raise Refused("a random number that decided a race cannot be compared")
        return super().is_below(number, threshold)


def follow(
    walk: Walk, name: str, function: Any, given: Sequence[Any], named: dict[str, Any]
) -> Any:
    """Return the result of a function of noise; NotImplemented where that cannot be enumerated."""
    if name in ASKS:
        found = function(*given, **named)
        if not isinstance(found, Tensor):
            return found
    kinds = [each.kind if isinstance(each, Noise) else None for each in given]
    noise = next((each for each in given if isinstance(each, Noise)), None)
    other = next((each for each in given if each is not noise), None)
    dtypes = [
        getattr(each, "dtype", each)
        for each in (*given, *named.values())
        if not isinstance(each, Noise)
    ]
    match [name, *kinds]:  # the kind of another argument is None
        # u.item(), u.float(); a whole number of u is another number
        case [_, str(), *_] if name in CONVERSIONS and all(
            dtype.is_floating_point for dtype in dtypes if isinstance(dtype, torch.dtype)
        ):
            return noise
        # u[0], u.view(-1), (u * q).T
        case [_, str(kind), *_] if name in MOVES and kind != "a race":
            ids = function(noise.ids, *given[1:], **named)
            factor = function(noise.factor, *given[1:], **named)
            return as_noise(torch.empty(ids.shape), kind, ids, factor)
        # u.log(), -u.log(), -(-u.log()).log()
        case [_, str(kind)] if (name, kind) in BECOMES and (noise.factor == 1).all():
            return as_noise(torch.empty(noise.shape), BECOMES[name, kind], noise.ids)
        # u < p / q, p / q > u, u.log() <= p.log() - q.log()
        case [_, "u" | "log u", None] | [_, None, "u" | "log u"] if name in LESS + GREATER:
            return compare(walk, noise, other, is_below=(name in LESS) == (noise is given[0]))
        # torch.searchsorted(p.cumsum(-1), u), whichever side
        case ["searchsorted", None, "u"] if named.get("sorter") is None:
            return found_places(walk, other, noise)
        # u * q, which p is compared with
        case ["mul" | "rmul" | "multiply", "u", None] | ["mul" | "multiply", None, "u"]:
            factor = noise.factor * torch.as_tensor(other, dtype=torch.float64)
            if (factor >= 0).all():  # a comparison divides by it
                ids, factor = torch.broadcast_tensors(noise.ids, factor)
                return as_noise(torch.empty(ids.shape), "u", ids, factor)
        # p / e
        case ["truediv" | "div" | "divide", None, "E"] if not named:
            return race(noise, other)
        # logits + g
        case ["add" | "radd", "G", None] | ["add", None, "G"] if not named:
            return race(noise, torch.as_tensor(other).double().softmax(-1))
        # (p / e).argmax(-1)
        case ["argmax", "a race", *_]:
            return winners(walk, noise, *given[1:], **named)
    return NotImplemented


def compare(walk: Walk, noise: Noise, other: Any, *, is_below: bool) -> Tensor:
    """Return whether each u is below its threshold, bool, or whether it is not."""
    thresholds = torch.as_tensor(other, dtype=torch.float64)
    if noise.kind == "log u":
        thresholds = thresholds.exp()
    if ((thresholds == 0) & (noise.factor == 0)).any():
        raise Refused("a random number times 0 cannot be compared with 0")
    ids, thresholds = torch.broadcast_tensors(noise.ids, thresholds / noise.factor)
    results = [
        not math.isnan(threshold) and walk.is_below(number, threshold) == is_below
        for number, threshold in zip(
            ids.flatten().tolist(), thresholds.flatten().tolist(), strict=True
        )
    ]
    return torch.tensor(results, dtype=torch.bool).view(ids.shape)


def found_places(walk: Walk, sums: Tensor, noise: Noise) -> Tensor:
    """Return the place of each u in its row of sorted sums, int64 in the shape of the noise: the
    number of sums that it is not below.
    """
    shape = *noise.shape, 1
    column = as_noise(torch.empty(shape), "u", noise.ids[..., None], noise.factor[..., None])
    return compare(walk, column, sums[..., None, :], is_below=False).sum(-1)


def race(noise: Noise, weights: Any) -> Noise:
    """Return a race of one number per weight."""
    if noise.ids.shape != torch.as_tensor(weights).shape:
        return NotImplemented
    return as_noise(torch.empty(noise.shape), "a race", noise.ids, weights=weights)


def winners(walk: Walk, noise: Noise, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the argmax of a race over the last dimension: a fork per row, by the positive weights.

    Raises Refused where one of its numbers has decided something before, and for a row whose
    weights are all negative.
    """
    if dim not in (-1, noise.dim() - 1) and noise.dim() > 1:
        return NotImplemented
    for number in noise.ids.flatten().tolist():
        if walk.parts[number] != WHOLE:
            raise Refused("two draws share a random number: races that are not independent")
        walk.parts[number] = RACED
    rows = noise.weights.reshape(-1, noise.weights.shape[-1])
    drawn = torch.stack([winner(walk, row) for row in rows]).view(noise.ids.shape[:-1])
    return drawn[..., None] if keepdim else drawn


def winner(walk: Walk, weights: Tensor) -> Tensor:
    """Return the argmax of a race of one row: a fork, unless none is positive or one is not finite.

    Such a race is decided by the weights alone: zeros and infinities stay what they are.
    """
    largest = weights.amax()
    if largest < 0:
        raise Refused("a race of negative weights cannot be enumerated")
    return walk.draw(weights.clamp(min=0), Place(0)) if 0 < largest < math.inf else weights.argmax()
