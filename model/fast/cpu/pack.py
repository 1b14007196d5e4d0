"""Packing of low-bit weights, in the order in which a step reads them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.fast.cpu.dot import BLOCK, GROUP, LANES
from model.quantise import Quantised


def packed(rounded: Quantised) -> Tensor:
    """Codes with their scales, uint8 ``[out, bytes]``: each row is an operand of ``dot.multiply_codes``.

    Columns are padded to whole blocks of two groups, and the words of four codes of both groups alternate. In eight
    bits a byte is a code plus 128. Otherwise a plane of four bits per code comes first: byte i of a block holds code i
    in its lower half and code i + 32 in its upper half. In six bits a plane of the two highest bits follows: byte i
    holds those of the codes i, i + 16, i + 32 and i + 48.
    """
    out, columns = rounded.codes.shape
    codes = F.pad(rounded.codes, (0, -columns % BLOCK)).view(out, -1, 2, GROUP // 4, 4)
    codes = codes.transpose(2, 3).reshape(out, -1, BLOCK)
    if rounded.bits == 8:
        return torch.cat((codes.flatten(1).view(torch.uint8) + 128, rounded.scale.view(torch.uint8)), 1)
    low, high = (codes & 15).unflatten(2, (2, -1)).unbind(2)
    planes = [low | high << 4]
    if rounded.bits == 6:
        parts = (codes >> 4).unflatten(2, (4, -1)).unbind(2)
        planes.append(parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6)
    groups = codes.shape[1] * 2
    scales, zeros = (
        F.pad(each, (0, count - each.shape[1])).contiguous().view(torch.uint8)
        for each, count in ((rounded.scale, groups), (rounded.zero, -(-groups // LANES) * LANES))
    )
    return torch.cat((*(plane.flatten(1) for plane in planes), scales, zeros), 1)
