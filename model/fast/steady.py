"""A prepared model whose steps give a position the same bits, however many tokens they take."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from model.cache import KVCache
from model.decoder import Decoder
from model.fast.check import examine
from model.fast.pieces import LONGEST_STEP, place_in_pieces
from model.plan import LayerPlan


class WholeRooms:
    """A KV cache as a step in pieces sees it: what comes back are the whole blocks, valid or not."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Like ``KVCache.write``, but all that there is room for is returned."""
        self.cache.store(layer, start, keys, values)
        return self.cache.rooms[layer]


class SteadyDecoder:
    """A prepared ``Decoder`` on a CPU; everything but its steps is the decoder's own.

    Where ``row_invariant`` holds, the logits of a position of a single text and the entries written there have the
    same bits whether its call took one token or many, whatever followed them, and whatever the cache's capacity.
    (A prompt's ``prefill`` runs in long chunks and promises no such thing.) Elsewhere ``why_rows_vary`` is a line
    that says why not, and steps are the decoder's own.
    """

    def __init__(self, model: Decoder) -> None:
        self.model, self.threads = model, torch.get_num_threads()
        self.rows, self.found = examine(model)
        self.soiled: WeakSet[KVCache] = WeakSet()  # caches that hold numbers which are not finite

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def row_invariant(self) -> bool:
        return self.why_rows_vary is None

    @property
    def why_rows_vary(self) -> str | None:
        """None where rows do not depend on how many there are, else the reason in one line."""
        if torch.get_num_threads() != self.threads:
            return f"the model was prepared for {self.threads} threads and runs on {torch.get_num_threads()}"
        return self.found

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        """``Decoder.forward``: ``[batch, T]`` ids -> ``[batch, T, vocab]``, in steps of at most ``LONGEST_STEP``."""
        if cache is None or len(tokens) != 1 or self.found:
            return self.model(tokens, cache, start, plan)
        plan = plan or LayerPlan.full(self.model.num_layers)
        steps = tokens.split(LONGEST_STEP, 1)
        logits = [self._step(step, cache, start + LONGEST_STEP * number, plan) for number, step in enumerate(steps)]
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)

    def _step(self, tokens: Tensor, cache: KVCache, start: int, plan: LayerPlan) -> Tensor:
        if cache in self.soiled:  # a rejected token's NaN would reach the rows that mask it: 0 times NaN is NaN
            self.soiled.discard(cache)
            cache.clear(start)
        x = self.model.embed(tokens)
        positions = place_in_pieces(self.model.config, start, tokens.shape[1], x, self.rows)
        x = self.model.run_blocks(x, positions, WholeRooms(cache), plan)
        logits = self.model.logits(x, self.model.twins.head(plan.head))
        if not math.isfinite(logits[0, -1, 0].item()):  # a row sees those before it: the last tells of all
            self.soiled.add(cache)
        return logits
