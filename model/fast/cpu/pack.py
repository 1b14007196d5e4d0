"""Low-bit weights in the order in which a step reads them, and the tables that say where each matrix lies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.fast.cpu.dot import BLOCK, GROUP, LANES
from model.quantise import Quantised


def packed(rounded: Quantised) -> Tensor:
    """Codes with their scales, uint8 ``[out, bytes]``: what ``dot.multiply_codes`` reads of each row.

    Columns are padded to whole blocks of two groups. In four bits a byte holds a code of the first group in its lower
    half and one of the second in its upper half; in eight bits words of four codes of the two groups take turns.
    """
    out, columns = rounded.codes.shape
    codes = F.pad(rounded.codes, (0, -columns % BLOCK)).view(out, -1, 2, GROUP)
    if rounded.bits == 8:
        words = (codes.view(torch.uint8) + 128).unflatten(-1, (-1, 4)).transpose(2, 3)
        return torch.cat((words.reshape(out, -1), rounded.scale.float().view(torch.uint8)), 1)
    low, high = (codes + 8).view(torch.uint8).unbind(2)
    groups = low.shape[1] * 2
    scales, zeros = (
        F.pad(each, (0, count - each.shape[1])).contiguous().view(torch.uint8)
        for each, count in ((rounded.scale, groups), (rounded.zero, -(-groups // LANES) * LANES))
    )
    return torch.cat(((low | high << 4).reshape(out, -1), scales, zeros), 1)
