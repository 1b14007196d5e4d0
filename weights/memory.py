"""Memory for decoding, by the config: weights, low-bit copies, KV cache, workspace.

Each is a product that can be checked by hand. Sizes in messages are decimal: 1 GB is 10⁹ bytes.
Knows nothing of checkpoints, and options only by their names, which its messages give.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.filesize import decimal

from model.cache import static_capacity
from model.config import ModelConfig
from model.decoder import PREFILL_CHUNK, Decoder
from model.errors import InputError
from model.layers import QUERIES, wide_dtype
from model.plan import FULL, LayerPlan
from model.quantise import GROUP

CGROUP = Path("/sys/fs/cgroup")  # the control group of a Linux container
# of each logit, in the wide dtype, while it becomes a probability under every filter
LOGIT_COPIES = 4
LOGIT_COPIES_GPU = 7
GPU_BUFFERS = 256 << 20  # bytes: workspaces of cuBLAS, buffers of captured steps
CPU_BUFFERS = 160 << 20  # bytes: the compiled step, its compiler, and libraries loaded when used
# the remedy where a text is written
FEWER_BYTES = (
    "give fewer --max-new-tokens, a shorter --context, a narrower --dtype or a smaller --model"
)


@dataclass(frozen=True)
class Memory:
    """Bytes that decoding takes: weights, KV caches of ``positions`` tokens, the workspace of a
    step, low-bit copies of the weights, and ``buffers`` that a process needs for any model.
    """

    weights: int
    cache: int
    workspace: int
    positions: int
    low_bit_copies: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.low_bit_copies + self.cache + self.workspace + self.buffers

    def line(self, free: int, optional_copies: int) -> str:
        """Return a line of the parts, their total, and the ``free`` bytes to compare it with.

        ``optional_copies`` come after the total, and are not counted in it.
        """
        sizes = {
            "weights": self.weights,
            "low-bit copies": self.low_bit_copies,
            f"KV cache at {self.positions} tokens": self.cache,
            "workspace": self.workspace + self.buffers,
            "total": self.total,
            "low-bit copies (at most, if they fit)": optional_copies,
            "free": free,
        }
        return ", ".join(f"{part}: {decimal(size)}" for part, size in sizes.items() if size)


def estimate(
    config: ModelConfig,
    dtype: torch.dtype,
    positions: int,
    device: torch.device,
    *,
    prompt: int,
    longest_draft: int,
    draft_config: ModelConfig | None = None,
    plan: LayerPlan | None = None,
) -> Memory:
    """Return the memory for decoding a text of up to ``positions`` tokens, a prompt of
    ``prompt`` tokens among them.

    A draft has up to ``longest_draft`` tokens. ``draft_config`` is that of a separate draft model,
    ``plan`` the layer plan of a draft by the target itself.
    """
    models = [config, draft_config] if draft_config else [config]
    on_gpu = device.type != "cpu"
    entries = static_capacity(positions) if on_gpu else positions
    keys_and_values = sum(
        2 * each.num_layers * each.num_kv_heads * each.head_dim for each in models
    )
    # Of a layer the MLP takes the most: three tensors of each width at once.
    widest = max(each.hidden_size + each.intermediate_size for each in models)
    layer = 3 * min(prompt, PREFILL_CHUNK) * widest * dtype.itemsize
    # With a soft cap no fused kernel computes the attention: three tensors of scores at once.
    capped_heads = max(each.num_heads if each.attention_soft_cap else 0 for each in models)
    scores = 3 * min(prompt, QUERIES) * capped_heads * prompt * wide_dtype(dtype).itemsize
    rows = min(longest_draft + 1, max(1, positions - prompt))
    copies = LOGIT_COPIES_GPU if on_gpu else LOGIT_COPIES
    logits = copies * rows * config.vocab_size * wide_dtype(dtype).itemsize
    return Memory(
        weights=sum(map(parameter_count, models)) * dtype.itemsize,
        cache=keys_and_values * entries * dtype.itemsize,
        workspace=max(layer, scores, logits),
        positions=positions,
        low_bit_copies=low_bit_bytes(config, plan) if plan else 0,
        buffers=GPU_BUFFERS if on_gpu else CPU_BUFFERS,
    )


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters of the model, a tied head counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def bytes_read(config: ModelConfig, plan: LayerPlan, itemsize: int, positions: int = 0) -> int:
    """Return the bytes that a step under the plan reads: weights, and the keys and values of those
    ``positions`` that the plan sees. Numbers that are not in low bits take ``itemsize`` bytes.
    """
    # In 4 bits, the weights of a group share a scale and a zero point of 2 bytes each.
    per_weight = {FULL: itemsize, 4: 4 / 8 + 4 / GROUP, 8: 1.0, 0: 0}
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    entries = 2 * config.num_kv_heads * config.head_dim * min(positions, plan.window or positions)
    return int(
        config.hidden_size * config.vocab_size * per_weight[plan.head]
        + entries * itemsize * len(plan.attention_layers)
        + attention * sum(per_weight[bits] for bits in plan.attention)
        + mlp * sum(per_weight[bits] for bits in plan.mlp)
    )


def low_bit_bytes(config: ModelConfig, plan: LayerPlan) -> int:
    """Return the bytes of the low-bit copies of a plan."""
    return bytes_read(config, plan, itemsize=0)  # what is not in low bits takes no bytes


def has_memory_for(model: Decoder, plans: Iterable[LayerPlan]) -> bool:
    """Return whether the low-bit copies of these plans, if there are any, fit into free memory."""
    return sum(low_bit_bytes(model.config, plan) for plan in plans) <= free_bytes(model.device)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device in bytes; on a CPU, within the limit of the container
    (control groups, version 2).
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        fields = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # cached files can go
        used = int((CGROUP / "memory.current").read_text()) - int(fields["inactive_file"])
        free = min(free, max(0, int((CGROUP / "memory.max").read_text()) - used))
    return free


def check_fits(
    memory: Memory, device: torch.device, optional_copies: int = 0, remedy: str = FEWER_BYTES
) -> str:
    """Return a line of needed and free memory. Raises InputError with it and a ``remedy`` where
    that is too small.

    ``optional_copies``: bytes of low-bit copies that are made only if they fit.
    """
    free = free_bytes(device)
    line = memory.line(free, optional_copies)
    if memory.total > free:
        raise InputError(f"the model does not fit on {device}: {line}; {remedy}")
    return line
