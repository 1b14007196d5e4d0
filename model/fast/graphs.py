"""CUDA graphs: how they are recorded, and functions of rows, such as sampling, as graphs.

The kernels of sampling are small and many: launching them one by one takes longer than a step of a
small model. ``Launcher`` compiles such a function and replays it as one launch. The readable
functions stay the only version; they call ``model.launch``. ``Recorder`` records graphs,
``Buffers`` are their memory, ``Copies`` and ``Turns`` the two forms of their results.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from model.launch import LAUNCHERS

# versions of a function that torch compiles, over all models, capacities and plans
RECOMPILES = 256
TURNS = 4096  # draws until the memory of a drawn token is written again
TOLERANCE = 0.05  # of probabilities: rounding may move a token across the limit of a filter

Record = Callable[[Callable[[], object]], Callable[[], None]]
compile_function = partial(torch.compile, fullgraph=True, dynamic=False, recompile_limit=RECOMPILES)


class Recorder:
    """Recorder of CUDA graphs on one device, which share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        # of this device, which need not be the current one
        self.warm_up_stream = torch.cuda.Stream(device)
        self.stream = torch.cuda.Stream(device)
        # A pool whose last graph has died cannot be used again. So this graph is kept.
        self.smallest = self(partial(torch.zeros, 1, device=device))

    def __call__(self, compute: Callable[[], object]) -> Callable[[], None]:
        """Record ``compute`` as a graph; returns the replay.

        It runs once before on another stream, so that libraries allocate their workspaces outside
        of the graph. Raises what ``compute`` raises, and RuntimeError where it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            try:
                self.warm_up_stream.wait_stream(current)
                with torch.cuda.stream(self.warm_up_stream):
                    compute()
                current.wait_stream(self.warm_up_stream)
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                    compute()
            except Exception as error:
                # Ctrl-C makes a capture invalid, whose end then raises another error
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise error.__context__ from None
                raise
            finally:
                # an invalid capture leaves its stream the current one
                torch.cuda.set_stream(current)
        return graph.replay


class Buffers:
    """Memory of one device that graphs read and write, by name, shape and dtype."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.get = cache(self._new)
        self.numbers: dict[Tensor, float] = {}  # the values of numbers that graphs read

    @torch.inference_mode(False)
    def _new(self, name: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def of_argument(self, name: object, given: Tensor | float) -> Tensor:
        """Buffer for a tensor or a number."""
        if isinstance(given, float):
            return self.get(name, (), torch.float64)
        return self.get(name, given.shape, given.dtype)

    def write(self, buffer: Tensor, given: Tensor | float) -> None:
        """Write an argument, unless it is the number that is there."""
        if isinstance(given, Tensor):
            buffer.copy_(given, non_blocking=True)
        elif self.numbers.get(buffer) != given:
            self.numbers[buffer] = given
            buffer.fill_(given)


class Copies:
    """Copies of the two buffers that were handed out last.

    A graph that is given such a copy, or a view of it, reads the buffer, unless the copy has been
    changed.
    """

    def __init__(self) -> None:
        self.last: list[tuple[Tensor, Tensor]] = []  # copies, with their buffers

    @torch.inference_mode(False)  # so that torch counts the changes of the copy
    def hand_out(self, buffer: Tensor, rows: int) -> Tensor:
        """Copy of a buffer's first rows."""
        copy = buffer[:rows].clone()
        others = [pair for pair in self.last if pair[1] is not buffer]
        self.last = [(copy, buffer), *others[:1]]
        return copy

    def source(self, given: Any) -> Tensor | None:
        """Buffer that holds the numbers of this argument, if one does."""
        for copy, buffer in self.last if isinstance(given, Tensor) else ():
            if (given is copy or given._base is copy) and not copy._version:
                return buffer
        return None


class Turns:
    """Turns of draws: each writes its tokens to the next of ``TURNS`` places, so that no copy is
    needed. Graphs read the turn on the device.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.next = 0
        self.next_there = buffers.get("turn", (1,), torch.int64)

    def write(self, places: Tensor, tokens: Tensor) -> None:
        """Write drawn tokens, in a graph."""
        places.index_copy_(0, self.next_there, tokens[None])
        self.next_there.add_(1).remainder_(TURNS)

    def read(self, places: Tensor) -> Tensor:
        """The tokens that a graph has just written."""
        drawn = places[self.next]
        self.next = (self.next + 1) % TURNS
        return drawn

    def restore(self) -> None:
        """Undo the turns of a recording, which nothing reads."""
        self.next_there.fill_(self.next)


@dataclass(frozen=True)
class Launch:
    """Graph of a function: the buffers that its arguments are written to, None for those that are
    not written; its replay; its results, those of a draw by turn.
    """

    written: list[Tensor | None]
    replay: Callable[[], None]
    results: Tensor
    is_draw: bool


class Launcher:
    """Launcher of functions of rows on one device, each a graph per number of rows.

    Within a graph every row is computed by itself, by the same kernels on memory of the same
    alignment. So its bits do not depend on the number of rows, and plain and drafted texts have the
    same distributions. Tensors are given by row, floats are numbers that may change between
    replays, and everything else is a constant of the graph. Results are copies, or the tokens of a
    draw. A function that cannot be compiled or recorded, or then computes something else, is called
    directly. Without ``record`` nothing is launched.
    """

    def __init__(
        self,
        device: torch.device,
        record: Record | None = None,
        compile: Callable[..., Any] = compile_function,
    ) -> None:
        self.record = record
        self.compile = cache(compile)
        self.buffers = Buffers(device)
        self.copies = Copies()
        self.turns = Turns(self.buffers)
        # by function and kinds of arguments; None: called directly
        self.launches: dict[Any, Launch | None] = {}

    @torch.inference_mode()
    def __call__(
        self, function: Callable[..., Tensor], *arguments: Any, is_compiled: bool = True
    ) -> Tensor:
        """``function(*arguments)``, of which the first is a tensor of rows."""
        key = function, *(kind(given, self.copies.source(given)) for given in arguments)
        if key not in self.launches:
            try:
                expected = function(*arguments)
                run = self.compile(function) if is_compiled else function
                launch = self._make(function, run, arguments, expected)
                difference = (self._run(launch, arguments).double() - expected).abs().max()
                if not difference <= TOLERANCE:  # NaN fails too
                    raise RuntimeError(f"its results are {difference.item():.3g} away")
                self.launches[key] = launch
            except Exception as error:  # of compilers, drivers, allocators
                self.launches[key] = None
                said = " ".join(f"{type(error).__name__}: {error}".split())
                print(f"[{function.__name__} is not one launch: {said:.300}]", file=sys.stderr)
        launch = self.launches[key]
        return self._run(launch, arguments) if launch else function(*arguments)

    def _run(self, launch: Launch, arguments: tuple[Any, ...]) -> Tensor:
        """Results of a graph for these arguments."""
        for given, buffer in zip(arguments, launch.written, strict=True):
            if buffer is not None:
                self.buffers.write(buffer, given)
        launch.replay()
        if launch.is_draw:
            return self.turns.read(launch.results)
        return self.copies.hand_out(launch.results, len(launch.results))

    def _make(
        self,
        function: Callable[..., Tensor],
        run: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        expected: Tensor,
    ) -> Launch:
        """Record ``run``, the function or its compiled code, for arguments of this kind."""
        inputs = list(arguments)
        written: list[Tensor | None] = [None] * len(arguments)
        for at, given in enumerate(arguments):
            source = self.copies.source(given)
            if source is not None:
                offset = source.storage_offset() + given.storage_offset()
                inputs[at] = source.as_strided(given.shape, given.stride(), offset)
            elif isinstance(given, Tensor | float):
                written[at] = self.buffers.of_argument((function, at), given)
                inputs[at] = written[at]
        is_draw = expected.dtype == torch.int64
        shape = (TURNS, *expected.shape) if is_draw else expected.shape
        results = self.buffers.get("results", shape, expected.dtype)

        def compute() -> None:
            rows = torch.cat([run(*row_of(inputs, row)) for row in range(len(expected))])
            if is_draw:
                self.turns.write(results, rows)
            else:
                results.copy_(rows)

        try:
            return Launch(written, self.record(compute), results, is_draw)
        finally:
            self.turns.restore()


def kind(given: Any, source: Tensor | None) -> Any:
    """Part of an argument that a graph depends on."""
    if not isinstance(given, Tensor):
        return float if isinstance(given, float) else given
    place = None if source is None else (id(source), given.storage_offset(), given.stride())
    return given.shape, given.dtype, place


def row_of(inputs: list[Any], row: int) -> list[Any]:
    """One row of each tensor of rows, in memory of its own, and the other inputs."""
    return [
        each[row : row + 1].clone() if isinstance(each, Tensor) and each.dim() else each
        for each in inputs
    ]


@cache
def launcher_of(device: torch.device) -> Launcher:
    """The launcher of a CUDA device, which ``model.launch`` then uses."""
    LAUNCHERS[device] = Launcher(device, Recorder(device))
    return LAUNCHERS[device]
