"""Who decides, where a decoder is split over several processes (``model.parallel``): the first of them, the leader.

It alone reads the prompt, drafts, draws, accepts and ends texts. Before each pass it broadcasts an order that says what
to compute, and the others, its followers, compute their shares. They know of no text, and nothing they compute decides
anything; so no two processes can come to different decisions, however their hardware rounds.

Rolling back needs no order: a cache is written at explicit positions, and what lies beyond them counts for nothing.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from model.cache import KVCache
from model.decoder import Decoder
from model.errors import InputError
from model.parallel import Share, exchange, gather_logits
from model.plan import LayerPlan
from model.twins import Twins

END, NEW_CACHE, HIDDEN, LOGITS = range(4)  # what may be ordered
FIELDS = 5  # numbers of an order, before the bits of every sublayer


def no_low_bits(*_: object) -> None:
    """Stands where low-bit twins would be made."""
    raise InputError(
        "a model split over processes does not draft in low bits, for now: give --draft lookup, exit or none, or a "
        "--plan without bits"
    )


class ParallelDecoder:
    """The leader's decoder: computes with its followers; else like ``Decoder``, of the config of the whole model."""

    row_invariant = False
    why_rows_vary = "the model is split over several processes, whose sums depend on the number of rows"
    prefill = Decoder.prefill

    def __init__(self, model: Decoder, share: Share) -> None:
        self.model, self.share, self.config = model, share, share.config
        self.vocab_size = share.config.vocab_size
        self.twins = model.twins = Twins(model, no_low_bits)
        self.slots: WeakKeyDictionary[KVCache, int] = WeakKeyDictionary()  # the caches in use, by their numbers
        self.interrupted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Like ``Decoder.new_cache``. Followers let go of a cache when its number is given again."""
        slot = next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots.values())
        self._order(NEW_CACHE, slot, capacity, batch)
        cache = self.model.new_cache(capacity, batch)
        self.slots[cache] = slot
        return cache

    def hidden(
        self, tokens: Tensor, cache: KVCache | None = None, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        """``Decoder.hidden``."""
        plan = plan or LayerPlan.full(self.num_layers)
        return self._compute(HIDDEN, tokens, cache, start, plan)

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        """``Decoder.forward``: ``[batch, T]`` ids -> ``[batch, T, vocab]``."""
        plan = plan or LayerPlan.full(self.num_layers)
        return gather_logits(self.model, self.share, self._compute(LOGITS, tokens, cache, start, plan))

    def _compute(self, kind: int, tokens: Tensor, cache: KVCache | None, start: int, plan: LayerPlan) -> Tensor:
        if plan.has_low_bits:
            no_low_bits()
        slot = -1 if cache is None else self.slots[cache]
        self._order(kind, slot, start, *tokens.shape, *plan.attention, *plan.mlp)
        exchange(dist.broadcast, tokens.contiguous(), 0)
        return self.model.hidden(tokens, cache, start, plan)

    def _order(self, *numbers: int) -> None:
        """Tell the followers what to do. Raises KeyboardInterrupt if there was Ctrl-C, now that none is at work."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        order = torch.zeros(FIELDS + 2 * self.num_layers, dtype=torch.int64)
        order[: len(numbers)] = torch.tensor(numbers)
        exchange(dist.broadcast, order, 0)

    def interrupt(self, *_: object) -> None:
        """A signal handler: end what is going on before the next pass. The followers wait for the rest of this one."""
        self.interrupted = True

    def end(self) -> None:
        """Let the followers go. No more can be computed."""
        self.interrupted = False
        self._order(END)


@torch.inference_mode()
def follow(model: Decoder, share: Share) -> None:
    """Compute what the leader orders, until it ends. Raises InputError when it has gone without a word."""
    caches: dict[int, KVCache | None] = {-1: None}
    order, layers = torch.zeros(FIELDS + 2 * model.num_layers, dtype=torch.int64), model.num_layers
    while True:
        exchange(dist.broadcast, order, 0)
        kind, slot, start, batch, count, *bits = order.tolist()
        if kind == END:
            return
        if kind == NEW_CACHE:
            caches.pop(slot, None)  # before there is another
            caches[slot] = model.new_cache(capacity=start, batch=batch)
            continue
        tokens = torch.empty(batch, count, dtype=torch.int64, device=model.device)
        exchange(dist.broadcast, tokens, 0)
        hidden = model.hidden(tokens, caches[slot], start, LayerPlan(tuple(bits[:layers]), tuple(bits[layers:])))
        if kind == LOGITS:
            gather_logits(model, share, hidden)
