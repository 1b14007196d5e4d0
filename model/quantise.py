"""Weights rounded to four, six or eight bits.

A draft need not be right, only likely to be right, and decoding costs what reading the weights costs. So the draft
reads the same weights, rounded: a matrix in four bits takes less than a third of its size in bf16.

In four and six bits rounding is affine: 32 neighbouring weights of a row, a group, share a ``scale`` and a ``zero``,
and weight ≈ code · scale + zero, with codes of 0 to 15 for four bits. A group of 32 keeps a single large weight from
coarsening a whole row. In eight bits a row is one group and zero is 0: codes are -127 to 127.

An error counts by what it does to the product: it is weighted with the mean square of the input that the weight is
multiplied by (the importance matrix of llama.cpp). Scale and zero of a group are those of the least weighted error
among a few: ranges with more or less cut off at both ends, each fitted to its own codes by least squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32  # weights that share scale and zero, in four and six bits
CUTS = (0.0, 1.0)  # steps cut off at each end of a group's range, to begin with
FITS = 2  # least-squares fits of each
CHUNK = 1 << 16  # weights that are rounded at a time: their intermediate results fit into a processor's cache


@dataclass(frozen=True)
class Quantised:
    """``codes`` ``[out, in]`` uint8, ``scale`` and ``zero`` ``[out, groups]`` bfloat16; in eight bits int8, float32."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    @property
    def group(self) -> int:
        """Columns that share scale and zero."""
        return self.codes.shape[1] if self.bits == 8 else GROUP

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights that the codes stand for, ``[out, in]``."""
        columns = self.codes.shape[1]
        codes = self.codes if columns % self.group == 0 else F.pad(self.codes, (0, -columns % self.group))
        codes = codes.unflatten(1, (-1, self.group))
        weights = torch.addcmul(self.zero.float()[..., None], codes, self.scale.float()[..., None])
        return weights.flatten(1)[:, :columns].to(dtype)


def rounded(product: nn.Linear | nn.Embedding, bits: int) -> Quantised:
    """The weights of a linear layer or an embedding in few bits, by the ``importance`` of its inputs if it has one."""
    return quantise(product.weight.detach(), bits, getattr(product, "importance", None))


@torch.no_grad()
def quantise(weight: Tensor, bits: int, importance: Tensor | None = None) -> Quantised:
    """Round ``[out, in]`` weights to codes of 4, 6 or 8 bits.

    ``importance`` ``[in]``: the mean square of each input, 1 by default. Its weighted squared error is at most that of
    rounding to the nearest of evenly spaced values between a group's least and largest weight. A last group of fewer
    than 32 columns has a scale of its own.
    """
    out, columns = weight.shape
    if bits == 8:
        scale = torch.linalg.vector_norm(weight.float(), math.inf, 1, keepdim=True) / 127
        codes = torch.where(scale > 0, weight / scale, 0).round().clamp(-127, 127)
        return Quantised(codes.to(torch.int8), scale, torch.zeros_like(scale), bits)
    padding, groups = -columns % GROUP, -(-columns // GROUP)
    importance = torch.ones(columns, device=weight.device) if importance is None else importance.to(weight.device)
    codes = torch.empty(out, groups * GROUP, dtype=torch.uint8, device=weight.device)
    scale, zero = (torch.empty(out, groups, dtype=torch.bfloat16, device=weight.device) for _ in range(2))
    rows = max(1, CHUNK // (groups * GROUP))
    # A zero importance would leave scale and zero open; the same factor for all changes nothing.
    weights = F.pad(importance.float() / importance.mean().clamp(min=1e-30) + 1e-4, (0, padding))
    weights = weights.view(groups, GROUP).T.repeat(1, rows)
    for first in range(0, out, rows):
        part = F.pad(weight[first : first + rows].float(), (0, padding), mode="replicate")
        part = part.reshape(-1, GROUP).T.contiguous()  # [32, groups of all rows]: what is per group is contiguous
        found = round_groups(part, weights[:, : part.shape[1]], bits)
        codes[first : first + rows] = found[0].T.reshape(-1, groups * GROUP)
        scale[first : first + rows], zero[first : first + rows] = (each.view(-1, groups) for each in found[1:])
    return Quantised(codes[:, :columns].contiguous(), scale, zero, bits)


def round_groups(weight: Tensor, importance: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of groups, the columns of ``[32, n]`` weights; see ``quantise``.

    Codes are ``[32, n]``, scale and zero ``[n]``, all float32; scale and zero are numbers that bfloat16 holds.
    """
    levels = 2**bits - 1
    low, high = torch.aminmax(weight, dim=0)
    total = importance.sum(0)
    best: tuple[Tensor, ...] = ()
    for cut in CUTS:
        scale = (high - low) * ((1 - 2 * cut / levels) / levels)
        zero = (low + high - levels * scale) / 2
        for fit in range(FITS + 1):
            # Rounded before the codes are chosen, so that these make up for it.
            scale, zero = scale.bfloat16().float(), zero.bfloat16().float()
            inverse = torch.where(scale > 0, 1 / scale, 0)  # of weights that are all alike, every code is 0
            codes = ((weight - zero) * inverse).round_().clamp_(0, levels)
            weighted = codes * importance
            error = torch.addcmul(zero, codes, scale).sub_(weight).square_().mul_(importance).sum(0)
            found = codes, scale, zero, error
            better = error < (best or found)[3]
            best = tuple(torch.where(better, new, old) for new, old in zip(found, best or found, strict=True))
            if fit == FITS:
                break
            # The line through the points (code, weight): scale is its slope, zero its height at code 0.
            mean_code, mean = weighted.sum(0) / total, (weight * importance).sum(0) / total
            spread = (weighted * codes).sum(0) - total * mean_code.square()
            slope = ((weighted * weight).sum(0) - total * mean_code * mean) / spread
            scale = torch.where(spread > 0, slope, scale)
            zero = mean - scale * mean_code
    return best[:3]


def round_inputs(x: Tensor) -> Tensor:
    """``[..., in]`` inputs of a low-bit product, rounded to int8 with one scale per 32 of them.

    Processors multiply bytes by bytes. One scale for a whole row would lose half of the acceptance.
    """
    columns = x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0).round_()
    return (codes * scale).flatten(-2)[..., :columns].to(x.dtype)
