"""What the loop, the drafters and the cost measurement ask of a model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from model.plan import LayerPlan


class Model(Protocol):
    """``model.Decoder`` has these, and so do the tests' table models. ``cache`` is what ``new_cache`` made."""

    vocab_size: int
    max_positions: int
    device: torch.device

    def __call__(self, tokens: Tensor, cache: Any, start: int, plan: LayerPlan | None = None) -> Tensor: ...

    def prefill(self, tokens: Tensor, cache: Any, start: int = 0) -> None: ...

    def new_cache(self, capacity: int) -> Any: ...
