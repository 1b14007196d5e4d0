"""Attention whose rows do not depend on how many there are, or on what follows them.

torch's fused kernel on the CPU sums over the keys of a position in an order that depends on how many keys it is
given, and a lone row of queries takes another product than several. So each position is given whole blocks of
the cache, as many as belong to its own block and no more, with a mask over what it does not see; and a lone row gets
a companion. The tokens of a step that share a block attend together, up to 32 rows at once: torch itself goes by
32 rows, and from 33 on oneDNN divides the sum over keys differently. Whether this holds on a machine is for
``model.fast.check`` to find.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache import BLOCK
from model.config import ModelConfig
from model.layers import Positions, Sight, attend, rotary_angles, visible

LONGEST_STEP = 17  # tokens: the verification of a draft of 16; longer ones are prompts
ROWS = 32  # queries at most in one call, counting the heads that share a key head


@dataclass(frozen=True)
class Piece:
    """Tokens ``[begin, end)`` of a step, and which of the first ``span`` keys of the cache they see.

    ``alone``: they are a single row, which needs a companion; ``sees`` is of both then.
    """

    begin: int
    end: int
    span: int
    sees: Sight
    alone: bool


def pieces(start: int, count: int, window: int | None, config: ModelConfig, like: Tensor) -> tuple[Piece, ...]:
    """``count`` new tokens at ``start``, divided so that what each is given depends on its own position only."""
    groups, found, at = config.num_heads // config.num_kv_heads, [], start
    while at < start + count:
        span = (at // BLOCK + 1) * BLOCK
        end = min(start + count, span, at + max(1, ROWS // groups))
        first = 0 if window is None else max(0, (span - BLOCK - window + 1) // BLOCK * BLOCK)
        query, key = (torch.arange(*ends, device=like.device) for ends in ((at, end), (first, span)))
        mask = visible(query, key, window, groups)
        if alone := len(mask) == 1:
            mask = mask.expand(2, -1)
        if config.attention_soft_cap is None:  # torch's kernel would make numbers of it in every layer
            mask = torch.zeros(mask.shape, dtype=like.dtype).masked_fill_(~mask, float("-inf"))
        found.append(Piece(at - start, end - start, span, Sight(first, mask), alone))
        at = end
    return tuple(found)


def place_in_pieces(config: ModelConfig, start: int, count: int, like: Tensor) -> Positions:
    """``model.layers.place`` for a step that attends in pieces."""
    sights = {window: pieces(start, count, window, config, like) for window in set(config.windows)}
    return Positions(start, *rotary_angles(config, start, count, like), sights)


def attend_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, sees: tuple[Piece, ...], *, scale: float, soft_cap: float | None
) -> Tensor:
    """``attend`` piece by piece. k and v are the cache's whole rooms: what lies beyond a position is masked."""
    out = []
    for piece in sees:
        count = piece.end - piece.begin
        part, keys, values = q[:, :, piece.begin : piece.end], k[:, :, : piece.span], v[:, :, : piece.span]
        if piece.alone:
            part = part.expand(-1, -1, 2, -1)
        out.append(attend(part, keys, values, piece.sees, scale=scale, soft_cap=soft_cap)[:, :, :count])
    return out[0] if len(out) == 1 else torch.cat(out, 2)
