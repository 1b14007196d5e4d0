"""CUDA graphs: how they are recorded."""

from collections.abc import Callable
from functools import cache, partial

import torch


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


@cache
def recorder_of(device: torch.device) -> Recorder:
    """Return the recorder of a CUDA device."""
    return Recorder(device)
