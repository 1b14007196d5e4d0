"""Low-bit weights in the order in which a step reads them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.fast.cpu.dot import BLOCK, GROUP, LANES
from model.quantise import Quantised


def packed(rounded: Quantised) -> Tensor:
    """Codes with their scales, uint8 ``[out, bytes]``: a row is the input of ``dot.multiply_codes``.

    Columns are padded to whole blocks of two groups. Words are four codes; in eight bits words of the two groups take
    turns. Otherwise a plane of four bits comes first: a byte holds a code of the first group in its lower half and one
    of the second in its upper half. In six bits a plane of the two highest bits follows, a byte per word, the words of
    the two groups taking turns.
    """
    out, columns = rounded.codes.shape
    codes = F.pad(rounded.codes, (0, -columns % BLOCK)).view(out, -1, 2, GROUP)
    if rounded.bits == 8:
        words = (codes.view(torch.uint8) + 128).unflatten(-1, (-1, 4)).transpose(2, 3)
        return torch.cat((words.reshape(out, -1), rounded.scale.view(torch.uint8)), 1)
    codes = (codes + 2 ** (rounded.bits - 1)).view(torch.uint8)
    low, high = (codes & 15).unbind(2)
    planes = [(low | high << 4).reshape(out, -1)]
    if rounded.bits == 6:
        pairs = (codes >> 4).unflatten(-1, (-1, 4)) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
        planes.append(pairs.sum(-1, dtype=torch.uint8).transpose(2, 3).reshape(out, -1))
    groups = codes.shape[1] * 2
    scales, zeros = (
        F.pad(each, (0, count - each.shape[1])).contiguous().view(torch.uint8)
        for each, count in ((rounded.scale, groups), (rounded.zero, -(-groups // LANES) * LANES))
    )
    return torch.cat((*planes, scales, zeros), 1)
