"""Random numbers that are not yet known, and what functions of torch make of them.

    torch.rand, uniform_, random.random     u     a comparison splits the interval of u
    exponential_, -log u                    E     argmax of probs / E draws by probs
    -log E                                  G     argmax of logits + G draws by softmax(logits)

Such a number stands for itself until it decides something. Each has an id, which it keeps in views
and copies, so that code which uses one number twice has the law that follows from that. Comparisons
are of real numbers, so a u that is exactly 0 is not seen. Another kind of number needs a row of
``DRAWS`` (in ``replaced``) or of ``BECOMES``, and a case of ``follow`` for each of its uses. Knows
nothing of the code that is judged.
"""

import math
from collections.abc import Callable, Sequence
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


# What a number becomes, by function and kind
BECOMES = {
    ("log", "u"): "log u",
    ("neg", "log u"): "E",
    ("log", "E"): "log E",
    ("neg", "log E"): "G",
}
# The threshold of u that a threshold of the number stands for
THRESHOLDS = {"u": torch.positive, "log u": torch.exp}
# The weights by which x divided by such a number, or x with it added, draws in a race
WEIGHTS = {"E": torch.positive, "G": partial(torch.softmax, dim=-1)}
# The cases of ``follow`` that several of torch's functions share; "get" is that of x.T. Those of
# "move" move elements and do not change them.
CASES = {
    "ask": "size dim numel len is_floating_point ndimension stride",
    "convert": "item cpu to float double half bfloat16",
    "move": "getitem view reshape squeeze unsqueeze flatten expand select narrow index_select"
    " gather take transpose permute get clone contiguous detach",
    "less": "lt le less less_equal",
    "greater": "gt ge greater greater_equal",
    "multiply": "mul rmul multiply",
    "divide": "truediv div divide",
    "add": "add radd",
    "neg": "neg negative",
}
USES = {name: use for use, names in CASES.items() for name in names.split()}


class Refused(InputError):
    """Error of code whose law cannot be enumerated."""


class Noise(Tensor):
    """Tensor of random numbers that are not yet known.

    ``kind``: a name of the table above, or "a race". ``ids``: of the numbers, int64 in the same
    shape. ``factor``, float64 in the same shape: of a u, what it was multiplied by; of a race, the
    weights; else 1.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    kind: str
    ids: Tensor
    factor: Tensor

    __round__ = Tensor.round  # which is refused: without it round(u) is a TypeError

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **named: Any) -> Tensor:
        """Return the result of torch's function of the same name for a function of NumPy's. Raises
        Refused where torch has none.
        """
        of_torch = getattr(torch, function.__name__, None)
        if method != "__call__" or named or of_torch is None:
            raise Refused(f"numpy.{function.__name__} of a random number cannot be enumerated")
        return of_torch(*(x if isinstance(x, Noise) else torch.as_tensor(x) for x in given))


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

    A case is a use, and the kind of each argument that was given without a name: None where it is
    not noise. No two cases can take the same call, so their order does not matter.
    """
    kinds = [each.kind if isinstance(each, Noise) else None for each in given]
    noise = next((each for each in given if isinstance(each, Noise)), None)
    other = next((each for each in given if each is not noise), None)
    if name == "get" and not isinstance(found := function(*given, **named), Tensor):
        return found  # x.shape, where x.T is a move
    match [USES.get(name, name), *kinds]:
        # u.size(), which does not depend on the numbers
        case ["ask", *_]:
            return function(*given, **named)
        # u.item(), u.float(); a whole number of u is another number
        case ["convert", str(), *_]:
            converted = torch.as_tensor(function(*given, **named))
            return noise if converted.is_floating_point() else NotImplemented
        # u[0], u.view(-1), (u * q).T
        case ["move", str(kind), *_] if kind != "a race":
            moved = (function(each, *given[1:], **named) for each in (noise.ids, noise.factor))
            return as_noise(kind, *moved)
        # u.log(), -u.log(), -(-u.log()).log()
        case [use, str(kind)] if (use, kind) in BECOMES and (noise.factor == 1).all():
            return as_noise(BECOMES[use, kind], noise.ids)
        # u < p / q, p / q > u, u.log() <= p.log() - q.log()
        case ["less", "u" | "log u", None] | ["greater", None, "u" | "log u"]:
            return compare(walk, noise, other, is_below=True)
        case ["greater", "u" | "log u", None] | ["less", None, "u" | "log u"]:
            return compare(walk, noise, other, is_below=False)
        # torch.searchsorted(p.cumsum(-1), u), whichever side: how many sums u is not below
        case ["searchsorted", None, "u"] if named.get("sorter") is None:
            column = as_noise("u", noise.ids[..., None], noise.factor[..., None])
            return (
                compare(walk, column, other[..., None, :], is_below=False).sum(-1).view(noise.shape)
            )
        # u * q, which p is compared with
        case ["multiply", "u", None] | ["multiply", None, "u"]:
            factor = noise.factor * torch.as_tensor(other, dtype=torch.float64)
            if (factor >= 0).all():  # a comparison divides by it
                return as_noise("u", noise.ids, factor)
        # p / e, logits + g, g + logits; not with alpha or a rounding
        case ["divide", None, "E"] | ["add", None, "G"] | ["add", "G", None] if not named:
            weights = WEIGHTS[noise.kind](torch.as_tensor(other).double())
            return as_noise("a race", noise.ids, weights)
        # (p / e).argmax(-1)
        case ["argmax", "a race", *_]:
            return winners(walk, noise, *given[1:], **named)
    return NotImplemented


def compare(walk: Enumerator, noise: Noise, other: Any, *, is_below: bool) -> Tensor:
    """Return whether each number is below its threshold, bool, or whether it is not. Raises Refused
    where one has decided a race.
    """
    thresholds = THRESHOLDS[noise.kind](torch.as_tensor(other, dtype=torch.float64))
    if ((thresholds == 0) & (noise.factor == 0)).any():
        raise Refused("a random number times 0 cannot be compared with 0")
    ids, thresholds = torch.broadcast_tensors(noise.ids, thresholds / noise.factor)
    results = []
    for number, threshold in zip(
        ids.flatten().tolist(), thresholds.flatten().tolist(), strict=True
    ):
        if walk.parts[number] == RACED:
            raise Refused("a random number that decided a race cannot be compared")
        # nothing is below nan or above it
        results.append(not math.isnan(threshold) and walk.is_below(number, threshold) == is_below)
    return torch.tensor(results, dtype=torch.bool).view(ids.shape)


def winners(
    walk: Enumerator,
    noise: Noise,
    dim: int | None = None,
    keepdim: bool = False,
    axis: int | None = None,  # NumPy's name of ``dim``
) -> Tensor:
    """Return the argmax of a race over the last dimension: a fork per row, by the positive weights.

    Raises Refused where one of its numbers has decided something before, and for a row whose
    weights are all negative.
    """
    if {dim, axis}.isdisjoint((-1, noise.dim() - 1)) and noise.dim() > 1:
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
