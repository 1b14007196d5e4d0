"""CUDA graphs: many kernels as one launch, where launching them one by one would take longer than they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor


class Recorder:
    """Records functions, on a stream and in a pool of memory of their own: what was recorded never runs side by side.

    A function takes and returns nothing: it reads and writes tensors that stay where they are. What it makes in between
    lies in the pool, where the next one recorded makes its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What repeats the function's kernels. It runs once before, in which libraries settle.

        Raises RuntimeError with what went wrong first; the process is then on the stream that it was on, and the
        allocator serves it as before.
        """
        with torch.cuda.device(self.device):
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self.stream.wait_stream(before)
            try:
                with torch.cuda.stream(self.stream):
                    function()
                    self._capture(graph, function)
            except RuntimeError as error:
                raise RuntimeError(first_cause(error)) from error
            finally:
                torch.cuda.set_stream(before)
                before.wait_stream(self.stream)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        # Not by torch.cuda.graph: it collects garbage, empties the allocator and waits for the device each time.
        graph.capture_begin(pool=self.pool)
        try:
            function()
        finally:
            try:
                graph.capture_end()
            except RuntimeError:  # it was torn off: then capture_end leaves allocations going to the pool
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self.device.index or 0, self.pool)
                raise

    def make_room(self) -> None:
        """Give back what the allocator keeps: while it records, it could not."""
        torch.cuda.empty_cache()


class Recording:
    """A function of tensors of fixed shapes, replayed on copies of what it is given; its result is copied, too."""

    def __init__(
        self, recorder: Recorder, function: Callable[..., Tensor], inputs: Sequence[Tensor], result: Tensor
    ) -> None:
        """``inputs`` and ``result`` stay where they are. Raises RuntimeError where recording fails."""
        self.inputs, self.result = inputs, result

        def compute() -> None:
            result.copy_(function(*inputs))

        self.replay = recorder.record(compute)

    def takes(self, *given: Tensor) -> bool:
        """Whether the tensors have the shapes that were recorded, and copying rounds none of their numbers."""
        return all(
            (tensor.shape, tensor.device) == (place.shape, place.device)
            and torch.promote_types(tensor.dtype, place.dtype) == place.dtype
            for tensor, place in zip(given, self.inputs, strict=True)
        )

    def __call__(self, *given: Tensor) -> Tensor:
        for tensor, place in zip(given, self.inputs, strict=True):
            place.copy_(tensor)
        self.replay()
        return self.result.clone()


def first_cause(error: BaseException) -> str:
    """The first line of the error that led to this one: a torn-off recording complains of its end as well."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or ["for no reason given"])[0]
