"""Interfaces of a model and its cache, as the loop and the drafters use them."""

from typing import Protocol

import torch
from torch import Tensor

from model.plan import LayerPlan


class Cache(Protocol):
    """Interface of ``model.cache.KVCache``: entries of the tokens that a model has read.

    It has ``length`` valid entries of at most ``capacity``.
    """

    length: int
    capacity: int

    def truncate(self, length: int) -> None:
        """Forget the entries from ``length`` on."""


class Model(Protocol):
    """Interface of ``model.Decoder`` and of the proof's ``TableModel``.

    For the rest of a prepared model see ``model.steps.Steps``.
    """

    vocab_size: int
    max_positions: int
    device: torch.device

    def __call__(
        self, tokens: Tensor, cache: Cache, start: int, plan: LayerPlan | None = None
    ) -> Tensor:
        """Return the logits ``[batch, T, vocab]`` of tokens ``[batch, T]`` at the positions from
        ``start`` on, and write their entries into the cache.
        """

    def prefill(self, tokens: Tensor, cache: Cache, start: int = 0) -> None:
        """Write the entries of tokens ``[batch, T]``, without logits."""
