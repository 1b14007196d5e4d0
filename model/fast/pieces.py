"""Attention whose rows do not depend on how many there are, or on what follows them.

torch's fused kernel on the CPU sums over the keys of a position in an order that depends on how many keys it is
given, and a lone row of queries takes another product than several. So each position is given whole blocks of
the cache, as many as belong to its own block and no more, with a mask over what it does not see; and a lone row gets
a companion. The tokens of a step that share a block attend together, as many as ``model.fast.check`` finds to round
alike on this machine.

The kernel gives a head of keys to one thread, and leaves threads idle where heads do not share out evenly. So many keys
are taken in equal parts, attended to side by side and joined; how many, goes by the position too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache import BLOCK
from model.config import ModelConfig
from model.fast.flash import FLASH, join
from model.layers import Positions, attend_to, hiding, rotary_angles, visible

LONGEST_STEP = 17  # tokens: the verification of a draft of 16; longer ones are prompts
PART = 1024  # keys, at least: fewer are read sooner than joined


@dataclass(frozen=True)
class Piece:
    """Tokens ``[begin, end)`` of a step, and the keys ``[first, last)`` of the cache that they read under ``mask``.

    ``alone``: they are a single row, which needs a companion; ``mask`` is of both then. It is added to the scores:
    ``[rows, keys]``, or ``[parts, 1, rows, keys / parts]`` where the keys are taken in ``parts``.
    """

    begin: int
    end: int
    first: int
    last: int
    mask: Tensor
    alone: bool
    parts: int


def pieces(
    start: int, count: int, window: int | None, config: ModelConfig, like: Tensor, rows: int
) -> tuple[Piece, ...]:
    """``count`` new tokens at ``start``, divided so that what each is given depends on its own position only.

    A piece has at most ``rows`` queries to a key head, or one token.
    """
    groups, found, at = config.num_heads // config.num_kv_heads, [], start
    while at < start + count:
        last = (at // BLOCK + 1) * BLOCK
        end = min(start + count, last, at + max(1, rows // groups))
        first = 0 if window is None else max(0, (last - BLOCK - window + 1) // BLOCK * BLOCK)
        query, key = torch.arange(at, end, device=like.device), torch.arange(first, last, device=like.device)
        mask = hiding(visible(query, key, window, groups), like.dtype).flatten(0, 1)
        if alone := len(mask) == 1:
            mask = mask.repeat(2, 1)
        parts = even_parts(last - first, config)
        if parts > 1:
            mask = mask.unflatten(1, (parts, -1)).transpose(0, 1).unsqueeze(1)
        found.append(Piece(at - start, end - start, first, last, mask, alone, parts))
        at = end
    return tuple(found)


def even_parts(keys: int, config: ModelConfig) -> int:
    """In how many equal parts to take so many keys, for the threads to have the same to do."""
    threads = torch.get_num_threads()
    wanted = 1 if config.attention_soft_cap else threads // math.gcd(threads, config.num_kv_heads)
    return next(parts for parts in range(max(1, min(wanted, keys // PART)), 0, -1) if keys % parts == 0)


def place_in_pieces(config: ModelConfig, start: int, count: int, like: Tensor, rows: int) -> Positions:
    """``model.layers.place`` for a step that attends in pieces."""
    sights = {window: pieces(start, count, window, config, like, rows) for window in set(config.windows)}
    return Positions(start, *rotary_angles(config, start, count, like), sights)


def attend_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, sees: tuple[Piece, ...], *, scale: float, soft_cap: float | None
) -> Tensor:
    """``attend`` piece by piece. k and v are the cache's whole rooms: what lies beyond a position is masked."""
    out = []
    for piece in sees:
        part = q if len(sees) == 1 else q[:, :, piece.begin : piece.end]
        if piece.alone:
            part = part.repeat(1, 1, 2, 1)
        keys, values = k[:, :, piece.first : piece.last], v[:, :, piece.first : piece.last]
        if soft_cap is None:
            attended = attend_to_parts(part, keys, values, piece, scale=scale)
        else:
            attended = attend_to(part, keys, values, piece.mask, scale=scale, soft_cap=soft_cap)
        out.append(attended[:, :, :1] if piece.alone else attended)
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def attend_to_parts(q: Tensor, k: Tensor, v: Tensor, piece: Piece, *, scale: float) -> Tensor:
    """``attend_to`` for a single text, with the keys in the piece's parts: they take the place of a batch."""
    rows = q.reshape(1, k.shape[1], -1, q.shape[3])
    if piece.parts == 1:
        return FLASH(rows, k, v, attn_mask=piece.mask, scale=scale)[0].reshape(q.shape)
    rows = rows.expand(piece.parts, -1, -1, -1)
    k, v = (entries[0].unflatten(1, (piece.parts, -1)).transpose(0, 1) for entries in (k, v))
    return join(*FLASH(rows, k, v, attn_mask=piece.mask, scale=scale)).reshape(q.shape)
