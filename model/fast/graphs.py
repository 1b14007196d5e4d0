"""CUDA graphs: how they are recorded, and functions of rows, such as sampling, as graphs.

The kernels of sampling are small and many: launching them one by one takes longer than a step of a
small model. ``Launcher`` compiles such a function and replays it as one launch. The readable
functions stay the only version; they call ``model.launch``.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from model.device import LAUNCHERS

# versions of a function that torch compiles, over all models, capacities and plans
RECOMPILES = 256
TOLERANCE = 0.05  # of probabilities: rounding may move a token across the limit of a filter

# Records a computation on tensors that stay where they are, and returns its replay.
Record = Callable[[Callable[[], object]], Callable[[], None]]
compile_function = cache(
    partial(torch.compile, fullgraph=True, dynamic=False, recompile_limit=RECOMPILES)
)


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


class FunctionGraph:
    """Graph of a function of rows, for one number of rows and one kind of its other arguments.

    A call copies its tensors and numbers into the buffers that the graph reads, replays the graph,
    and copies its results out. Every row is computed by itself, by the same kernels on memory of
    the same alignment. So its bits do not depend on the number of rows, and plain and drafted texts
    have the same distributions.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        expected: Tensor,
        record: Record,
    ) -> None:
        """``arguments``, and the results ``expected`` of them, give buffers their shapes."""
        self.function = function
        self.inputs = list(arguments)
        for at, given in enumerate(arguments):
            if isinstance(given, Tensor):
                self.inputs[at] = buffer(at, given, expected.device)
            elif isinstance(given, float):
                self.inputs[at] = torch.zeros((), dtype=torch.float64, device=expected.device)
        self.numbers: dict[int, float] = {}  # those that the buffers hold
        self.results = buffer("results", expected, expected.device)
        self.replay = record(self.compute)

    def compute(self) -> None:
        """Return the results of the inputs in the buffers."""
        rows = range(len(self.results))
        results = [self.function(*row_of(self.inputs, row)) for row in rows]
        self.results.copy_(torch.cat(results))

    def __call__(self, *arguments: Any) -> Tensor:
        for at, given in enumerate(arguments):
            if isinstance(given, Tensor):
                self.inputs[at].copy_(given, non_blocking=True)
            elif isinstance(given, float) and given != self.numbers.get(at):
                self.inputs[at].fill_(given)
                self.numbers[at] = given
        self.replay()
        return self.results.clone()


class Launcher:
    """Launcher of functions of rows on one device, each a graph per number of rows.

    The first argument is a tensor of rows. Tensors are given by row, floats are numbers that may
    change between replays, and everything else is a constant of the graph. A function that cannot
    be compiled or recorded, or then computes something else, is called directly.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        # by function and kinds of arguments; None: called directly
        self.graphs: dict[tuple[Any, ...], FunctionGraph | None] = {}

    @torch.inference_mode()
    def __call__(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        key = function, *map(kind, arguments)
        if key not in self.graphs:
            self.graphs[key] = self._checked_graph(function, arguments)
        graph = self.graphs[key]
        return function(*arguments) if graph is None else graph(*arguments)

    def _checked_graph(
        self, function: Callable[..., Tensor], arguments: tuple[Any, ...]
    ) -> FunctionGraph | None:
        """Return a graph for arguments of this kind, whose results have been compared with the
        function's; None, with a line on stderr, where there is no such graph.
        """
        try:
            expected = function(*arguments)
            graph = FunctionGraph(compile_function(function), arguments, expected, self.record)
            difference = (graph(*arguments).double() - expected).abs().max()
            if not difference <= TOLERANCE:  # NaN fails too
                raise RuntimeError(f"its results are {difference.item():.3g} away")
        except Exception as error:  # of compilers, drivers, allocators
            said = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"[{function.__name__} runs without a CUDA graph: {said:.300}]", file=sys.stderr)
            return None
        return graph


def kind(given: Any) -> Any:
    """Return the part of an argument that a graph depends on."""
    if isinstance(given, Tensor):
        return given.shape, given.dtype
    return float if isinstance(given, float) else given


def row_of(inputs: list[Any], row: int) -> list[Any]:
    """Return one row of each tensor of rows, in memory of its own, and the other inputs."""
    return [
        each[row : row + 1].clone() if isinstance(each, Tensor) and each.dim() else each
        for each in inputs
    ]


def buffer(name: object, like: Tensor, device: torch.device) -> Tensor:
    """Return the buffer of the shape and dtype of a tensor of rows. All graphs of a device share
    it, since each call writes it before it reads it.
    """
    rows = 1 << (len(like) - 1).bit_length()  # sizes double, so that few buffers are made
    return shared_zeros(name, (rows, *like.shape[1:]), like.dtype, device)[: len(like)]


@cache
def shared_zeros(
    name: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of zeros, the same for the same arguments."""
    return torch.zeros(shape, dtype=dtype, device=device)


@cache
def recorder_of(device: torch.device) -> Recorder:
    """Return the recorder of a CUDA device. From then on ``launch`` launches functions there."""
    recorder = Recorder(device)
    LAUNCHERS[device] = Launcher(recorder)
    return recorder
