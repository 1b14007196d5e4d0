"""Random numbers that are not yet known, and what functions of torch make of them.

    torch.rand, uniform_, random.random     u     a comparison splits the interval of u
    exponential_, -log u                    E     argmax of probs / E draws by probs
    -log E                                  G     argmax of logits + G draws by softmax(logits)

Such a number stands for itself until it decides something. Each has an id, which it keeps in views
and copies, so that code which uses one number twice has the law that follows from that. Comparisons
are of real numbers, so a u that is exactly 0 is not seen. Another kind of number is another row of
``KINDS``. Knows nothing of the code that is judged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decoding.proof.enumeration import WHOLE, Enumerator
from decoding.randomness import Place
from model.errors import InputError

RACED = (0.0, 0.0)  # part of a number that has decided a race
ALONE = 2  # holders of memory that no other tensor shares: a tensor and what asks for it
UNSCALED = torch.ones((), dtype=torch.float64)  # factor of numbers that were not multiplied


@dataclass(frozen=True)
class Kind:
    """Uses of one kind of random number that can be enumerated.

    ``becomes``: the kind of the result, by function. ``threshold``: the threshold of u that one of
    this number stands for. ``races``: functions of other numbers and this one whose argmax is a
    race; their weights are ``weights`` of those others.
    """

    becomes: dict[str, str] = field(default_factory=dict)
    threshold: Callable[[Tensor], Tensor] | None = None
    races: tuple[str, ...] = ()
    weights: Callable[[Tensor], Tensor] = torch.positive


KINDS = {
    "u": Kind({"log": "log u"}, threshold=torch.positive),
    "log u": Kind({"neg": "E"}, threshold=torch.exp),
    "E": Kind({"log": "log E"}, races=("truediv", "div", "divide")),
    "log E": Kind({"neg": "G"}),
    "G": Kind(races=("add", "radd"), weights=partial(torch.softmax, dim=-1)),
    "a race": Kind(),
}
LESS = ("lt", "le", "less", "less_equal")
GREATER = ("gt", "ge", "greater", "greater_equal")
ASKS = ("size", "dim", "numel", "len", "is_floating_point", "ndimension", "stride")
CONVERSIONS = ("item", "cpu", "to", "float", "double", "half", "bfloat16")
# functions that move elements and do not change them; "get" is that of x.T
MOVES = (
    *("getitem", "view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "select"),
    *("narrow", "index_select", "gather", "take", "transpose", "permute", "get"),
    *("clone", "contiguous", "detach"),
)


class Refused(InputError):
    """Error of code whose law cannot be enumerated."""


class Noise(Tensor):
    """Tensor of random numbers that are not yet known.

    ``kind``: a key of ``KINDS``. ``ids``: of the numbers, int64 in the same shape. ``factor``,
    float64 in the same shape: what a u was multiplied by, or the weights of a race.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    kind: str
    ids: Tensor
    factor: Tensor


def as_noise(
    kind: str, ids: Tensor, factor: Tensor = UNSCALED, data: Tensor | None = None
) -> Noise:
    """Return noise of these numbers, in the tensor ``data`` itself where it is given.

    ``x.uniform_()`` writes into x, and the code goes on to read x, not only the result. So the very
    object must become noise: it is given the class Noise, whose other attributes torch does not
    touch. Whatever else reads the same memory would find plain numbers there: views, which torch
    counts, and arrays of NumPy, whose memory torch must not resize. Raises Refused for those.
    """
    ids, factor = torch.broadcast_tensors(ids, factor)
    data = torch.empty(ids.shape) if data is None else data
    memory = data.untyped_storage()
    if torch._C._storage_Use_Count(memory._cdata) > ALONE or not memory.resizable():
        raise Refused(
            f"{kind}, a random number, in a part of a tensor or in an array of NumPy's cannot be"
            " enumerated"
        )
    data.__class__ = Noise
    vars(data).update(kind=kind, ids=ids, factor=factor)
    return data


def fresh(
    walk: Enumerator, make: Callable[..., Tensor], *given: Any, kind: str, **named: Any
) -> Noise:
    """Return noise of new numbers, whose ids count from 0, in the tensor that ``make`` returns."""
    data = make(*given, **named)
    first = len(walk.parts)
    ids = torch.arange(first, first + data.numel())
    walk.parts |= dict.fromkeys(ids.tolist(), WHOLE)
    return as_noise(kind, ids.view(data.shape), data=data)


def follow(
    walk: Enumerator, name: str, function: Any, given: Sequence[Any], named: dict[str, Any]
) -> Any:
    """Return the result of a function of noise; NotImplemented where that cannot be enumerated.

    What does not depend on the numbers is answered first. No two of the cases after it share a
    name, so their order does not matter.
    """
    if name in ASKS:
        return function(*given, **named)
    if name == "get" and not isinstance(found := function(*given, **named), Tensor):
        return found  # x.shape, where x.T is a move
    kinds = [each.kind if isinstance(each, Noise) else None for each in given]
    noise = next((each for each in given if isinstance(each, Noise)), None)
    other = next((each for each in given if each is not noise), None)
    match [name, *kinds]:  # the kind of another argument is None
        # u.item(), u.float(); a whole number of u is another number
        case [_, str(), *_] if name in CONVERSIONS:
            converted = torch.as_tensor(function(*given, **named))
            return noise if converted.is_floating_point() else NotImplemented
        # u[0], u.view(-1), (u * q).T
        case [_, str(kind), *_] if name in MOVES and kind != "a race":
            moved = (function(each, *given[1:], **named) for each in (noise.ids, noise.factor))
            return as_noise(kind, *moved)
        # u.log(), -u.log(), -(-u.log()).log()
        case [_, str(kind)] if name in KINDS[kind].becomes and (noise.factor == 1).all():
            return as_noise(KINDS[kind].becomes[name], noise.ids)
        # u < p / q, p / q > u, u.log() <= p.log() - q.log()
        case [_, str(kind), None] | [_, None, str(kind)] if (
            name in LESS + GREATER and KINDS[kind].threshold
        ):
            return compare(walk, noise, other, is_below=(name in LESS) == (noise is given[0]))
        # torch.searchsorted(p.cumsum(-1), u), whichever side: how many sums u is not below
        case ["searchsorted", None, "u"] if named.get("sorter") is None:
            column = as_noise("u", noise.ids[..., None], noise.factor[..., None])
            return compare(walk, column, other[..., None, :], is_below=False).sum(-1)
        # u * q, which p is compared with
        case ["mul" | "rmul" | "multiply", "u", None] | ["mul" | "multiply", None, "u"]:
            factor = noise.factor * torch.as_tensor(other, dtype=torch.float64)
            if (factor >= 0).all():  # a comparison divides by it
                return as_noise("u", noise.ids, factor)
        # p / e, logits + g
        case [_, None, str(kind)] | ["add" | "radd", str(kind), None] if (
            name in KINDS[kind].races and not named
        ):
            weights = KINDS[kind].weights(torch.as_tensor(other).double())
            return as_noise("a race", noise.ids, weights)
        # (p / e).argmax(-1)
        case ["argmax", "a race", *_]:
            return winners(walk, noise, *given[1:], **named)
    return NotImplemented


def compare(walk: Enumerator, noise: Noise, other: Any, *, is_below: bool) -> Tensor:
    """Return whether each number is below its threshold, bool, or whether it is not. Raises Refused
    where one has decided a race.
    """
    thresholds = KINDS[noise.kind].threshold(torch.as_tensor(other, dtype=torch.float64))
    if ((thresholds == 0) & (noise.factor == 0)).any():
        raise Refused("a random number times 0 cannot be compared with 0")
    ids, thresholds = torch.broadcast_tensors(noise.ids, thresholds / noise.factor)
    results = []
    for number, threshold in zip(
        ids.flatten().tolist(), thresholds.flatten().tolist(), strict=True
    ):
        if walk.parts[number] == RACED:
            raise Refused("a random number that decided a race cannot be compared")
        is_known = not math.isnan(threshold)
        results.append(is_known and walk.is_below(number, threshold) == is_below)
    return torch.tensor(results, dtype=torch.bool).view(ids.shape)


def winners(
    walk: Enumerator, noise: Noise, dim: int | None = None, keepdim: bool = False
) -> Tensor:
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
    rows = noise.factor.reshape(-1, noise.shape[-1])
    drawn = torch.stack([winner(walk, row) for row in rows]).view(noise.shape[:-1])
    return drawn[..., None] if keepdim else drawn


def winner(walk: Enumerator, weights: Tensor) -> Tensor:
    """Return the argmax of a race of one row: a fork, unless none is positive or one is not finite.

    Such a race is decided by the weights alone: zeros and infinities stay what they are.
    """
    largest = weights.amax()
    if largest < 0:
        raise Refused("a race of negative weights cannot be enumerated")
    return walk.draw(weights.clamp(min=0), Place(0)) if 0 < largest < math.inf else weights.argmax()
