"""Quantisation of weights to four or eight bits.

A draft need not be right, only likely to be right, and most of a step's time goes into reading the
weights. So the draft reads the same weights, rounded: a matrix in four bits takes less than a third
of its size in bf16.

In four bits rounding is affine. A group of 32 neighbouring weights of a row shares a ``scale`` and
a ``zero``: weight ≈ code · scale + zero, with codes of 0 to 15. Groups are small, so that a single
large weight does not coarsen a whole row. In eight bits a row is one group, zero is 0, and codes
are -127 to 127.

Errors are weighted with the mean square of the input that the weight is multiplied by (the
importance matrix of llama.cpp). Scale and zero of a group are those with the least weighted error
of a few candidates: ranges with more or less cut off at both ends, each then fitted to its codes by
least squares.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # weights that share scale and zero, in four bits
CUTS = (0.0, 1.0)  # steps cut off at each end of a group's range, per candidate
FITS = 2  # least-squares fits per candidate
CHUNK = 1 << 22  # weights rounded at a time, in float32

# Signature of ``evaluate_grid``.
Evaluate = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Quantised:
    """Rounded weights: ``codes`` ``[out, in]``, ``scale`` and ``zero`` ``[out, groups]``.

    Codes are uint8, scale and zero bfloat16; in eight bits codes are int8, scale and zero float32.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Weights of these codes, ``[out, in]``."""
        scale = self.scale.float()
        zero = self.zero.float()
        if self.bits != 8:
            scale, zero = (
                each.repeat_interleave(GROUP, 1)[:, : self.codes.shape[1]] for each in (scale, zero)
            )
        return torch.addcmul(zero, self.codes, scale).to(dtype)


def evaluate_grid(
    weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """Codes of a grid, and means over each group: of the squared error, the codes, their squares,
    code times weight.

    Codes, 0 to ``levels``, have the shape of ``weight`` ``[rows, groups, 32]``; ``scale`` and
    ``zero`` are ``[rows, groups]``, the means ``[4, rows, groups]``. ``importance`` ``[groups,
    32]`` sums to 1 per group.
    """
    inverse = torch.where(scale > 0, 1 / scale, 0)  # if all weights are equal, every code is 0
    codes = ((weight - zero[..., None]) * inverse[..., None] + 0.5).floor_().clamp_(0, levels)
    error = (codes * scale[..., None] + zero[..., None] - weight).square_()
    means = [(each * importance).sum(-1) for each in (error, codes, codes.square(), codes * weight)]
    return codes.to(torch.uint8), torch.stack(means)


def round_groups(
    weight: Tensor, importance: Tensor, bits: int, evaluate: Evaluate
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of the least weighted error; shapes as in ``evaluate_grid``."""
    levels = 2**bits - 1
    mean = (weight * importance).sum(-1)
    low, high = torch.aminmax(weight, dim=-1)
    found = []
    for cut in CUTS:
        scale = (high - low) * ((1 - 2 * cut / levels) / levels)
        zero = (low + high - levels * scale) / 2
        for _ in range(FITS + 1):
            # Rounded first, so that the codes compensate for it.
            scale = scale.bfloat16().float()
            zero = zero.bfloat16().float()
            error, mean_code, mean_square, mean_product = evaluate(
                weight, importance, scale, zero, levels
            )[1]
            found.append(torch.stack((error, scale, zero)))
            # A line through the points (code, weight): scale is its slope, zero its height at code
            # 0.
            spread = mean_square - mean_code.square()
            scale = torch.where(spread > 0, (mean_product - mean_code * mean) / spread, scale)
            zero = mean - scale * mean_code
    errors, scales, zeros = torch.stack(found, 1)
    best = errors.argmin(0, keepdim=True)
    scale = scales.gather(0, best)[0]
    zero = zeros.gather(0, best)[0]
    return evaluate(weight, importance, scale, zero, levels)[0], scale, zero


@torch.no_grad()
def quantise(
    weight: Tensor,
    bits: int,
    importance: Tensor | None = None,
    evaluate: Evaluate = evaluate_grid,
) -> Quantised:
    """Rounded ``[out, in]`` weights, in codes of 4 or 8 bits.

    ``importance`` ``[in]`` is the mean square of each input, 1 by default. The weighted squared
    error of a group is at most that of half an even step per weight, from its least to its largest
    weight, plus the rounding of scale and zero to bfloat16. A last group of fewer than 32 columns
    has its own scale. ``evaluate`` may be a faster function of the same values.
    """
    columns = weight.shape[1]
    if bits == 8:
        scale = torch.linalg.vector_norm(weight.float(), math.inf, 1, keepdim=True) / 127
        codes = torch.where(scale > 0, weight / scale, 0).round().clamp(-127, 127)
        return Quantised(codes.to(torch.int8), scale, torch.zeros_like(scale), bits)
    padding = -columns % GROUP
    importance = (
        torch.ones(columns, device=weight.device)
        if importance is None
        else importance.to(weight.device)
    )
    # With zero importance scale and zero would be undefined. A common factor changes nothing.
    importance = importance.float() / importance.mean().clamp(min=1e-30) + 1e-4
    importance = F.pad(importance, (0, padding)).view(-1, GROUP)
    importance = importance / importance.sum(1, keepdim=True)
    found = []
    for part in weight.split(max(1, CHUNK // columns)):
        part = F.pad(part.float(), (0, padding), mode="replicate").unflatten(1, (-1, GROUP))
        found.append(round_groups(part.contiguous(), importance, bits, evaluate))
    codes, scale, zero = map(torch.cat, zip(*found, strict=True))
    return Quantised(
        codes.flatten(1)[:, :columns].contiguous(), scale.bfloat16(), zero.bfloat16(), bits
    )


def round_inputs(x: Tensor) -> Tensor:
    """Inputs ``[..., in]`` of a low-bit product, rounded to int8 with one scale per 32 of them.

    Processors multiply bytes by bytes. One scale per row would halve the acceptance rate.
    """
    columns = x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0).round_()
    return (codes * scale).flatten(-2)[..., :columns].to(x.dtype)
