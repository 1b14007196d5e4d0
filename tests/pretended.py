"""A pretended device: its tensors refuse to mix with the CPU's, and it counts what is copied to it and read off it.

It computes on the CPU, behind torch's back: each of its tensors holds one there. So what code does on a GPU can be
tested everywhere: which tensors it keeps where, and how often it makes the host wait.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from decoding.randomness import SeededRandomness

NAME = "pretended"
ATEN = torch.ops.aten
COPIES = {ATEN.copy_, ATEN._to_copy, ATEN.to}
WAITS = {ATEN._local_scalar_dense, ATEN.item, ATEN.is_nonzero, ATEN.equal, ATEN.nonzero, ATEN.masked_select}

counts: Counter[str] = Counter()  # "upload", "read" and "kernel"


class Pretended(Tensor):
    """A tensor of the pretended device; ``held`` is what it really is."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        with torch.inference_mode(False):  # else torch could not make a view of it
            made = Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=torch.device(NAME, 0))
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return run(function, *given, **(named or {}))

    def tolist(self) -> list:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"Pretended({self.held})"


def run(function: Any, *given: Any, **named: Any) -> Any:
    """An operator on tensors of this device. Raises RuntimeError where one is on the CPU and it is no copy."""
    operator = function.overloadpacket
    tensors = [each for each in tree_leaves((given, named)) if isinstance(each, Tensor)]
    if operator not in COPIES and not all(isinstance(each, Pretended) for each in tensors):
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, {NAME}")
    here, there = whereabouts(operator, tensors, named)
    if tensors and tensors[0].numel():
        counts["upload"] += not here and there
        counts["read"] += (here and not there) or operator in WAITS
    counts["read"] += operator is ATEN.index and any(each.dtype == torch.bool for each in tensors[1:])
    held = tree_map_only(Pretended, lambda each: each.held, (given, named))
    positional, keywords = tree_map_only(torch.device, lambda each: torch.device("cpu"), held)
    made = function(*positional, **keywords)
    counts["kernel"] += function._schema.is_mutable or makes_anew(made, tensors, str(operator))
    if operator in COPIES and not there:
        return made
    known = {id(each.held): each for each in tensors if isinstance(each, Pretended)}
    return tree_map_only(Tensor, lambda each: known[id(each)] if id(each) in known else Pretended(each), made)


def makes_anew(made: Any, tensors: list[Tensor], name: str) -> bool:
    """Whether an operator computes something: a view looks at what is there, and so does what reserves memory."""
    there = {each.held.untyped_storage().data_ptr() for each in tensors if isinstance(each, Pretended)}
    new = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.numel()]
    return "empty" not in name and any(each.untyped_storage().data_ptr() not in there for each in new)


def upload(source: Tensor, target: Pretended, non_blocking: bool = False) -> Tensor:
    """What ``torch.tensor`` copies the new tensor with."""
    counts["upload"] += source.numel() > 0
    target.held.copy_(source)
    return target


def whereabouts(operator: Any, tensors: list[Tensor], named: dict[str, Any]) -> tuple[bool, bool]:
    """Whether what is copied is on the device, and whether it goes there."""
    if operator not in COPIES:
        return True, True
    if operator is ATEN.copy_:
        target, source = tensors
        return isinstance(source, Pretended), isinstance(target, Pretended)
    asked = [each for each in tree_leaves(named) if isinstance(each, torch.device)]
    return isinstance(tensors[0], Pretended), all(each.type == NAME for each in asked)


class PretendedRandomness(SeededRandomness):
    """A generator of the device, whose numbers are those of the CPU's."""

    def uniform(self, count: int) -> Tensor:
        return Pretended(super().uniform(count))


_setup_privateuseone_for_python_backend(NAME)
everything, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
everything.fallback(run, "PrivateUse1")
own.impl("_copy_from", upload, "PrivateUse1")
for overload in ("default", "start", "start_step"):  # torch's own would resize a tensor that it has made
    arange = getattr(ATEN.arange, overload)
    own.impl(arange, partial(run, arange), "PrivateUse1")
