"""Peak memory: of some work, as allocated by torch, and of loading a checkpoint.

``python -m tests.peak FOLDER DTYPE OTHER`` prints the bytes that its process takes while it loads
FOLDER, and those of the weights. OTHER is loaded first, to warm up allocators and late imports.
"""

import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from weights.load import DTYPES, load_model


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Peak of the bytes that torch allocates on the device during ``work``, beyond those allocated
    before; on a CPU plus the peak of those that NumPy and Python allocate.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # otherwise the profiler prints its start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    work()  # once before, for what stays: imports and compiled functions
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        tracemalloc.start()
        work()
        _, peak_outside = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    events = [
        event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + peak_outside


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters of a loaded model."""
    return sum(parameter.nbytes for parameter in model.parameters())


def of_process(field: str) -> int:
    """A field of this process's status on Linux, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    folder, dtype, other = sys.argv[1:]
    load_model(Path(other), DTYPES[dtype])
    before = of_process("VmRSS")
    model = load_model(Path(folder), DTYPES[dtype])
    print(of_process("VmHWM") - before, held_bytes(model))
