"""Compiled rounding of weights to four or six bits: ``model.quantise.round_groups``, about ten times as fast."""

from functools import partial

import numpy as np
import torch
from numba import prange, uint32
from torch import Tensor

from model.fast.cpu.elements import bfloat16_bits, compiled
from model.quantise import CUTS, FITS, GROUP

STARTS = np.array(CUTS, np.float32)
# Sums may be reordered, so that they vectorise: the weights of a draft need not have the same bits on all machines.
summing = partial(compiled, fastmath={"reassoc", "contract", "nsz"})


def round_groups(weight: Tensor, importance: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of groups: see ``model.quantise.round_groups``."""
    codes = np.empty(weight.shape, np.uint8)
    scale, zero = np.empty((2, len(weight)), np.float32)
    fit_groups(weight.contiguous().numpy(), importance.contiguous().numpy(), 2**bits - 1, codes, scale, zero)
    return tuple(map(torch.from_numpy, (codes, scale, zero)))


@compiled()
def bfloat16(number: float) -> float:
    """``number`` rounded to bfloat16, as float32."""
    return np.uint32(bfloat16_bits(number) << uint32(16)).view(np.float32)


@summing()
def code_of(weight: float, inverse: float, zero: float, levels: float) -> float:
    """Code whose value is nearest to a weight."""
    return min(max(np.floor((weight - zero) * inverse + np.float32(0.5)), np.float32(0)), levels)


@summing()
def judge(
    weight: np.ndarray, importance: np.ndarray, scale: float, zero: float, levels: float
) -> tuple[float, float, float, float]:
    """Weighted squared error of a grid; weighted sums of its codes, of their squares and of codes times weights."""
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    error = sum_codes = sum_squares = sum_products = np.float32(0)
    for index in range(GROUP):
        code = code_of(weight[index], inverse, zero, levels)
        off = code * scale + zero - weight[index]
        weighted = importance[index] * code
        error += importance[index] * off * off
        sum_codes += weighted
        sum_squares += weighted * code
        sum_products += weighted * weight[index]
    return error, sum_codes, sum_squares, sum_products


@summing(parallel=True, cache=True, no_cpython_wrapper=False)
def fit_groups(
    weights: np.ndarray, importances: np.ndarray, levels: int, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray
) -> None:
    """Grid of the least weighted error of each group, a row of ``weights``, into ``codes``, ``scales`` and ``zeros``.

    ``importances`` ``[rows, 32]`` repeat: group g has row g % rows.
    """
    most = np.float32(levels)
    for index in prange(len(weights)):
        group = np.int64(index)
        weight, importance = weights[group], importances[group % len(importances)]
        total = sum_weights = np.float32(0)
        low, high = weight[0], weight[0]
        for column in range(GROUP):
            low, high = min(low, weight[column]), max(high, weight[column])
            total += importance[column]
            sum_weights += importance[column] * weight[column]
        least = np.float32(np.inf)
        best_scale, best_zero = np.float32(0), np.float32(0)
        for cut in STARTS:
            scale = (high - low) * (np.float32(1) - np.float32(2) * cut / most) / most
            zero = (low + high - most * scale) / np.float32(2)
            for _ in range(FITS + 1):
                scale, zero = bfloat16(scale), bfloat16(zero)
                error, sum_codes, sum_squares, sum_products = judge(weight, importance, scale, zero, most)
                if error < least:
                    least, best_scale, best_zero = error, scale, zero
                spread = sum_squares - sum_codes * sum_codes / total
                if spread > 0:
                    scale = (sum_products - sum_codes * sum_weights / total) / spread
                zero = (sum_weights - scale * sum_codes) / total
        inverse = np.float32(1) / best_scale if best_scale > 0 else np.float32(0)
        for column in range(GROUP):
            codes[group, column] = np.uint8(code_of(weight[column], inverse, best_zero, most))
        scales[group], zeros[group] = best_scale, best_zero
