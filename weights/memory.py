"""Memory for decoding, estimated from the model's config: weights, low-bit copies, KV cache and workspace.

Each is a product that can be checked by hand. Sizes in messages are decimal: 1 GB is 10⁹ bytes.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.filesize import decimal

from model import InputError, ModelConfig, build
from model.decoder import PREFILL_CHUNK
from model.layers import wide_dtype
from model.plan import LayerPlan

LONGEST_DRAFT = 8  # tokens per round, by default
CGROUP = Path("/sys/fs/cgroup")  # the control group of a Linux container
LOGIT_COPIES = 7  # of each logit, in the wide dtype, while it becomes a probability under every filter
GPU_BUFFERS = 256 << 20  # bytes: workspaces of cuBLAS, buffers of captured steps
ROWS, SMALLEST = 16, 512  # of a static step, and of its cache (``model.fast.gpu``, which loads a compiler)


@dataclass(frozen=True)
class Memory:
    """Bytes: weights, KV cache for ``positions`` tokens, workspace of a step, low-bit ``twins`` of the weights."""

    weights: int
    cache: int
    workspace: int
    positions: int
    twins: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.twins + self.cache + self.workspace


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
    """Memory for decoding up to ``positions`` tokens, of which the first ``prompt`` are the prompt.

    ``draft`` is the config of a separate draft model, ``plan`` the layer plan of a draft by the target itself,
    ``longest_draft`` the tokens per draft. ``fast_on`` is the device of a model that ``model.fast`` prepares.
    """
    models = [config] if draft is None else [config, draft]
    on_gpu = fast_on is not None and fast_on.type != "cpu"
    entries = max(SMALLEST, 1 << (positions + ROWS - 1).bit_length()) if on_gpu else positions
    logits = min(longest_draft + 1, max(1, positions - prompt)) * config.vocab_size
    tokens = min(prompt, PREFILL_CHUNK)
    # Of a layer the MLP takes the most: three tensors of each width at once.
    layers = (3 * tokens * (c.hidden_size + c.intermediate_size) * dtype.itemsize for c in models)
    return Memory(
        weights=sum(parameter_count(c) for c in models) * dtype.itemsize,
        cache=sum(2 * c.num_layers * c.num_kv_heads * c.head_dim for c in models) * entries * dtype.itemsize,
        workspace=max(logits * LOGIT_COPIES * wide_dtype(dtype).itemsize, *layers) + GPU_BUFFERS * on_gpu,
        positions=positions,
        twins=twin_bytes(config, plan) if plan else 0,
    )


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, a tied head counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def twin_bytes(config: ModelConfig, plan: LayerPlan) -> int:
    """Bytes of a plan's low-bit copies. In 4 and 6 bits, 32 weights share a scale and a zero point of 2 bytes each."""
    per_weight = {4: 4 / 8 + 4 / 32, 6: 6 / 8 + 4 / 32, 8: 1.0}
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    mlp, head = 3 * config.hidden_size * config.intermediate_size, config.hidden_size * config.vocab_size
    weights = [(attention, bits) for bits in plan.attention] + [(mlp, bits) for bits in plan.mlp] + [(head, plan.head)]
    return int(sum(count * per_weight.get(bits, 0) for count, bits in weights))


def free_bytes(device: torch.device) -> int:
    """Free memory of the device in bytes; on a CPU, within the limit of the container (control groups, version 2)."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):  # not Linux: installed memory bounds the free
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        fields = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(fields["inactive_file"])  # cached files can go
        free = min(free, max(0, int((CGROUP / "memory.max").read_text()) - used))
    return free


def check_fits(memory: Memory, device: torch.device, sharers: int = 1) -> str:
    """Line of needed and free memory. Raises InputError with that line when the memory is too small.

    ``sharers`` processes on the device each take as much.
    """
    free = free_bytes(device) // sharers
    parts = {
        "weights": memory.weights,
        "low-bit copies": memory.twins,
        f"KV cache at {memory.positions} tokens": memory.cache,
        "workspace": memory.workspace,
        "free": free,
    }
    line = ", ".join(f"{part}: {decimal(size)}" for part, size in parts.items() if size)
    if memory.total > free:
        remedy = "give fewer --max-new-tokens, a narrower --dtype or a smaller --model"
        raise InputError(f"the model does not fit on {device}: {line}; {remedy}")
    return line
