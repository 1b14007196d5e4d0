"""Static steps on a GPU, as in gpt-fast: a static cache, one compiled block, CUDA graphs.

Launching a kernel takes longer than most kernels of a step run. So a step of a plan always has the
same shape: ``ROWS`` tokens, or one for drafts in low bits, at positions that are tensors, over all
positions of the cache. The readable block is compiled once (``torch.compile``). All layers share
its code: their weights are arguments. The whole step is then captured and replayed as one launch. A
step takes as long as reading its weights: padded rows cost little.

Every step of a plan runs the same kernels on the same shapes. So the bits of a row do not depend on
other rows, which is checked. Drafts in four bits use torch's tinygemm kernel, which reads a third
of the bytes of a bf16 product, or one in Triton where weights are not bf16. In eight bits they use
the checkpoint's weights.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from model.cache import KVCache, static_capacity
from model.decoder import Abilities, Decoder, Steps
from model.device import compiled as compiled_code
from model.fast import PreparedDecoder, gpu_bits
from model.fast.graphs import recorder_of
from model.layers import Positions, causal_mask, rotary_table, wide_dtype
from model.plan import LayerPlan
from model.quantise import GROUP, Quantised, Twins

ROWS = 16  # tokens of the longest step; a GPU multiplies 16 rows at a time anyway
# Share of the largest logit: more than bf16 rounding gives in deep models, less than a wrong
# address gives.
TOLERANCE = 0.2


@dataclass(frozen=True)
class StaticEntries:
    """Layer of a cache for a static step: written at tensor positions, read over all."""

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
    """Return masked grouped-query attention (``model.layers.attend_masked``) of a static step, with
    a mask ``[G · rows, S]``, written out: a compiler fuses it.

    The two products over all positions occupy a GPU even where heads are few. Softmax is in the
    wide dtype.
    """
    # the query heads of a key head are laid end to end
    rows = q.reshape(1, k.shape[1], -1, q.shape[3])
    scores = (rows @ k.transpose(2, 3)).to(wide_dtype(q.dtype)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores + mask, dim=-1).to(q.dtype)
    return (weights @ v).reshape(q.shape)


def run_block(
    block: nn.Module,
    weights: dict[str, Tensor],
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    entries: StaticEntries,
    attention: bool,
    mlp: bool,
) -> Tensor:
    """Run the readable block with the ``weights`` of another layer: this is what is compiled."""
    positions = Positions(0, *angles, partial(attend_statically, mask))
    return functional_call(
        block, weights, (x, positions, entries), {"attention": attention, "mlp": mlp}
    )


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


@torch.no_grad()
def low_bits(
    model: Decoder, product: nn.Linear | nn.Embedding, bits: int
) -> Callable[[Tensor], Tensor]:
    """Return a low-bit twin of a product, or the product by the checkpoint's weights where the
    kernel does not take it.
    """
    is_linear = isinstance(product, nn.Linear)
    rows, columns = product.weight.shape
    if bits in gpu_bits(model.device, model.dtype) and rows % 8 == 0 and columns % GROUP == 0:
        bias = product.bias if is_linear else None
        if model.dtype == torch.bfloat16:
            return Int4Linear(model.rounded(product, bits), bias)
        from model.fast.four_bits import TritonLinear  # where Triton is installed

        return TritonLinear(model.rounded(product, bits), bias)
    return product if is_linear else partial(F.linear, weight=product.weight)


class StaticStep:
    """Step of a plan on a cache for up to ``rows`` tokens, by the same kernels on the same buffers.

    ``run`` is ``run_block`` or its compiled code. ``replay`` replays the captured step, if it is
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
        self.angles = {
            rope: rotary_table(
                rope, model.config.head_dim, cache.capacity, model.dtype, model.device
            )
            for rope in set(model.config.ropes)
        }
        self.head = model.twins.head(plan.head)
        # Code is compiled for one module. So all layers run as one block, the template, to which
        # ``functional_call`` gives the weights of each. Its own are never read: it is a copy on the
        # meta device, where they take no memory. A kernel for low bits is another module, so there
        # is a template for each kind of modules.
        templates: dict[tuple[type, ...], nn.Module] = {}
        self.blocks: list[tuple[nn.Module, dict[str, Tensor]]] = []  # of each layer
        for layer, pair in enumerate(zip(plan.attention, plan.mlp, strict=True)):
            block = model.twins.block(layer, *pair)
            kinds = tuple(map(type, block.modules()))
            if kinds not in templates:
                templates[kinds] = copy.deepcopy(block).to("meta")
            self.blocks.append((templates[kinds], block.state_dict(keep_vars=True)))

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
            window: causal_mask(index, keys, window, wide_dtype(model.dtype)).repeat(groups, 1)
            for window in set(config.windows)
        }
        x = model.embed(self.tokens)
        for layer, (template, weights) in enumerate(self.blocks):
            runs = self.plan.attention[layer] > 0, self.plan.mlp[layer] > 0
            if not any(runs):
                continue
            entries = StaticEntries(self.cache.keys[layer], self.cache.values[layer], index)
            # a template is a copy of another layer: angles and mask are those of this one
            x = self.run(
                template,
                weights,
                x,
                angles[config.ropes[layer]],
                masks[config.windows[layer]],
                entries,
                *runs,
            )
        self.logits = model.logits(x, self.head)

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        count = tokens.shape[1]
        self.tokens[:, :count].copy_(tokens)
        self.start.fill_(start)
        (self.replay or self.compute)()
        return self.logits[:, :count].clone()  # a later replay writes to the same memory


class StaticDecoder(PreparedDecoder):
    """``Decoder`` with static steps for a single text. Prompts are the decoder's.

    With ``compiled`` its steps are compiled and captured, which needs CUDA. If a step fails (no
    compiler, an old GPU, no memory), in the middle of a text too, it and later ones are the
    readable blocks'; ``trouble`` says why.

    Steps are made for the tensors of a *static cache*. One text uses these at a time, until its own
    cache, which has the same tensors, is gone.
    """

    def __init__(self, model: Decoder, compiled: bool = True) -> None:
        super().__init__(model)
        model.twins = Twins(model, partial(low_bits, model))
        self.abilities = Abilities(gpu_bits(model.device, model.dtype), why_rows_vary=None)
        self.run = compiled_code(run_block) if compiled else run_block
        self.captures = compiled
        self.steps: dict[KVCache, dict[LayerPlan, StaticStep]] = {}  # by static cache and plan
        self.used: WeakKeyDictionary[KVCache, KVCache] = WeakKeyDictionary()  # by a text's cache

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Return a cache as ``Decoder.new_cache`` does; for a single text it takes the tensors and
        the steps of a static cache not in use.
        """
        if batch > 1 or self.trouble:
            return self.model.new_cache(capacity, batch)
        static = self._free_cache(capacity)
        for entries in (*static.keys, *static.values):
            # a step also reads invalid ones, with a mask, and 0 times NaN would be NaN
            entries.zero_()
        cache = copy.copy(static)
        cache.capacity = capacity
        cache.lengths = [0] * self.num_layers
        self.used[cache] = static
        return cache

    def _free_cache(self, capacity: int) -> KVCache:
        """Return the static cache that is long enough and not used, made where there is none."""
        used = set(self.used.values())
        for static in self.steps:
            if static not in used and static.capacity >= capacity + ROWS:
                return static
        self.steps = {static: self.steps[static] for static in used}  # too small ones are freed
        with torch.inference_mode(False):
            static = self.model.new_cache(static_capacity(capacity))
        self.steps[static] = {}
        return static

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
        step = None if cache is None else self.step_of(cache, plan)
        if step is None:
            return self.model(tokens, cache, start, plan)
        logits = []
        try:
            for first, part in zip(count(start, step.rows), tokens.split(step.rows, 1)):
                cache.claim(step.plan.attention_layers, first, part.shape[1])
                logits.append(step(part, first))
        except RuntimeError as error:  # of a driver or an allocator; entries are written again
            self._give_up(error)
            return self.model(tokens, cache, start, plan)
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)

    def _give_up(self, error: Exception) -> None:
        """Note why later steps are the readable blocks'."""
        line = " ".join(f"{type(error).__name__}: {error}".split())
        self.trouble = f"steps run without CUDA graphs: {line:.300}"
        why = Steps.abilities.why_rows_vary
        self.abilities = self.abilities._replace(why_rows_vary=why)

    @torch.inference_mode()
    def step_of(self, cache: KVCache, plan: LayerPlan | None = None) -> StaticStep | None:
        plan = plan or LayerPlan.full(self.num_layers)
        static = self.used.get(cache)
        if static is None or self.trouble:
            return None
        steps = self.steps[static]
        if plan not in steps:
            try:
                steps[plan] = self._new_step(static, plan)
            except Exception as error:  # of compilers, drivers, allocators
                self._give_up(error)
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
                step.replay = recorder_of(self.device)(step.compute)
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
