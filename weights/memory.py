"""How much memory a model needs, from its config alone: known before a byte of it is loaded.

Sizes are decimal, as checkpoints are advertised: 1 GB is 10⁹ bytes, 1 MB is 10⁶.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from model import InputError, ModelConfig, build
from model.decoder import PREFILL_CHUNK
from model.layers import QUERIES, wide_dtype
from model.plan import LayerPlan
from model.quantise import GROUP

LONGEST_DRAFT = 8  # tokens drafted a round at most, where nothing else is said
CGROUP = Path("/sys/fs/cgroup")  # where Linux tells a container of its limits
LIBRARIES = 160 << 20  # bytes: workspaces of cuBLAS, on two streams, of the size that it takes on the largest GPUs
LOGIT_COPIES = 7  # of each logit, in the wide dtype, while it becomes a probability under every filter
ROWS, SMALLEST = 16, 512  # of a static step, and of its cache (``model.fast.gpu``, which loads a compiler)


@dataclass(frozen=True)
class Memory:
    """Bytes: ``weights``, the KV ``cache`` for ``positions`` tokens, the ``workspace`` of the hungriest step.

    ``static``: what a GPU holds besides for captured steps and its libraries.
    """

    weights: int
    cache: int
    workspace: int
    positions: int
    static: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace + self.static

    def describe(self, free: int) -> str:
        """One line: what is needed, part by part, and what is free."""
        parts = {
            "weights": self.weights,
            f"KV cache at {self.positions} tokens": self.cache,
            "workspace": self.workspace,
            "captured steps": self.static,
            "free": free,
        }
        return ", ".join(f"{name}: {in_words(size)}" for name, size in parts.items() if size or name == "free")


def in_words(size: int) -> str:
    """Bytes -> "18.5 GB", or "269 MB" below one GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def estimate(
    config: ModelConfig,
    dtype: torch.dtype,
    positions: int,
    *,
    prompt: int,
    draft: ModelConfig | None = None,
    fast_on: torch.device | None = None,
    longest_draft: int = LONGEST_DRAFT,
    plan: LayerPlan | None = None,
) -> Memory:
    """What it takes to decode up to ``positions`` tokens, of which ``prompt`` are given.

    ``draft`` is the config of a draft model beside the target. A draft that is part of the target is free but for the
    low-bit copies of its ``plan``. ``fast_on`` is the device of a model that ``model.fast`` prepares. A round drafts
    ``longest_draft`` tokens at most, as far as the positions leave room for them.
    """
    models = [config] if draft is None else [config, draft]
    verified = min(longest_draft + 1, max(1, positions - prompt))  # the draft and the token before it
    is_static = fast_on is not None and fast_on.type != "cpu"
    entries = max(SMALLEST, 1 << (positions + ROWS - 1).bit_length()) if is_static else positions
    return Memory(
        weights=sum(weight_bytes(each, dtype) for each in models) + twin_bytes(config, dtype, plan),
        cache=sum(cache_bytes(each, dtype, entries) for each in models),
        workspace=max(workspace_bytes(each, dtype, positions, prompt, verified) for each in models),
        positions=positions,
        static=LIBRARIES + sum(static_bytes(each, dtype, entries) for each in models) if is_static else 0,
    )


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Every parameter."""
    return parameter_count(config) * dtype.itemsize


def twin_bytes(config: ModelConfig, dtype: torch.dtype, plan: LayerPlan | None) -> int:
    """The codes, scales and zeros of a plan's low-bit twins; where there are no kernels, their rounded weights."""
    if plan is None:
        return 0
    heads = (config.num_heads + config.num_kv_heads) * 2 * config.head_dim
    sizes = {
        "attention": config.hidden_size * heads,
        "mlp": config.hidden_size * 3 * config.intermediate_size,
        "head": config.hidden_size * config.vocab_size,
    }
    bits = [*(("attention", each) for each in plan.attention), *(("mlp", each) for each in plan.mlp)]
    cost = {4: 0.5 + 4 / GROUP, 8: 1 + 4 / config.hidden_size}
    if dtype == torch.float64:
        cost = dict.fromkeys(cost, float(dtype.itemsize))
    return sum(int(sizes[part] * cost[each]) for part, each in [*bits, ("head", plan.head)] if each in cost)


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, a tied head counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def cache_bytes(config: ModelConfig, dtype: torch.dtype, positions: int) -> int:
    """A key and a value for each layer, key head and position."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions * dtype.itemsize


def workspace_bytes(config: ModelConfig, dtype: torch.dtype, positions: int, prompt: int, verified: int) -> int:
    """The temporary tensors of the hungriest step: a prompt's chunk, ``verified`` tokens, or their sampling."""
    chunk = min(PREFILL_CHUNK, prompt)
    return max(
        layer_bytes(config, dtype, chunk, prompt - prompt % chunk),  # the last chunk that is a whole one
        layer_bytes(config, dtype, prompt % chunk, prompt),
        layer_bytes(config, dtype, verified, positions),
        verified * config.vocab_size * LOGIT_COPIES * wide_dtype(dtype).itemsize,
    )


def static_bytes(config: ModelConfig, dtype: torch.dtype, positions: int) -> int:
    """What captured steps hold on a GPU: logits in a buffer and their pool, soft-capped there; attention's scores."""
    logits = 4 * ROWS * config.vocab_size * dtype.itemsize
    return logits + 3 * ROWS * config.num_heads * positions * wide_dtype(dtype).itemsize


def layer_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int, positions: int) -> int:
    """The tensors that live at once in the larger half of a layer (see ``model.layers``), for ``tokens`` new ones."""
    size, rows = dtype.itemsize, min(tokens, QUERIES)
    seen = [positions if window is None else min(positions, window - 1 + rows) for window in set(config.windows)]
    masks = rows * config.num_heads // config.num_kv_heads * sum(seen)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    scores = 0 if config.attention_soft_cap is None else (2 * rows * config.num_heads + keys) * max(seen)
    streams = 2 * config.hidden_size + 2 * config.head_dim  # the layer's input, the sublayer's; cos and sin
    attention = max(tokens * (4 * queries + 2 * keys), tokens * 2 * queries + scores)  # while rotated; while attending
    mlp = tokens * (config.hidden_size + 3 * config.intermediate_size)
    return size * (masks + tokens * streams + max(attention, mlp))


def held_bytes(model: nn.Module) -> int:
    """Bytes of all parameters that a model really holds."""
    return sum(parameter.nbytes for parameter in model.parameters())


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch had allocated at once on the device for ``work``, beyond what it held before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would report its start and stop on standard error
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken on the device now, in bytes."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: what is installed bounds what is free
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(free, container_room(CGROUP))


def container_room(cgroup: Path) -> int:
    """Bytes left to this container by its control group (version 2); a huge number where it has no limit."""
    try:
        held = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(held["inactive_file"])  # cached files give way
        return max(0, int((cgroup / "memory.max").read_text()) - used)
    except (OSError, KeyError, ValueError):  # no control group, or "max"
        return sys.maxsize


def check_fits(memory: Memory, device: torch.device, sharers: int = 1) -> str:
    """The line that says what is needed and free. Raises InputError with it when that does not fit.

    ``sharers``: processes that will take as much of the device each.
    """
    free = free_bytes(device) // sharers
    line = memory.describe(free)
    if memory.total > free:
        raise InputError(
            f"the model does not fit on {device}: {line}; give fewer --max-new-tokens, a narrower --dtype or a "
            "smaller --model"
        )
    return line
