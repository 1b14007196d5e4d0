"""The attention of a static step: keys are shared out in parts of one size, at fixed positions, whatever their number.

A GPU's kernels give the keys of a head to one multiprocessor, and a step of few rows has few heads: so parts of the
keys take the place of a batch. Each is computed alike wherever the text ends, and the parts are joined two by two in
the order of their positions. So a longer span only adds empty parts, which weigh nothing: no bit depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.fast.flash import FLASH
from model.layers import visible, wide_dtype

PART = 512  # keys: joining parts takes about as long as reading so many more
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


@dataclass(frozen=True)
class SharedKeys:
    """What the rows of a static step see of a span of keys: ``bias`` ``[parts, 1, G · rows, PART]``, for all layers.

    It is added to the scores: 0, or so much less that nothing is left. Not -inf: of a part that is all hidden it would
    make NaN, and a part's share is 0 times what comes of it.
    """

    bias: Tensor

    @staticmethod
    def of(positions: Tensor, span: int, window: int | None, groups: int, dtype: torch.dtype) -> SharedKeys:
        """For rows at ``positions`` ``[rows]``, which see as ``model.layers.visible`` says."""
        keys = torch.arange(span, device=positions.device)
        hidden = ~visible(positions, keys, window, groups).flatten(0, 1)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        bias.masked_fill_(hidden, torch.finfo(dtype).min / 4)
        return SharedKeys(bias.unflatten(1, (-1, PART)).transpose(0, 1).unsqueeze(1).contiguous())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, soft_cap: float | None) -> Tensor:
        """q ``[1, H, rows, D]``, k and v ``[1, K, span, D]`` -> ``[1, H, rows, D]``, as ``model.layers.attend``."""
        parts = len(self.bias)
        rows = q.reshape(1, k.shape[1], -1, q.shape[3]).expand(parts, -1, -1, -1)
        k, v = (entries[0].unflatten(1, (parts, PART)).transpose(0, 1) for entries in (k, v))
        if soft_cap is not None:
            sums, weights = attend_capped(rows, k, v, self.bias, scale=scale, soft_cap=soft_cap)
            return (joined(sums.to(weights.dtype)) / joined(weights)).to(q.dtype).reshape(q.shape)
        out, log_sums = attend_fused(rows, k, v, self.bias, scale=scale)
        if parts == 1:
            return out.reshape(q.shape)
        shares = (log_sums - log_sums.amax(0)).exp().unsqueeze(-1)
        return (joined(out * shares) / joined(shares)).to(q.dtype).reshape(q.shape)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Each part's attention ``[parts, K, rows, D]``, and the logarithm of what its softmax was divided by."""
    if q.device.type == "cpu":
        return FLASH(q, k, v, attn_mask=bias, scale=scale)
    out, log_sums, *_ = EFFICIENT(q, k, v, bias.expand(-1, k.shape[1], -1, -1), True, scale=scale)
    return out, log_sums[..., : q.shape[2]]  # the kernel pads them


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """Each part's sum of values, weighted by the exponentials of soft-capped scores, and the sum of these weights.

    A softmax subtracts the largest score, since an exponential may overflow; of Gemma-2's scores, at most 50, none can.
    """
    scores = multiplied(q, k.transpose(2, 3)).mul_(scale / soft_cap).tanh_()
    weights = torch.add(bias, scores, alpha=soft_cap).exp_()
    return multiplied(weights, v), weights.sum(-1, keepdim=True, dtype=wide_dtype(q.dtype))


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, part by part: torch would copy keys of several heads and parts to multiply them at once."""
    products = [torch.bmm(*pair) for pair in zip(a, b, strict=True)]
    return products[0][None] if len(products) == 1 else torch.stack(products)


def joined(parts: Tensor) -> Tensor:
    """The sum over the first dimension, neighbours first: zeros after the last part change no bit of it."""
    while len(parts) > 1:
        pairs = parts[: len(parts) // 2 * 2].unflatten(0, (-1, 2))
        rest = parts[len(parts) // 2 * 2 :]
        parts = torch.cat((pairs[:, 0] + pairs[:, 1], rest)) if len(rest) else pairs[:, 0] + pairs[:, 1]
    return parts[0]
