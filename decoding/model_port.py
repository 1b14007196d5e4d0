"""Interface of a model, as the loop and the drafters use it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from model.plan import LayerPlan


class Model(Protocol):
    """Interface of ``model.Decoder`` and of the proof's ``TableModel``.

    For the rest of a prepared model see ``model.steps.Steps``.
    """

    vocab_size: int
    max_positions: int
    device: torch.device

    def __call__(
        self, tokens: Tensor, cache: Any, start: int, plan: LayerPlan | None = None
    ) -> Tensor:
        """Return the logits ``[batch, T, vocab]`` of tokens ``[batch, T]`` at the positions from
        ``start`` on, and write their entries into the cache.
        """

    def prefill(self, tokens: Tensor, cache: Any, start: int = 0) -> None:
        """Write the entries of tokens ``[batch, T]``, without logits."""
