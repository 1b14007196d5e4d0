"""Static steps: a decoding step whose every kernel and address stays as it is, so that a GPU can replay it as one.

All short steps have the same number of rows, ``ROWS``: drafting, verification and plain decoding take the same kernels,
and a row gets the same bits whatever else is computed. Reading the weights is what a step costs, so padded rows are
free. Tokens, their position and their number come out of buffers; keys and values are written where an index tensor
says, those of padded rows behind the last position; and attention reads a fixed span of the cache. There is one such
step for each plan and span, for all texts of a process. The readable files do not know of this: the blocks get other
``Positions`` and another cache, no more.

Without a GPU the same steps run unrecorded; the tests compare them with the ordinary ones.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model.cache import KVCache
from model.decoder import Decoder
from model.fast.recorder import Recorder, first_cause
from model.fast.shared_keys import PART, SharedKeys
from model.layers import Positions, rotary_table
from model.plan import LayerPlan

ROWS = 16  # of every step: what a GPU multiplies at once anyway
# Of the largest logit: above what rounding in bf16 makes of deep models, below what a wrong address gives.
TOLERANCE = 0.2


def whole_parts(positions: int) -> int:
    """So many positions, rounded up to whole parts of keys."""
    return -(-positions // PART) * PART


def spans_of(positions: int) -> list[int]:
    """The spans that steps read where a text has so many positions: one part of keys, twice as many, and so on."""
    spans = [PART]
    while spans[-1] < positions:
        spans.append(min(2 * spans[-1], whole_parts(positions)))
    return spans


class StaticCache:
    """A KV cache as a static step sees it: written at an index tensor, read over a fixed span."""

    def __init__(self, cache: KVCache, index: Tensor, span: int) -> None:
        self.cache, self.index, self.span = cache, index, span

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Like ``KVCache.write``, but ``start`` is ignored, and what comes back goes beyond the valid entries."""
        entries = self.cache.keys[layer], self.cache.values[layer]
        for old, new in zip(entries, (keys, values), strict=True):
            old.index_copy_(2, self.index, new)
        return entries[0][:, :, : self.span], entries[1][:, :, : self.span]


class Desk:
    """Where all static steps of a model find their input and leave their logits."""

    def __init__(self, model: Decoder) -> None:
        device = model.device
        self.tokens = torch.zeros(1, ROWS, dtype=torch.int64, device=device)
        self.start, self.count = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.offsets = torch.arange(ROWS, device=device)
        self.logits = torch.empty(1, ROWS, model.vocab_size, dtype=model.dtype, device=device)


class StaticStep:
    """``model(tokens, cache, start, plan)`` for up to ``ROWS`` tokens, as long as they stand within ``span``."""

    def __init__(self, model: Decoder, desk: Desk, cache: KVCache, plan: LayerPlan, span: int) -> None:
        self.model, self.desk, self.cache, self.plan, self.span = model, desk, cache, plan, span
        self.scratch = cache.capacity - ROWS
        self.angles = rotary_table(model.config.rope, model.config.head_dim, cache.capacity, model.dtype, model.device)
        self.replay: Callable[[], None] | None = None  # what was recorded

    def compute(self) -> None:
        """The step on what lies on the desk."""
        config, desk = self.model.config, self.desk
        places = desk.start + desk.offsets
        index = torch.where(desk.offsets < desk.count, places, self.scratch + desk.offsets)
        groups = config.num_heads // config.num_kv_heads
        sights = {
            window: SharedKeys.of(places, self.span, window, groups, self.model.dtype) for window in set(config.windows)
        }
        positions = Positions(0, *(table.index_select(0, index) for table in self.angles), sights)
        cache = StaticCache(self.cache, index, self.span)
        x = self.model.run_blocks(self.model.embed(desk.tokens), positions, cache, self.plan)
        desk.logits.copy_(self.model.logits(x, self.model.twins.head(self.plan.head)))

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        count = tokens.shape[1]
        self.desk.tokens[:, :count].copy_(tokens)
        self.desk.start.fill_(start)
        self.desk.count.fill_(count)
        (self.replay or self.compute)()
        return self.desk.logits[:, :count].clone()


class Arena:
    """Memory for the cache of one text at a time, and the steps that were recorded on it: of each plan one a span."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.positions = cache.capacity - ROWS  # that a text may have; those of padded rows come after them
        self.spans = spans_of(self.positions)
        self.steps: dict[LayerPlan, list[StaticStep]] = {}

    def lend(self, capacity: int) -> KVCache:
        """An empty cache that lies here."""
        self.cache.clear()
        lent = copy.copy(self.cache)
        lent.capacity, lent.lengths = capacity, [0] * len(lent.lengths)
        return lent


class GraphedDecoder:
    """A ``Decoder`` whose steps on a single text are static and, on a GPU, recorded. Its prefill is the decoder's own.

    Where ``row_invariant`` holds, a position's logits have the same bits whether its step took one token or many,
    whatever the cache's capacity. A step is trusted only after it has given the ordinary step's logits, else all go on
    with ordinary ones; where recording fails, with static ones unrecorded; ``trouble`` says so.
    """

    def __init__(self, model: Decoder, recorder: Recorder | None = None) -> None:
        """``recorder`` is the GPU's own by default, and none elsewhere."""
        self.model, self.desk = model, Desk(model)
        self.recorder = Recorder(model.device) if recorder is None and model.device.type == "cuda" else recorder
        self.arenas: list[Arena] = []
        self.lent: WeakKeyDictionary[KVCache, Arena] = WeakKeyDictionary()
        self.trouble: str | None = None
        self.why_rows_vary: str | None = None
        self.static = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def row_invariant(self) -> bool:
        return self.why_rows_vary is None

    def prepare(self, plan: LayerPlan) -> None:
        """``Decoder.prepare``."""
        self.model.prepare(plan)

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """``Decoder.new_cache``; for a single text in memory that an earlier one has left, with what was recorded."""
        if batch > 1:
            return self.model.new_cache(capacity, batch)
        used = {id(arena) for arena in self.lent.values()}
        free = [arena for arena in self.arenas if id(arena) not in used]
        arena = next((arena for arena in free if arena.positions >= capacity), None)
        if arena is None:
            self.arenas = [arena for arena in self.arenas if id(arena) in used]
            del free
            arena = Arena(self.model.new_cache(whole_parts(capacity) + ROWS))
            self.arenas.append(arena)
        cache = arena.lend(capacity)
        self.lent[cache] = arena
        return cache

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        """``Decoder.forward``: ``[batch, T]`` ids -> ``[batch, T, vocab]``, in steps of at most ``ROWS``."""
        plan = plan or LayerPlan.full(self.model.num_layers)
        if cache not in self.lent or not self.record(cache, plan):
            return self.model(tokens, cache, start, plan)
        steps = enumerate(tokens.split(ROWS, 1))
        logits = [self._step(step, cache, start + ROWS * number, plan) for number, step in steps]
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)

    def _step(self, tokens: Tensor, cache: KVCache, start: int, plan: LayerPlan) -> Tensor:
        for layer, runs in enumerate(plan.attention):
            if runs:
                cache.claim(layer, start, tokens.shape[1])
        arena = self.lent[cache]
        return arena.steps[plan][bisect_left(arena.spans, start + tokens.shape[1])](tokens, start)

    def record(self, cache: KVCache, plan: LayerPlan | None = None) -> bool:
        """Make the steps of this plan on this cache now, if they are not made yet: never while a text is timed.

        Returns whether steps are static.
        """
        plan, arena = plan or LayerPlan.full(self.model.num_layers), self.lent.get(cache)
        if arena is None or not self.static or plan in arena.steps:
            return self.static
        steps = [StaticStep(self.model, self.desk, arena.cache, plan, span) for span in arena.spans]
        try:
            self._prepare(steps)
        except RuntimeError as error:
            self.trouble = f"steps are ordinary ones: {first_cause(error)}"
            self.static = False
        arena.steps[plan] = steps
        return self.static

    @torch.inference_mode()
    def _prepare(self, steps: list[StaticStep]) -> None:
        """Check the steps of a plan, record them, and check them again. Raises RuntimeError for one that is wrong."""
        self._check(steps)
        if self.recorder is None or self.trouble:
            return
        self.recorder.make_room()
        self.desk.count.zero_()  # so that recording writes to no position of a text
        try:
            for step in steps:
                step.replay = self.recorder.record(step.compute)
        except RuntimeError as error:
            self.trouble = f"steps are not recorded as CUDA graphs: {first_cause(error)}"
            for step in steps:
                step.replay = None
            return
        self._check(steps)

    def _check(self, steps: list[StaticStep]) -> None:
        """Compare steps with ordinary ones at the end of their span, and leave the cache as it was.

        Raises RuntimeError where their logits differ by more than rounding.
        """
        tokens = torch.arange(ROWS, device=self.model.device)[None] % self.model.vocab_size
        for step in steps:
            first = step.span - 4 * ROWS
            cache, last = copy.copy(step.cache), step.span - 2 * ROWS
            entries = [tensor[:, :, first : step.span] for tensor in (*cache.keys, *cache.values)]
            kept = [tensor.clone() for tensor in entries]
            try:
                for start in (last - ROWS, last):
                    cache.lengths = [start] * len(cache.lengths)
                    expected, found = self.model(tokens, cache, start, step.plan), step(tokens, start)
                alone = step(tokens[:, -1:], last + ROWS - 1)
            finally:
                for tensor, before in zip(entries, kept, strict=True):
                    tensor.copy_(before)
            difference = (found - expected).abs().max()
            if not difference <= TOLERANCE * expected.abs().max():  # NaN fails too
                raise RuntimeError(f"a static step's logits are {difference.item():.3g} away from the ordinary step's")
            if not step.plan.has_low_bits and not torch.equal(alone, found[:, -1:]):  # drafts need not be exact
                self.why_rows_vary = "this GPU's kernels give a row other bits alone than among others"
