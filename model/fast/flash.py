"""torch's fused attention on the CPU, called by its own name: so it tells how much each sum of exponentials weighs.

Attentions of the same queries to different keys are joined by it. So the keys before a prompt's chunk need no mask, of
the chunk's own square the kernel leaves out what nobody sees, and the keys of a long text are shared out among threads.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def join(out: Tensor, log_sums: Tensor) -> Tensor:
    """Of attentions ``[N, ..., D]`` to N sets of keys the one to all of them: ``[..., D]``.

    ``log_sums`` ``[N, ...]``, wide, are the logarithms of what the softmax of each was divided by.
    """
    parts = out * shares(log_sums).unsqueeze(-1)
    return reduce(torch.add, parts).to(out.dtype)  # one after another: a sum's order would go by the number of rows


def shares(log_sums: Tensor) -> Tensor:
    """``log_sums.softmax(0)``, with the same bits wherever in memory a number stands.

    Vector instructions and scalar ones, which finish a row, differ in the last bits of an exponential: here in those
    of float64, which rounding hides.
    """
    return log_sums.double().softmax(0).to(log_sums.dtype)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """``model.layers.attend`` of the last T of S positions to all that come before them, and themselves.

    q ``[B, H, T, D]``, k and v ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``.
    """
    before = k.shape[2] - q.shape[2]
    own = FLASH(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
    if not before:
        return own[0]
    earlier = FLASH(q, k[:, :, :before], v[:, :, :before], scale=scale)
    # As the kernel leaves them in memory: tokens, then heads.
    out, log_sums = (torch.stack([part.transpose(1, 2) for part in pair]) for pair in zip(own, earlier, strict=True))
    return join(out, log_sums).transpose(1, 2)
