"""CUDA graphs: a decoding step as one launch, where launching its kernels one by one would take longer than they run.

A graph replays the same kernels on the same addresses, so a step is made static: tokens and their position
come out of buffers, keys and values are written where an index tensor says, and attention reads a fixed span
of the cache under a mask. There is one such step for each plan, number of tokens (1 to draft or decode
plainly, γ + 1 to verify) and span, made when it is first needed. The readable files do not know of this: the
blocks get other ``Positions`` and another cache, no more.

Without a GPU the same static step runs uncaptured; the tests compare it with the ordinary one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor

from model.cache import KVCache
from model.decoder import Decoder
from model.fast.pieces import LONGEST_STEP
from model.layers import Positions, Sight, hiding, rotary_table, visible
from model.plan import LayerPlan

SHORTEST_SPAN = 256  # positions
TOLERANCE = 0.05  # of the largest logit: far above rounding in bf16, far below what a wrong address gives


class StaticCache:
    """A KV cache as a static step sees it: written at an index tensor, read over a fixed span."""

    def __init__(self, cache: KVCache, index: Tensor, span: int) -> None:
        self.cache, self.index, self.span = cache, index, span

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Like ``KVCache.write``, but ``start`` is ignored, and what comes back goes beyond the valid entries."""
        kept = self.cache.keys[layer], self.cache.values[layer]
        for entries, new in zip(kept, (keys, values), strict=True):
            entries.index_copy_(2, self.index, new)
        return kept[0][:, :, : self.span], kept[1][:, :, : self.span]


class Recorder:
    """The stream that all graphs of a model are recorded on, and the memory they share: they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()


class StaticStep:
    """``model(tokens, cache, start, plan)`` for ``[1, count]`` tokens, as long as they stand within ``span``."""

    def __init__(self, model: Decoder, cache: KVCache, plan: LayerPlan, count: int, span: int) -> None:
        device = model.device
        self.model, self.plan, self.span = model, plan, span
        self.cache = proxy(cache)  # a step must not keep the cache it belongs to alive
        self.tokens = torch.zeros(1, count, dtype=torch.int64, device=device)
        self.start = torch.zeros((), dtype=torch.int64, device=device)
        self.offsets, self.keys = torch.arange(count, device=device), torch.arange(span, device=device)
        config = model.config
        self.angles = rotary_table(config.rope, config.head_dim, span, model.dtype, device)
        self.replay: Callable[[], None] | None = None
        self.logits: Tensor | None = None

    def compute(self) -> Tensor:
        """The step on what the buffers hold: ``[1, count, vocab]`` logits."""
        config = self.model.config
        index = self.start + self.offsets
        groups = config.num_heads // config.num_kv_heads
        sights = {}
        for window in set(config.windows):
            mask = hiding(visible(index, self.keys, window, groups), self.model.dtype)
            sights[window] = Sight(len(index), self.span - len(index), mask)
        positions = Positions(0, *(table.index_select(0, index) for table in self.angles), sights)
        cache = StaticCache(self.cache, index, self.span)
        x = self.model.run_blocks(self.model.embed(self.tokens), positions, cache, self.plan)
        return self.model.logits(x, self.model.twins.head(self.plan.head))

    def capture(self, recorder: Recorder) -> None:
        """Record the step as a CUDA graph, after one run on the recording stream in which libraries settle."""
        with torch.cuda.device(self.tokens.device):
            recorder.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(recorder.stream):
                self.compute()
            torch.cuda.current_stream().wait_stream(recorder.stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=recorder.pool, stream=recorder.stream):
                self.logits = self.compute()
            self.logits.fill_(math.nan)  # only a replay that really computes can pass the comparison
        self.replay = graph.replay

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        self.tokens.copy_(tokens)
        self.start.fill_(start)
        if self.replay is None:
            return self.compute()
        self.replay()
        return self.logits.clone()


class GraphedDecoder:
    """A ``Decoder`` whose short steps are static and, on a GPU, captured. Everything else is the decoder's own.

    A captured step is trusted only after it has given the ordinary step's logits; where capturing fails, or the
    logits differ, the decoder goes on without graphs and ``trouble`` says why. A cache whose tensors were replaced
    (``KVCache.keep_rows``) must not be used here again: graphs hold addresses.
    """

    row_invariant = False
    why_rows_vary = "on a GPU kernels are chosen by the number of rows"

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.steps: WeakKeyDictionary[KVCache, dict[Any, StaticStep]] = WeakKeyDictionary()
        self.trouble: str | None = None
        self.recorder = Recorder(model.device) if model.device.type == "cuda" else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        """``Decoder.forward``: ``[batch, T]`` ids -> ``[batch, T, vocab]``."""
        batch, count = tokens.shape
        if self.trouble or cache is None or batch != 1 or count > LONGEST_STEP:
            return self.model(tokens, cache, start, plan)
        plan = plan or LayerPlan.full(self.model.num_layers)
        span = min(cache.capacity, max(SHORTEST_SPAN, 1 << (start + count - 1).bit_length()))
        steps = self.steps.setdefault(cache, {})
        if (plan, count, span) not in steps:
            return self._first(steps, (plan, count, span), tokens, cache, start)
        for layer, runs in enumerate(plan.attention):
            if runs:
                cache.claim(layer, start, count)
        return steps[plan, count, span](tokens, start)

    def _first(self, steps: dict[Any, StaticStep], key: Any, tokens: Tensor, cache: KVCache, start: int) -> Tensor:
        """Run the ordinary step, and make the static one beside it for the next time."""
        logits = self.model(tokens, cache, start, key[0])
        entries, kept = (*cache.keys, *cache.values), []
        try:
            kept += [tensor[:, :, : key[2]].clone() for tensor in entries]
            step = StaticStep(self.model, cache, *key)
            if self.recorder:
                step(tokens, start)  # fills the buffers: recording must see valid positions
                step.capture(self.recorder)
            difference = (step(tokens, start) - logits).abs().max()
            if difference <= TOLERANCE * logits.abs().max():  # false for NaN too
                steps[key] = step
                return logits
            self.trouble = f"a captured step's logits are {difference.item():.3g} away from the ordinary step's"
        except RuntimeError as error:
            self.trouble = f"capturing failed: {(str(error).splitlines() or ['for no reason given'])[0]}"
        self.steps.clear()
        for tensor, before in zip(entries, kept, strict=False):  # a wrong step may have written anywhere
            tensor[:, :, : key[2]] = before
        return logits
