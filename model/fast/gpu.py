"""Static steps on a GPU, as in gpt-fast: a static cache, one compiled block, CUDA graphs.

Launching a kernel takes longer than most kernels of a step run. So a step of a plan always has the
same shape: ``ROWS`` tokens, or one for drafts in low bits, at positions that are tensors, over all
positions of the cache. The readable block is compiled once (``torch.compile``), and its code serves
all layers and all sizes of caches. Where it cannot be compiled, it runs as it is. The whole step is
then captured, and replayed as one launch. A step takes as long as reading its weights: padded rows
cost little.

Every step of a plan runs the same kernels on the same shapes. So the bits of a row do not depend on
other rows, which is checked. The order of this file: the cache, the block, the step, its capture,
and the decoder, which makes steps and falls back to the readable blocks.
"""

import functools
import logging
from collections.abc import Callable, Collection
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor, nn

from model.cache import PADDED_ROWS, KVCache, static_capacity
from model.decoder import Decoder
from model.device import compiled
from model.errors import typed_line
from model.fast import PreparedDecoder
from model.fast.four_bits import FourBitBlocks, gpu_bits
from model.layers import Positions, attend_by_formula, causal_mask, rotary_table, wide_dtype
from model.plan import LayerPlan
from model.steps import Abilities, Steps

ROWS = 16  # tokens of the longest step; a GPU multiplies 16 rows at a time anyway
assert ROWS <= PADDED_ROWS, "static_capacity has room for the padded rows"
# Share of the largest logit: more than bf16 rounding gives in deep models, less than a wrong
# address gives.
TOLERANCE = 0.2


class StaticCache:
    """Tensors that one text at a time uses as its cache, and the steps that are made for them.

    A step reads all positions of the tensors. So they begin short, and double when a text needs
    more.
    """

    @torch.inference_mode(False)
    def __init__(self, model: Decoder) -> None:
        self.entries = model.new_cache(static_capacity(1))
        self.steps: dict[LayerPlan, StaticStep] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def make_room(self, end: int) -> None:
        """Lengthen the tensors where positions up to ``end``, and padded rows after them, do not
        fit. Steps are then made anew, for the new addresses.
        """
        if end + ROWS <= self.entries.capacity:
            return
        self.steps.clear()
        capacity = static_capacity(end)
        self.entries.capacity = 0
        # If memory runs out midway, lengths differ, and the next call makes them equal.
        for tensors in (self.entries.keys, self.entries.values):
            for layer, tensor in enumerate(tensors):
                more = capacity - tensor.shape[2]
                tensors[layer] = torch.nn.functional.pad(tensor, (0, 0, 0, more))
        self.entries.capacity = capacity


class TextCache(KVCache):
    """Cache of a text, at first empty, with the tensors of a static cache.

    Its lists ``keys`` and ``values`` are those of the static cache, not copies as in a ``KVCache``:
    so it has the longer tensors as soon as ``make_room`` puts them there.
    """

    def __init__(self, static: StaticCache, capacity: int) -> None:
        static.make_room(1)  # where an earlier text found no memory
        self.static = static
        self.capacity = capacity
        self.keys = static.entries.keys
        self.values = static.entries.values
        self.lengths = [0] * len(self.keys)
        for tensor in (*self.keys, *self.values):
            # a step also reads invalid entries, with a mask, and 0 times NaN would be NaN
            tensor.zero_()

    def claim(self, layers: Collection[int], start: int, count: int) -> None:
        self.check(layers, start, count)
        self.static.make_room(start + count)  # which may find no memory
        super().claim(layers, start, count)


class StaticEntries(NamedTuple):
    """Entries of one layer in a static step: written at the positions ``index``, read over all."""

    keys: Tensor
    values: Tensor
    index: Tensor

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Do as ``KVCache.write``; ``layer`` and ``start`` are ignored."""
        self.keys.index_copy_(2, self.index, keys)
        self.values.index_copy_(2, self.index, values)
        return self.keys, self.values


def attend_statically(
    mask: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Return the attention of a static step: ``model.layers.attend_masked`` with a mask
    ``[G · rows, S]``, by the formula, which a compiler fuses.

    Its two products over all positions occupy a GPU even where heads are few.
    """
    rows = q.reshape(1, k.shape[1], -1, q.shape[3])
    return attend_by_formula(rows, k, v, mask, scale=scale, soft_cap=soft_cap).reshape(q.shape)


def run_block(
    block: nn.Module,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    entries: StaticEntries,
    attention: bool,
    mlp: bool,
) -> Tensor:
    """Run a readable block at static positions: this is what is compiled."""
    positions = Positions(0, 0, *angles, attend=functools.partial(attend_statically, mask))
    return block(x, positions, entries, attention=attention, mlp=mlp)


def run_compiled(
    block: nn.Module,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    entries: StaticEntries,
    *runs: bool,
) -> Tensor:
    """Run a block by code that is compiled once for all numbers of positions."""
    for tensor, dimension in ((mask, 1), (entries.keys, 2), (entries.values, 2)):
        torch._dynamo.mark_dynamic(tensor, dimension)
    return compiled(run_block)(block, x, angles, mask, entries, *runs)


class StaticStep:
    """Step of a plan on a static cache for up to ``rows`` tokens, by the same kernels on the same
    buffers.

    ``run`` is ``run_block`` or ``run_compiled``. ``replay`` replays the captured step, or computes
    it where it is not captured.
    """

    # the buffers outlive the call, and are written in inference mode and outside
    @torch.inference_mode(False)
    def __init__(
        self, model: Decoder, cache: KVCache, plan: LayerPlan, run: Callable[..., Tensor]
    ) -> None:
        self.model = model
        self.cache = cache
        self.plan = plan
        self.run = run
        self.replay: Callable[[], None] = self.compute
        self.rows = 1 if plan.has_low_bits else ROWS
        self.tokens = torch.zeros(1, self.rows, dtype=torch.int64, device=model.device)
        self.start = torch.zeros((), dtype=torch.int64, device=model.device)
        self.angles = {
            rope: rotary_table(
                rope, model.config.head_dim, cache.capacity, model.dtype, model.device
            )
            for rope in set(model.config.ropes)
        }

    def compute(self) -> None:
        """Set ``logits``, ``[1, rows, vocab]``, to those of the tokens in the buffers. Entries of
        padded rows are after the text, where later steps write theirs.
        """
        model = self.model
        config = model.config
        index = self.start + torch.arange(self.rows, device=model.device)
        angles = {
            rope: tuple(table.index_select(0, index) for table in tables)
            for rope, tables in self.angles.items()
        }
        keys = torch.arange(self.cache.capacity, device=model.device)
        masks = {
            window: causal_mask(
                index, keys, window, wide_dtype(model.dtype), self.plan.window
            ).repeat(config.num_heads // config.num_kv_heads, 1)
            for window in set(config.windows)
        }
        x = model.embed(self.tokens)
        for layer, (block, *runs) in enumerate(model.planned.blocks(self.plan)):
            if any(runs):
                x = self.run(
                    block,
                    x,
                    angles[config.ropes[layer]],
                    masks[config.windows[layer]],
                    StaticEntries(self.cache.keys[layer], self.cache.values[layer], index),
                    *runs,
                )
        self.logits = model.logits(x, model.planned.head(self.plan.head))

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        """Return the logits ``[1, T, vocab]`` of the tokens ``[1, T]``, ``rows`` at a time."""
        logits = []
        for part in tokens.split(self.rows, 1):
            count = part.shape[1]
            self.tokens[:, :count].copy_(part)
            self.start.fill_(start)
            self.replay()
            logits.append(self.logits[:, :count].clone())  # the next replay writes there
            start += count
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)


class Recorder:
    """Recorder of CUDA graphs, which share one memory pool."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # A pool whose last graph has died cannot be used again. So this graph is kept.
        self.smallest = self(functools.partial(torch.zeros, 1, device="cuda"))

    def __call__(self, compute: Callable[[], object]) -> Callable[[], None]:
        """Record ``compute`` as a graph; returns the replay.

        It runs once before on the same stream, so that libraries allocate their workspaces outside
        of the graph. Raises what ``compute`` raises, and RuntimeError where it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        # an invalid capture leaves its stream the current one; this makes ``current`` that again
        with torch.cuda.stream(current):
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                compute()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                compute()
        return graph.replay


recorder = functools.cache(Recorder)


class StaticDecoder(PreparedDecoder):
    """``Decoder`` with static steps for a single text. Prompts are the decoder's.

    With ``captures`` its steps are compiled and captured, which needs CUDA. If compiling fails, the
    readable blocks are captured, and a line on stderr says so. If a step fails (an old GPU, no
    memory), in the middle of a text too, it and later ones are the readable blocks'; ``trouble``
    says why. A cache that finds no memory to grow raises torch's error.
    """

    def __init__(self, model: Decoder, captures: bool = True) -> None:
        super().__init__(model)
        model.planned = FourBitBlocks(model)
        self.abilities = Abilities(gpu_bits(model.device, model.dtype), why_rows_vary=None)
        self.run = run_compiled if captures else run_block
        self.captures = captures
        self.free: list[StaticCache] = []

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Return a cache as ``Decoder.new_cache`` does. For a single text it has the tensors and
        the steps of a static cache that no other text uses.
        """
        if batch > 1 or self.trouble:
            return self.model.new_cache(capacity, batch)
        static = self.free.pop() if self.free else StaticCache(self.model)
        text = TextCache(static, capacity)
        finalize(text, self.free.append, static)
        return text

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Compute ``Decoder.forward``: ``[batch, T]`` ids -> ``[batch, T, vocab]``, in static
        steps.
        """
        plan = LayerPlan.of(self.num_layers, plan)
        if isinstance(cache, TextCache):
            self.check(plan, tokens, cache, start)
            # first, since longer tensors have other steps
            cache.claim(plan.attention_layers, start, tokens.shape[1])
            self.make_step(cache, plan)
            if self.trouble is None:
                try:
                    return cache.static.steps[plan](tokens, start)
                except RuntimeError as error:  # of a driver or an allocator
                    self._give_up(error)
        return self.model(tokens, cache, start, plan)  # entries are written again

    @torch.inference_mode()
    def make_step(self, cache: KVCache, plan: LayerPlan | None = None) -> None:
        plan = LayerPlan.of(self.num_layers, plan)
        # once, or once more uncompiled
        while isinstance(cache, TextCache) and plan not in cache.static.steps and not self.trouble:
            try:
                cache.static.steps[plan] = self._new_step(cache.static.entries, plan)
            except Exception as error:  # of compilers, drivers, allocators
                if self.run is run_block:
                    self._give_up(error)
                else:
                    self.run = run_block
                    logging.getLogger(__name__).warning(
                        "[steps are captured uncompiled: %s]", typed_line(error)
                    )

    def _give_up(self, error: Exception) -> None:
        """Note why later steps are the readable blocks'."""
        self.trouble = f"steps run without CUDA graphs: {typed_line(error)}"
        self.abilities = self.abilities._replace(why_rows_vary=Steps.abilities.why_rows_vary)

    def _new_step(self, cache: KVCache, plan: LayerPlan) -> StaticStep:
        """Return the static step of a plan, after ``_check`` has passed it. It runs on the first
        positions of the cache, which are restored.
        """
        kept = self.model.new_cache(3 * ROWS)
        kept.copy_from(cache, 3 * ROWS)
        try:
            step = StaticStep(self.model, cache, plan, self.run)
            if self.captures:
                step.replay = recorder()(step.compute)
            self._check(step)
        finally:
            cache.copy_from(kept, 3 * ROWS)
        return step

    def _check(self, step: StaticStep) -> None:
        """Compare a step's logits with the readable blocks', and a row's with those of it alone:
        ``abilities`` note where the latter differ.

        Raises RuntimeError where they differ from the readable blocks' by more than rounding.
        """
        # a step of the last of 2 · ROWS tokens also writes padded rows after them
        tokens = torch.arange(2 * ROWS, device=self.device)[None] % self.vocab_size
        end = ROWS + step.rows
        expected = self.model(tokens, step.cache, 0, step.plan)[:, ROWS:end]
        found = step(tokens[:, ROWS:end], ROWS)
        alone = step(tokens[:, end - 1 : end], end - 1)
        difference = (found - expected).abs().max()
        if not difference <= TOLERANCE * expected.abs().max():  # NaN fails too
            raise RuntimeError(
                f"a static step's logits are {difference.item():.3g} away from the readable blocks'"
            )
        if not torch.equal(alone, found[:, -1:]):
            self.abilities = self.abilities._replace(
                why_rows_vary="the kernels of this GPU give a row different bits alone and among"
                " others"
            )
