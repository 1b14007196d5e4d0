"""Quantisation of weights to four or eight bits.

A draft need not be right, only likely to be right, and most of a step's time goes into reading the
weights. So the draft reads the same weights, rounded: a matrix in four bits takes less than a third
of its size in bf16.

In four bits rounding is affine. A group of 32 neighbouring weights of a row shares a ``scale`` and
a ``zero``: weight ≈ code · scale + zero, with codes of 0 to 15. Groups are small, so that a single
large weight does not coarsen a whole row. In eight bits a row is one group, zero is 0, and codes
are -127 to 127.

In four bits errors are weighted with the mean square of the input that the weight is multiplied by
(the importance matrix of llama.cpp). Scale and zero of a group are those with the least weighted
error of a few candidates: ranges with more or less cut off at both ends, each then fitted to its
codes by least squares.

Knows nothing of plans and models.
"""

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# ``model.fast`` compiles its rounding with these four
GROUP = 32  # weights that share scale and zero, in four bits
LEVELS = 15  # the largest code, in four bits
CUTS = 2  # candidates: a group's range with 0 or 1 steps cut off at each end
FITS = 2  # least-squares fits per candidate
CHUNK = 1 << 22  # weights rounded at a time to four bits, in float32


class Quantised(NamedTuple):
    """Rounded weights: ``codes`` ``[out, in]``, ``scale`` and ``zero`` ``[out, groups]``.

    Codes are uint8, scale and zero bfloat16; in eight bits codes are int8, scale and zero float32.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of these codes, ``[out, in]``."""
        scale = self.scale.float()
        zero = self.zero.float()
        if scale.shape[1] > 1:
            scale, zero = (
                each.repeat_interleave(GROUP, 1)[:, : self.codes.shape[1]] for each in (scale, zero)
            )
        return torch.addcmul(zero, self.codes, scale).to(dtype)


def weighted_sum(values: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum over the last dimension, from the first to the last number.

    The order is part of the definition: compiled rounding (``model.fast``) finds the same bits.
    """
    return reduce(torch.add, (values * shares).unbind(-1))


def codes_of(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return codes 0 to 15 of weights ``[..., 32]``, as floats; scale and zero are ``[...]``."""
    inverse = torch.where(scale > 0, 1 / scale, 0)  # if all weights are equal, every code is 0
    return ((weight - zero[..., None]) * inverse[..., None] + 0.5).floor_().clamp_(0, LEVELS)


def round_groups(weight: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes ``[rows, groups, 32]`` of weights of this shape, and scale and zero
    ``[rows, groups]``, of the least weighted error; ``shares`` ``[groups, 32]`` sum to 1 per group.
    """
    mean = weighted_sum(weight, shares)
    low, high = torch.aminmax(weight, dim=-1)
    found = []
    for cut in range(CUTS):
        scale = (high - low) * ((1 - 2 * cut / LEVELS) / LEVELS)
        zero = (low + high - LEVELS * scale) / 2
        for _ in range(FITS + 1):
            # Rounded first, so that the codes compensate for it.
            scale = scale.bfloat16().float()
            zero = zero.bfloat16().float()
            codes = codes_of(weight, scale, zero)
            error = (codes * scale[..., None] + zero[..., None] - weight).square_()
            found.append(torch.stack((weighted_sum(error, shares), scale, zero)))
            # A line through the points (code, weight): scale is its slope, zero its height at code
            # 0.
            mean_code = weighted_sum(codes, shares)
            spread = weighted_sum(codes.square(), shares) - mean_code.square()
            slope = (weighted_sum(codes * weight, shares) - mean_code * mean) / spread
            scale = torch.where(spread > 0, slope, scale)
            zero = mean - scale * mean_code
    errors, scales, zeros = torch.stack(found, 1)  # each [candidates · fits, rows, groups]
    best = errors.argmin(0, keepdim=True)
    scale = scales.gather(0, best)[0]
    zero = zeros.gather(0, best)[0]
    return codes_of(weight, scale, zero).to(torch.uint8), scale, zero


def shares_of(importance: Tensor | None, columns: int, device: torch.device) -> Tensor:
    """Return the share of each column in the error of its group of 32, ``[groups, 32]`` float32, by
    the ``importance`` ``[columns]``: all alike without it. Columns beyond the last have none.
    """
    if importance is None:
        importance = torch.ones(1)
    importance = importance.to(device).float().expand(columns)  # raises for another length
    # With zero importance scale and zero would be undefined. A common factor changes nothing.
    importance = importance / importance.mean().clamp(min=1e-30) + 1e-4
    importance = F.pad(importance, (0, -columns % GROUP)).view(-1, GROUP)
    return importance / importance.sum(1, keepdim=True)


@torch.no_grad()
def quantise(weight: Tensor, bits: int, importance: Tensor | None = None) -> Quantised:
    """Return the rounded ``[out, in]`` weights, in codes of 4 or 8 bits.

    ``importance`` ``[in]`` is the mean square of each input, 1 by default; eight bits do without.
    In four bits the weighted squared error of a group is at most that of half an even step per
    weight, from its least to its largest weight, plus the rounding of scale and zero to bfloat16. A
    last group of fewer than 32 columns has its own scale. Raises ValueError for other bits.
    """
    columns = weight.shape[1]
    if bits == 8:
        scale = weight.abs().amax(1, keepdim=True).float() / 127
        # in place, since the whole matrix is in float32 here
        codes = (weight / scale.where(scale > 0, 1)).round_().clamp_(-127, 127)
        return Quantised(codes.to(torch.int8), scale, torch.zeros_like(scale))
    if bits != 4:
        raise ValueError(f"weights are rounded to 4 or 8 bits, not to {bits}")
    shares = shares_of(importance, columns, weight.device)
    found = []
    for part in weight.split(max(1, CHUNK // columns)):
        part = F.pad(part.float(), (0, -columns % GROUP), mode="replicate")
        found.append(round_groups(part.unflatten(1, (-1, GROUP)), shares))
    codes, scale, zero = map(torch.cat, zip(*found, strict=True))
    codes = codes.flatten(1)[:, :columns].contiguous()
    return Quantised(codes, scale.bfloat16(), zero.bfloat16())


def round_inputs(x: Tensor) -> Tensor:
    """Return inputs ``[..., in]`` of a low-bit product in int8, with one scale per 32 of them.

    Processors multiply bytes by bytes. One scale per row would halve the acceptance rate.
    """
    columns = x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0).round_()
    return (codes * scale).flatten(-2)[..., :columns].to(x.dtype)
