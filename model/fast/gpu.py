"""Static steps on a GPU, as in gpt-fast: a static cache, one compiled block, CUDA graphs.

Launching a kernel takes longer than most kernels of a step run. So a step of a plan always has the
same shape: ``ROWS`` tokens, or one for drafts in low bits, at positions that are tensors, over all
positions of the cache. The readable block is compiled once (``torch.compile``), and its code serves
all layers and all sizes of caches. The whole step is then captured and replayed as one launch; so
is the block itself, where it cannot be compiled. A step takes as long as reading its weights:
padded rows cost little.

Every step of a plan runs the same kernels on the same shapes. So the bits of a row do not depend on
other rows, which is checked. Drafts in four bits use torch's tinygemm kernel, which reads a third
of the bytes of a bf16 product, or one in Triton where weights are not bf16. In eight bits they use
the checkpoint's weights.
"""

import sys
from collections.abc import Callable, Iterable
from functools import cache as cached
from functools import partial
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache, static_capacity
from model.decoder import Abilities, Decoder, Steps
from model.device import compiled
from model.errors import typed_line
from model.fast import PreparedDecoder, gpu_bits
from model.layers import Positions, causal_mask, rotary_table, wide_dtype
from model.plan import LayerPlan
from model.quantise import GROUP, Product, Quantised, Twins, with_parts

ROWS = 16  # tokens of the longest step; a GPU multiplies 16 rows at a time anyway
# Share of the largest logit: more than bf16 rounding gives in deep models, less than a wrong
# address gives.
TOLERANCE = 0.2
JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # products of the same inputs


class StaticEntries(NamedTuple):
    """Layer of a cache for a static step: written at tensor positions, read over all."""

    keys: Tensor
    values: Tensor
    index: Tensor

    def write(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Do as ``LayerCache.write``; ``start`` is ignored."""
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
    """Return masked grouped-query attention (``model.layers.attend_masked``) of a static step, with
    a mask ``[G · rows, S]``, written out: a compiler fuses it.

    The two products over all positions occupy a GPU even where heads are few. Queries are scaled,
    since q·k of a large model can exceed float16. Softmax is in the wide dtype.
    """
    # the query heads of a key head are laid end to end
    rows = (q * scale).reshape(1, k.shape[1], -1, q.shape[3])
    scores = (rows @ k.transpose(2, 3)).to(wide_dtype(q.dtype))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores + mask, dim=-1).to(q.dtype)
    return (weights @ v).reshape(q.shape)


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
    positions = Positions(0, *angles, attend=partial(attend_statically, mask))
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


class Int4Linear(nn.Module):
    """x Wᵀ + b with W in four bits: ``[..., in]`` bf16 -> ``[..., out]`` bf16. It is fast for one
    row, as in drafts.
    """

    def __init__(self, weight: Quantised, bias: Tensor | None) -> None:
        super().__init__()
        codes = weight.codes
        tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack(pairs, tiles))
        middle = weight.zero + 8 * weight.scale  # the kernel's zero is the value of code 8
        self.register_buffer("scale", torch.stack((weight.scale.T, middle.T), -1).contiguous())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scale)
        return (product if self.bias is None else product + self.bias).view(*x.shape[:-1], -1)


class LowBits(Twins):
    """Low-bit twins on a GPU, by a kernel where there is one, and else by the checkpoint's weights.

    Products of the same inputs are one: four launches per layer in place of seven.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, self._product)

    def _product(self, product: nn.Linear | nn.Embedding, bits: int) -> Product:
        plain = (
            product if isinstance(product, nn.Linear) else partial(F.linear, weight=product.weight)
        )
        return self._kernel([product], bits) or plain

    def _new_sublayer(self, sublayer: nn.Module, bits: int) -> nn.Module:
        names = next(names for names in JOINED if hasattr(sublayer, names[0]))
        parts = [getattr(sublayer, name) for name in names]
        joined = self._kernel(parts, bits)
        if joined is None:
            return super()._new_sublayer(sublayer, bits)
        twin = super()._new_sublayer(with_parts(sublayer, dict.fromkeys(names)), bits)
        sizes = [part.out_features for part in parts]
        twin.project = lambda x: joined(x).split(sizes, -1)
        return twin

    @torch.no_grad()
    def _kernel(self, products: list[nn.Module], bits: int) -> Product | None:
        """Return the product by the weights of several, one after another, in few bits; None where
        no kernel takes them.
        """
        model = self.model
        shapes = [product.weight.shape for product in products]
        fits = all(rows % 8 == 0 and columns % GROUP == 0 for rows, columns in shapes)
        if bits not in gpu_bits(model.device, model.dtype) or not fits:
            return None
        rounded = [model.rounded(product, bits) for product in products]
        weight = Quantised(
            *(
                torch.cat([getattr(each, part) for each in rounded])
                for part in ("codes", "scale", "zero")
            )
        )
        biases = [getattr(product, "bias", None) for product in products]
        bias = None if biases[0] is None else torch.cat(biases)
        if model.dtype == torch.bfloat16:
            return Int4Linear(weight, bias)
        from model.fast.four_bits import TritonLinear  # where Triton is installed

        return TritonLinear(weight, bias)


class Recorder:
    """Recorder of CUDA graphs, which share one memory pool."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # A pool whose last graph has died cannot be used again. So this graph is kept.
        self.smallest = self(partial(torch.zeros, 1, device="cuda"))

    def __call__(self, compute: Callable[[], object]) -> Callable[[], None]:
        """Record ``compute`` as a graph; returns the replay.

        It runs once before on the same stream, so that libraries allocate their workspaces outside
        of the graph. Raises what ``compute`` raises, and RuntimeError where it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        try:
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                compute()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                compute()
        except Exception as error:
            # Ctrl-C makes a capture invalid, whose end then raises another error
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise
        finally:
            # an invalid capture leaves its stream the current one
            torch.cuda.set_stream(current)
        return graph.replay


recorder = cached(Recorder)


class StaticStep:
    """Step of a plan on a cache for up to ``rows`` tokens, by the same kernels on the same buffers.

    ``run`` is ``run_block`` or ``run_compiled``. ``replay`` replays the captured step, if it is
    captured.
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
        self.replay: Callable[[], None] | None = None
        self.rows = 1 if plan.has_low_bits else ROWS
        self.tokens = torch.zeros(1, self.rows, dtype=torch.int64, device=model.device)
        self.start = torch.zeros((), dtype=torch.int64, device=model.device)
        config = model.config
        self.angles = {
            rope: rotary_table(rope, config.head_dim, cache.capacity, model.dtype, model.device)
            for rope in set(config.ropes)
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
        groups = config.num_heads // config.num_kv_heads
        masks = {
            window: causal_mask(
                index, keys, window, wide_dtype(model.dtype), self.plan.window
            ).repeat(groups, 1)
            for window in set(config.windows)
        }
        x = model.embed(self.tokens)
        for layer, (attention, mlp) in enumerate(
            zip(self.plan.attention, self.plan.mlp, strict=True)
        ):
            if not (attention or mlp):
                continue
            x = self.run(
                model.twins.block(layer, attention, mlp),
                x,
                angles[config.ropes[layer]],
                masks[config.windows[layer]],
                StaticEntries(self.cache.keys[layer], self.cache.values[layer], index),
                attention > 0,
                mlp > 0,
            )
        self.logits = model.logits(x, model.twins.head(self.plan.head))

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        count = tokens.shape[1]
        self.tokens[:, :count].copy_(tokens)
        self.start.fill_(start)
        (self.replay or self.compute)()
        return self.logits[:, :count].clone()  # a later replay writes to the same memory


class TextCache(KVCache):
    """Cache of a text: the tensors of a static cache, which are lengthened when it needs more."""

    def __init__(self, static: KVCache, capacity: int, make_room: Callable[[int], None]) -> None:
        self.capacity = capacity
        self.lengths = [0] * len(static.keys)
        self.keys = static.keys
        self.values = static.values
        self.make_room = make_room

    def claim(self, layers: Iterable[int], start: int, count: int) -> None:
        super().claim(layers, start, count)
        self.make_room(start + count)


class StaticDecoder(PreparedDecoder):
    """``Decoder`` with static steps for a single text. Prompts are the decoder's.

    With ``captures`` its steps are compiled and captured, which needs CUDA. If compiling fails, the
    readable blocks are captured, and a line on stderr says so. If a step fails (an old GPU, no
    memory), in the middle of a text too, it and later ones are the readable blocks'; ``trouble``
    says why.

    Steps are made for the tensors of a *static cache*. One text uses these at a time, until its own
    cache, which has the same tensors, is gone. They begin short, and double when the text needs it:
    a step reads all of their positions.
    """

    def __init__(self, model: Decoder, captures: bool = True) -> None:
        super().__init__(model)
        model.twins = LowBits(model)
        self.abilities = Abilities(gpu_bits(model.device, model.dtype), why_rows_vary=None)
        self.run = run_compiled if captures else run_block
        self.captures = captures
        self.steps: dict[KVCache, dict[LayerPlan, StaticStep]] = {}  # by static cache and plan
        self.used: WeakKeyDictionary[KVCache, KVCache] = WeakKeyDictionary()  # by a text's cache

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Return a cache as ``Decoder.new_cache`` does; for a single text it takes the tensors and
        the steps of a static cache not in use.
        """
        if batch > 1 or self.trouble:
            return self.model.new_cache(capacity, batch)
        static = self._free_cache(static_capacity(capacity))
        for entries in (*static.keys, *static.values):
            # a step also reads invalid ones, with a mask, and 0 times NaN would be NaN
            entries.zero_()
        cache = TextCache(static, capacity, partial(self._make_room, static))
        self.used[cache] = static
        return cache

    def _free_cache(self, longest: int) -> KVCache:
        """Return a static cache that is not used, made where there is none that is short enough."""
        used = set(self.used.values())
        for static in self.steps:
            if static not in used and static.capacity <= longest:
                return static
        self.steps = {static: self.steps[static] for static in used}  # longer ones are freed
        with torch.inference_mode(False):
            static = self.model.new_cache(static_capacity(1))
        self.steps[static] = {}
        return static

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_room(self, static: KVCache, end: int) -> None:
        """Lengthen the tensors of a static cache where positions up to ``end``, and padded rows
        after them, do not fit. Its steps are then made anew.
        """
        if end + ROWS <= static.capacity:
            return
        self.steps[static] = {}
        more = static_capacity(end) - static.capacity
        static.capacity += more
        for tensors in (static.keys, static.values):
            for layer, entries in enumerate(tensors):
                tensors[layer] = F.pad(entries, (0, 0, 0, more))

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
        plan = plan or LayerPlan.full(self.num_layers)
        if cache in self.used:  # first, since longer tensors have other steps
            cache.claim(plan.attention_layers, start, tokens.shape[1])
        step = self.step_of(cache, plan)
        if step is None:
            return self.model(tokens, cache, start, plan)
        logits = []
        try:
            for first, part in zip(count(start, step.rows), tokens.split(step.rows, 1)):
                logits.append(step(part, first))
        except RuntimeError as error:  # of a driver or an allocator; entries are written again
            self._give_up(error)
            return self.model(tokens, cache, start, plan)
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)

    def _give_up(self, error: Exception) -> None:
        """Note why later steps are the readable blocks'."""
        self.trouble = f"steps run without CUDA graphs: {typed_line(error)}"
        why = Steps.abilities.why_rows_vary
        self.abilities = self.abilities._replace(why_rows_vary=why)

    @torch.inference_mode()
    def step_of(self, cache: KVCache | None, plan: LayerPlan | None = None) -> StaticStep | None:
        plan = plan or LayerPlan.full(self.num_layers)
        if cache not in self.used or self.trouble:
            return None
        static = self.used[cache]
        steps = self.steps[static]
        while plan not in steps and not self.trouble:
            try:
                steps[plan] = self._new_step(static, plan)
            except Exception as error:  # of compilers, drivers, allocators
                if self.run is run_block:
                    self._give_up(error)
                else:
                    self.run = run_block
                    print(f"[steps are captured uncompiled: {typed_line(error)}]", file=sys.stderr)
        return steps.get(plan)

    def _new_step(self, cache: KVCache, plan: LayerPlan) -> StaticStep:
        """Return a static step of a plan that has passed ``_check``. It runs on the first positions
        of the cache, which are restored.
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
        """Compare a step's logits with the readable blocks', and a row's with those of it alone.

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
            why = "the kernels of this GPU give a row different bits alone and among others"
            self.abilities = self.abilities._replace(why_rows_vary=why)
