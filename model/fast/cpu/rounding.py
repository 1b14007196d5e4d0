"""Compiled grids of weights in four or six bits: ``model.quantise.judge``, many times as fast."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from model.fast.cpu.elements import compiled
from model.quantise import GROUP


def judge(weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Codes of a grid, and four means: see ``model.quantise.judge``."""
    codes, means = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(4, *scale.shape)
    judge_rows(*(each.numpy() for each in (weight, importance, scale, zero)), levels, codes.numpy(), means.numpy())
    return codes, means


# Sums may be reordered, so that they vectorise: the weights of a draft need not have the same bits on all machines.
@compiled(fastmath={"reassoc", "contract", "nsz"}, parallel=True, cache=True, no_cpython_wrapper=False)
def judge_rows(
    weights: np.ndarray, importances: np.ndarray, scales: np.ndarray, zeros: np.ndarray, levels: int,
    codes: np.ndarray, means: np.ndarray,
) -> None:  # fmt: skip
    """``judge``, into ``codes`` and ``means``."""
    most = np.float32(levels)
    for index in prange(len(weights)):
        row = np.int64(index)
        for group in range(weights.shape[1]):
            weight, importance, scale, zero = (
                weights[row, group],
                importances[group],
                scales[row, group],
                zeros[row, group],
            )
            inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
            error = mean = mean_square = mean_product = np.float32(0)
            for column in range(GROUP):
                code = min(max(np.floor((weight[column] - zero) * inverse + np.float32(0.5)), np.float32(0)), most)
                off, weighted = code * scale + zero - weight[column], importance[column] * code
                codes[row, group, column] = np.uint8(code)
                error += importance[column] * off * off
                mean += weighted
                mean_square += weighted * code
                mean_product += weighted * weight[column]
            means[0, row, group], means[1, row, group] = error, mean
            means[2, row, group], means[3, row, group] = mean_square, mean_product
