"""An explicit per-layer KV cache whose rollback costs nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, written at explicit positions.

    The tensors are allocated once, ``[batch, kv_heads, capacity, head_dim]`` a layer. ``lengths[layer]``
    says how many positions of that layer hold a valid entry; what lies beyond counts for nothing. So rolling
    back is setting a number, and a draft that skips the attention of some layers and shares this cache
    with its target leaves those layers at the length the target gave them.

    Sliding-window layers keep every position too: attention masks what is out of the window, which makes
    a rollback across the window's edge exact.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch, num_kv_heads, capacity, head_dim)
        self.capacity = capacity
        self.lengths = [0] * num_layers
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)] for _ in range(2)
        )

    @property
    def length(self) -> int:
        """Positions that are valid in every layer: where a full forward pass may continue."""
        return min(self.lengths)

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[batch, kv_heads, T, head_dim]`` keys and values at positions ``[start, start + T)``.

        Entries from ``start`` on are replaced and forgotten. Returns views of all valid entries,
        ``[batch, kv_heads, start + T, head_dim]``. Raises ValueError if the write would leave a hole or
        not fit: both are mistakes of the caller that would otherwise show only as wrong text.
        """
        end = self.claim(layer, start, keys.shape[2])
        self.keys[layer][:, :, start:end] = keys
        self.values[layer][:, :, start:end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def claim(self, layer: int, start: int, count: int) -> int:
        """Count ``[start, start + count)`` as the last valid entries of a layer and return their end; see ``write``."""
        end = start + count
        if not 0 <= start <= self.lengths[layer]:
            raise ValueError(f"layer {layer}: writing at {start} leaves a hole after {self.lengths[layer]} entries")
        if end > self.capacity:
            raise ValueError(f"layer {layer}: position {end - 1} is outside the cache's {self.capacity} positions")
        self.lengths[layer] = end
        return end

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on, in every layer. Touches no tensor."""
        self.lengths = [min(length, layer_length) for layer_length in self.lengths]

    def copy(self, source: KVCache, length: int) -> None:
        """Take over another cache's first ``length`` entries, and nothing behind them."""
        for mine, theirs in zip((*self.keys, *self.values), (*source.keys, *source.values), strict=True):
            mine[:, :, :length] = theirs[:, :, :length]
        self.lengths = [length] * len(self.lengths)

    def clear(self) -> None:
        """Zero every position, for steps that read beyond the valid entries and mask them: 0 times NaN is NaN."""
        for entries in (*self.keys, *self.values):
            entries.zero_()
