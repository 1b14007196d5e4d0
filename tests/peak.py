"""Peak memory of some work, as allocated by torch."""

import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Peak of the bytes that torch allocates on the device during ``work``, beyond those allocated
    before.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # otherwise the profiler prints its start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    events = [
        event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters of a loaded model."""
    return sum(parameter.nbytes for parameter in model.parameters())
