"""KV cache with explicit positions, whose rollback costs nothing."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

SHORTEST = 1024  # positions of a static cache for a short text
PADDED_ROWS = 512  # positions after a text in a static cache: more than any static step has rows


class KVCache:
    """Keys and values of every layer, written at explicit positions.

    The tensors are allocated once, of the shape ``[batch, kv_heads, capacity, head_dim]`` per
    layer. ``lengths[layer]`` is the number of valid entries of a layer; entries after them are
    ignored. So a rollback sets a number. A draft that shares this cache with its target leaves the
    lengths of layers whose attention it skips.

    Sliding-window layers keep every position too: a rollback across the window's edge is exact.
    """

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = shape[2]
        self.lengths = [0] * num_layers
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            for _ in range(2)
        )

    @property
    def length(self) -> int:
        """Number of positions that are valid in every layer, where a full pass may continue."""
        return min(self.lengths)

    def check(self, layers: Collection[int], start: int, count: int) -> None:
        """Raise ValueError if entries of these layers at ``[start, start + count)`` would leave a
        hole or not fit. A plan without attention has no layers, but its start must fit too.

        These are mistakes of the caller that would otherwise show only as wrong text.
        """
        if start < 0:
            raise ValueError(f"position {start} is before the cache's first, 0")
        end = start + count
        if end > self.capacity:
            raise ValueError(f"position {end - 1} is outside the cache's {self.capacity} positions")
        for layer in layers:
            if start > self.lengths[layer]:
                raise ValueError(
                    f"layer {layer}: writing at {start} leaves a hole after {self.lengths[layer]}"
                    " entries"
                )

    def claim(self, layers: Collection[int], start: int, count: int) -> None:
        """Mark ``[start, start + count)`` as the last valid entries of these layers.

        Raises ValueError as ``check`` does, and then changes nothing.
        """
        self.check(layers, start, count)
        for layer in layers:
            self.lengths[layer] = start + count

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values ``[batch, kv_heads, T, head_dim]`` at
        ``[start, start + T)``.

        Entries after them are forgotten. Returns views of all valid entries, ``[batch, kv_heads,
        start + T, head_dim]``. Raises ValueError as ``claim`` does.
        """
        end = start + keys.shape[2]
        self.claim([layer], start, keys.shape[2])
        all_keys = self.keys[layer][:, :, :end]
        all_values = self.values[layer][:, :, :end]
        all_keys[:, :, start:] = keys
        all_values[:, :, start:] = values
        return all_keys, all_values

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on, in every layer. No tensor is touched. Raises
        ValueError for a length below 0.
        """
        if length < 0:
            raise ValueError(f"a cache cannot be cut to {length} positions")
        self.lengths = [min(length, layer_length) for layer_length in self.lengths]

    def copy_from(self, source: KVCache, length: int) -> None:
        """Copy another cache's first ``length`` entries, and forget all others. Raises ValueError
        where one of both has fewer positions.
        """
        if not 0 <= length <= min(self.capacity, source.capacity):
            raise ValueError(
                f"a cache of {self.capacity} positions cannot take {length} entries of one of"
                f" {source.capacity}"
            )
        for target, entries in zip(
            (*self.keys, *self.values), (*source.keys, *source.values), strict=True
        ):
            target[:, :, :length] = entries[:, :, :length]
        self.lengths = [length] * len(self.lengths)


def static_capacity(positions: int) -> int:
    """Return the positions of a cache for static steps, as a GPU has them: a power of two of
    ``positions`` or more, and padded rows.

    So the longest context of 131,072 tokens has eight sizes, for each of which steps are captured
    again.
    """
    return max(SHORTEST, 1 << (positions - 1).bit_length()) + PADDED_ROWS
