"""Weights in four or eight bits: rounded to the nearest of a few values, and what that makes of them.

A draft need not be right, only likely to be right, and decoding costs what reading the weights costs. So the draft
reads the same weights, rounded: a matrix in four bits takes less than a third of its size in bf16.

Rounding is affine. Some neighbouring weights of a row, a group, share a ``scale`` and a ``zero``:
weight ≈ code · scale + zero, with codes of -8 to 7 for four bits. A group of 32 keeps a single large weight from
coarsening a whole row. In eight bits a row is one group and zero is 0: codes are -127 to 127.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # weights that share scale and zero, in four bits


@dataclass(frozen=True)
class Quantised:
    """``codes`` ``[out, in]`` int8; ``scale`` and ``zero`` ``[out, groups]``, bfloat16 in four bits, else float32."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    @property
    def group(self) -> int:
        """How many columns share scale and zero."""
        return GROUP if self.bits == 4 else self.codes.shape[1]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights that the codes stand for, ``[out, in]``."""
        columns = self.codes.shape[1]
        codes = self.codes if columns % self.group == 0 else F.pad(self.codes, (0, -columns % self.group))
        codes = codes.unflatten(1, (-1, self.group))
        weights = torch.addcmul(self.zero.float()[..., None], codes, self.scale.float()[..., None])
        return weights.flatten(1)[:, :columns].to(dtype)


def quantise(weight: Tensor, bits: int) -> Quantised:
    """Round ``[out, in]`` weights to the nearest code of 4 or 8 bits.

    In four bits scale and zero are bfloat16, rounded before the codes are chosen: the error of a weight is half a step
    at most, and at the ends of the range what that rounding moved them. A last group of fewer than 32 columns has a
    scale of its own.
    """
    columns = weight.shape[1]
    group = GROUP if bits == 4 else columns
    wide = weight.detach().to(torch.float32, copy=True)  # to be worked on in place
    if columns % group:
        wide = F.pad(wide, (0, -columns % group), mode="replicate")
    groups = wide.unflatten(1, (-1, group))
    if bits == 8:
        scale = torch.linalg.vector_norm(groups, math.inf, 2) / 127
        zero = torch.zeros_like(scale)
    else:
        smallest, largest = groups.amin(2), groups.amax(2)
        scale = ((largest - smallest) / 15).bfloat16()
        zero = (smallest + 8 * scale).bfloat16()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)  # of weights that are all alike, every code is 0
    groups.sub_(zero.float()[..., None]).mul_(inverse[..., None]).round_()
    lowest, highest = (-8, 7) if bits == 4 else (-127, 127)
    return Quantised(wide[:, :columns].clamp_(lowest, highest).to(torch.int8), scale, zero, bits)


def round_inputs(x: Tensor) -> Tensor:
    """``[..., in]`` inputs of a low-bit product, rounded to int8 with one scale per 32 of them.

    Processors multiply bytes by bytes. One scale for a whole row would lose half of the acceptance.
    """
    columns = x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0).round_()
    return (codes * scale).flatten(-2)[..., :columns].to(x.dtype)
