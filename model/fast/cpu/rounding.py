"""Compiled grids of weights in four bits: ``model.quantise.evaluate_grid``, many times as fast."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from model.fast.cpu.dot import GROUP
from model.fast.cpu.kernels import compiled
from model.fast.cpu.team import pool


def evaluate_grid(
    weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """Codes of a grid, and four means: see ``model.quantise.evaluate_grid``."""
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    means = torch.empty(*scale.shape, 4)
    evaluate = partial(evaluate_rows, importance.numpy(), np.float32(levels))
    parts = [
        np.array_split(each.numpy(), torch.get_num_threads())
        for each in (weight, scale, zero, codes, means)
    ]
    list(pool.map(evaluate, *parts))  # raises what a part raises
    return codes, means.movedim(-1, 0)


# Sums may be reordered, so that they vectorise: the weights of a draft need not have the same bits
# on all machines.
@compiled(cache=True, no_cpython_wrapper=False, fastmath={"reassoc", "contract", "nsz"})
def evaluate_rows(
    importance: np.ndarray,
    levels: np.float32,
    weight: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    codes: np.ndarray,
    means: np.ndarray,
) -> None:
    """Codes ``[rows, groups, 32]`` and means ``[rows, groups, 4]`` of some rows."""
    for row in range(len(weight)):
        for group in range(len(importance)):
            step = scale[row, group]
            low = zero[row, group]
            inverse = np.float32(1) / step if step > 0 else np.float32(0)
            error = mean_code = mean_square = mean_product = np.float32(0)
            for column in range(GROUP):
                number = weight[row, group, column]
                share = importance[group, column]
                code = np.floor((number - low) * inverse + np.float32(0.5))
                code = min(max(code, np.float32(0)), levels)
                off = code * step + low - number
                weighted = share * code
                codes[row, group, column] = np.uint8(code)
                error += share * off * off
                mean_code += weighted
                mean_square += weighted * code
                mean_product += weighted * number
            means[row, group, 0] = error
            means[row, group, 1] = mean_code
            means[row, group, 2] = mean_square
            means[row, group, 3] = mean_product
