"""Fake device: its tensors refuse to mix with the CPU's, and it counts uploads to it and reads from
it.

It computes on the CPU: each of its tensors holds a CPU tensor. So the behaviour of code on a GPU
can be tested everywhere: on which device its tensors are, and how often the host waits for the
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from decoding.randomness import SeededRandomness

NAME = "fake_device"
ATEN = torch.ops.aten
COPIES = {ATEN.copy_, ATEN._to_copy, ATEN.to}
WAITS = {
    ATEN._local_scalar_dense,
    ATEN.item,
    ATEN.is_nonzero,
    ATEN.equal,
    ATEN.nonzero,
    ATEN.masked_select,
}

counts: Counter[str] = Counter()  # "upload", "read", "kernel" and "replay"
# Operators of the graph that is being recorded, with their arguments and results on the CPU.
recording: list[tuple[Any, Any, Any, Any]] | None = None


class FakeTensor(Tensor):
    """Tensor of the fake device; ``held`` is the CPU tensor with its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> FakeTensor:
        layout = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
        }
        with torch.inference_mode(False):  # else torch could not make a view of it
            made = Tensor._make_wrapper_subclass(
                cls, held.shape, **layout, device=torch.device(NAME, 0)
            )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        return run(function, *given, **(named or {}))

    def tolist(self) -> list:
        return self.cpu().tolist()


def record(compute: Callable[[], object]) -> Callable[[], None]:
    """A graph, recorded like ``model.fast.graphs.Recorder``'s: its replay runs the operators again.

    Numbers of the host are those of the recording, and tensors are at the same places. Raises
    RuntimeError for a copy from or to the host in the graph.
    """
    global recording
    compute()
    recording = []
    try:
        compute()
        recorded = recording
    finally:
        recording = None

    def replay() -> None:
        counts["replay"] += 1
        for function, positional, keywords, made in recorded:
            again = function(*positional, **keywords)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay


def run(function: Any, *given: Any, **named: Any) -> Any:
    """The result of an operator on tensors of this device.

    Raises RuntimeError where one of them is on the CPU, unless the operator is a copy.
    """
    operator = function.overloadpacket
    tensors = [each for each in tree_leaves((given, named)) if isinstance(each, Tensor)]
    if operator not in COPIES and not all(isinstance(each, FakeTensor) for each in tensors):
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, {NAME}")
    from_device, to_device = copy_direction(operator, tensors, named)
    if tensors and tensors[0].numel():
        counts["upload"] += not from_device and to_device
        counts["read"] += (from_device and not to_device) or operator in WAITS
    counts["read"] += operator is ATEN.index and any(
        each.dtype == torch.bool for each in tensors[1:]
    )
    held = tree_map_only(FakeTensor, lambda each: each.held, (given, named))
    positional, keywords = tree_map_only(torch.device, lambda each: torch.device("cpu"), held)
    made = function(*positional, **keywords)
    if recording is not None:
        if not (from_device and to_device) or operator in WAITS:
            raise RuntimeError(f"{operator}: a graph cannot copy from or to the host")
        recording.append((function, positional, keywords, made))
    counts["kernel"] += function._schema.is_mutable or computes(made, tensors, str(operator))
    if operator in COPIES and not to_device:
        return made
    known = {id(each.held): each for each in tensors if isinstance(each, FakeTensor)}
    return tree_map_only(
        Tensor, lambda each: known[id(each)] if id(each) in known else FakeTensor(each), made
    )


def computes(made: Any, tensors: list[Tensor], name: str) -> bool:
    """Whether an operator writes new numbers: a view does not, and neither does an allocation."""
    given = {
        each.held.untyped_storage().data_ptr() for each in tensors if isinstance(each, FakeTensor)
    }
    new = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.numel()]
    return "empty" not in name and any(
        each.untyped_storage().data_ptr() not in given for each in new
    )


def upload(source: Tensor, target: FakeTensor, non_blocking: bool = False) -> Tensor:
    """The copy that ``torch.tensor`` makes of a new tensor."""
    if recording is not None:
        raise RuntimeError("a graph cannot copy from the host")
    counts["upload"] += source.numel() > 0
    target.held.copy_(source)
    return target


def copy_direction(
    operator: Any, tensors: list[Tensor], named: dict[str, Any]
) -> tuple[bool, bool]:
    """Whether the source of a copy is on the device, and whether its target is; both, for other
    operators.
    """
    if operator not in COPIES:
        return True, True
    if operator is ATEN.copy_:
        target, source = tensors
        return isinstance(source, FakeTensor), isinstance(target, FakeTensor)
    asked = [each for each in tree_leaves(named) if isinstance(each, torch.device)]
    return isinstance(tensors[0], FakeTensor), all(each.type == NAME for each in asked)


class FakeDeviceRandomness(SeededRandomness):
    """Generator of the device, with the numbers of the CPU's."""

    def uniform(self, count: int) -> Tensor:
        before = self.drawn
        numbers = super().uniform(count)
        counts["kernel"] += self.drawn is not before
        return FakeTensor(numbers)


_setup_privateuseone_for_python_backend(NAME)
fallback, operators = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
fallback.fallback(run, "PrivateUse1")
operators.impl("_copy_from", upload, "PrivateUse1")
# torch's kernels would resize a tensor that they have made
for overload in ("default", "start", "start_step"):
    arange = getattr(ATEN.arange, overload)
    operators.impl(arange, partial(run, arange), "PrivateUse1")
