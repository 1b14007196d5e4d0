"""Compiled grids of weights in four bits: ``model.quantise.judge``, many times as fast."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from model.fast.cpu import team
from model.fast.cpu.dot import INT4
from model.fast.cpu.elements import array_at, compiled
from model.quantise import GROUP


def judge(
    weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """Codes of a grid, and four means: see ``model.quantise.judge``."""
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    means = torch.empty(4, *scale.shape)
    tensors = [each.contiguous() for each in (weight, importance, scale, zero)]
    addresses = [each.data_ptr() for each in (*tensors, codes, means)]
    with team.gathered() as board:
        run(board, judge_task(), len(weight), 1, (*addresses, levels, *scale.shape))
    return codes, means


@compiled(cache=True, no_cpython_wrapper=False)
def run(board: np.ndarray, task: int, pieces: int, least: int, arguments: tuple[int, ...]) -> None:
    """``team.run``, for Python."""
    team.run(board, task, pieces, least, arguments)


@cache
def judge_task() -> int:
    """Address of the task of ``judge``; a piece is a row of weights."""

    def judge_rows(board: int, first: int, end: int) -> None:
        weights, importances, scales, zeros, codes, means, levels, rows, groups = array_at(
            board + 8 * team.ARGUMENTS, 9, np.int64
        )
        most = np.float32(levels)
        shape = groups, GROUP
        importance = array_at(importances, shape, np.float32)
        mean = array_at(means, (4, rows, groups), np.float32)
        for row in range(first, end):
            weight = array_at(weights + row * groups * GROUP * 4, shape, np.float32)
            found = array_at(codes + row * groups * GROUP, shape, np.uint8)
            scale_row = array_at(scales + row * groups * 4, groups, np.float32)
            zero_row = array_at(zeros + row * groups * 4, groups, np.float32)
            for group in range(groups):
                scale = scale_row[group]
                zero = zero_row[group]
                inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
                error = mean_code = mean_square = mean_product = np.float32(0)
                for column in range(GROUP):
                    number = weight[group, column]
                    share = importance[group, column]
                    code = np.floor((number - zero) * inverse + np.float32(0.5))
                    code = min(max(code, np.float32(0)), most)
                    off = code * scale + zero - number
                    weighted = share * code
                    found[group, column] = np.uint8(code)
                    error += share * off * off
                    mean_code += weighted
                    mean_square += weighted * code
                    mean_product += weighted * number
                mean[0, row, group] = error
                mean[1, row, group] = mean_code
                mean[2, row, group] = mean_square
                mean[3, row, group] = mean_product

    # Sums may be reordered, so that they vectorise: the weights of a draft need not have the same
    # bits on all machines.
    return team.compiled_task(judge_rows, INT4, fastmath={"reassoc", "contract", "nsz"})
