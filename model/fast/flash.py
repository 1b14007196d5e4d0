"""torch's fused attention on a CPU, called by its own name: it also returns the logarithm of each softmax's divisor.

With it, attentions of the same queries to different keys can be joined. So the keys before a prompt's chunk need no
mask, and of the chunk's own square the kernel leaves out the half that nobody sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.layers import Sight, attend

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_causally(q: Tensor, k: Tensor, v: Tensor, sees: Sight, *, scale: float, soft_cap: float | None) -> Tensor:
    """``model.layers.attend``, without a mask where the last T of S positions see all that come before them.

    q ``[B, H, T, D]``, k and v ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``.
    """
    before = k.shape[2] - q.shape[2]
    if not (sees.whole and before and q.shape[2] > 1 and soft_cap is None):
        return attend(q, k, v, sees, scale=scale, soft_cap=soft_cap)
    own = FLASH(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
    earlier = FLASH(q, k[:, :, :before], v[:, :, :before], scale=scale)
    out, log_sums = (torch.stack(pair) for pair in zip(own, earlier, strict=True))
    shares = log_sums.softmax(0).reshape(out.shape[:-1])
    return (out * shares[..., None]).sum(0).to(q.dtype)
