"""Attention on a CPU by torch's fused kernel, for long prompts.

Called by name, the kernel also returns the logarithm of each softmax's divisor. With it, the
attentions of the same queries to two sets of keys can be joined. So the keys before a prompt's
chunk need no mask, and within the chunk the kernel skips the masked half of the scores.
"""

import torch
from torch import Tensor

from model.layers import attend_causally

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, *, scale: float, soft_cap: float | None
) -> Tensor:
    """``model.layers.attend_causally``, without a mask where the last T of S positions attend to
    all before them.

    q ``[B, H, T, D]``, k and v ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``.
    """
    count = q.shape[2]
    size = k.shape[2]
    if count in (1, size) or soft_cap is not None or (window is not None and size > window):
        return attend_causally(q, k, v, window, scale=scale, soft_cap=soft_cap)
    before = size - count
    chunk = FLASH(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
    earlier = FLASH(q, k[:, :, :before], v[:, :, :before], scale=scale)
    out, log_sums = (torch.stack(pair) for pair in zip(chunk, earlier, strict=True))
    shares = log_sums.softmax(0).reshape(out.shape[:-1])
    return (out * shares[..., None]).sum(0).to(q.dtype)
