"""A pretended device: its tensors refuse to mix with the CPU's, and it counts what is copied to it and read off it.

A pretended recorder goes with it, and serves on the CPU as well.

It computes on the CPU, behind torch's back: each of its tensors holds one there. So what code does on a GPU can be
tested everywhere: which tensors it keeps where, and how often it makes the host wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from decoding.randomness import SeededRandomness
from model.fast.flash import FLASH

NAME = "pretended"
ATEN = torch.ops.aten
COPIES = {ATEN.copy_, ATEN._to_copy, ATEN.to}
WAITS = {ATEN._local_scalar_dense, ATEN.item, ATEN.is_nonzero, ATEN.equal, ATEN.nonzero, ATEN.masked_select}
PADDED = 32  # what the GPU's attention tells of its sums is padded to a multiple of so many rows

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
    made = KERNELS.get(function, function)(*positional, **keywords)
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


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sums: bool, dropout: float = 0.0, **how: Any) -> tuple:
    """The GPU's memory-efficient kernel: its sums of exponentials are padded."""
    out, log_sums = FLASH(q, k, v, attn_mask=bias, scale=how["scale"])
    padding = -log_sums.shape[-1] % PADDED
    return out, torch.nn.functional.pad(log_sums, (0, padding), value=torch.inf), torch.zeros(()), torch.zeros(())


KERNELS = {ATEN._scaled_dot_product_efficient_attention.default: attention}  # which the CPU has not


class PretendedRandomness(SeededRandomness):
    """A generator of the device, whose numbers are those of the CPU's."""

    def uniform(self, count: int, out: Tensor | None = None) -> Tensor:
        numbers = Pretended(super().uniform(count))
        return numbers if out is None else out.copy_(numbers)


class Tape(TorchDispatchMode):
    """Keeps every operator with the very tensors that it was given and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function.overloadpacket in (ATEN._local_scalar_dense, ATEN.nonzero):
            raise RuntimeError("operation not permitted when stream is capturing")
        made = function(*given, **(named or {}))
        self.calls.append((function, given, named or {}, made))
        return made

    def outside(self) -> set[int]:
        """Where the memory begins that was read or written but not made meanwhile."""
        made: set[int] = set()
        taken: set[int] = set()
        for _, given, named, results in self.calls:
            taken |= {memory(each) for each in tree_leaves((given, named)) if isinstance(each, Tensor)} - made
            made |= {memory(each) for each in tree_leaves(results) if isinstance(each, Tensor)} - taken
        return taken


def memory(tensor: Tensor) -> int:
    """Where a tensor's memory begins."""
    return getattr(tensor, "held", tensor).untyped_storage().data_ptr()


class PretendedRecorder:
    """Records as a GPU does: the same operators on the same tensors, whatever Python would do by now."""

    def __init__(self) -> None:
        self.recorded = 0
        self.tapes: list[Tape] = []

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        function()
        crossed = counts["upload"], counts["read"]
        with Tape() as tape:
            function()
        if (counts["upload"], counts["read"]) != crossed:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.tapes.append(tape)
        return lambda: self.replay(tape)

    def replay(self, tape: Tape) -> None:
        before = counts.copy()
        for function, passed, named, made in tape.calls:
            again = function(*passed, **named)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and memory(old) != memory(new):
                    old.copy_(new)
        counts.clear()
        counts.update(before)
        counts["kernel"] += 1  # a single launch

    def make_room(self) -> None:
        """There is no end of it."""


_setup_privateuseone_for_python_backend(NAME)
everything, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
everything.fallback(run, "PrivateUse1")
own.impl("_copy_from", upload, "PrivateUse1")
for overload in ("default", "start", "start_step"):  # torch's own would resize a tensor that it has made
    arange = getattr(ATEN.arange, overload)
    own.impl(arange, partial(run, arange), "PrivateUse1")
