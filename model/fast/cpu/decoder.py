"""Decoder on a CPU: short steps are one compiled function, prompts are read by torch.

Long prompts attend by torch's fused kernel. Called by name, it also returns the logarithm of each
softmax's divisor. With it, the attentions of the same queries to two sets of keys can be joined. So
the keys before a prompt's chunk need no mask, and within the chunk the kernel skips the masked half
of the scores.
"""

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from model import FULL, Decoder, KVCache, LayerPlan
from model.decoder import Abilities
from model.fast import PreparedDecoder
from model.fast.cpu.dot import BLOCK_ROWS, CONVERTS_FLOAT16, LOW_BITS
from model.fast.cpu.kernels import KERNELS, LANES
from model.fast.cpu.rounding import KINDS, pack
from model.fast.cpu.step import MATRICES, Batch, O, Weights, run_step, step
from model.fast.cpu.tasks import MATRIX, attention_task, input_task, product_task
from model.layers import RMSNorm, attend_causally, rotary_table

MOST_ROWS = 64  # tokens per step
UNLIMITED = 1 << 60  # positions
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class FastDecoder(PreparedDecoder):
    """``Decoder`` on a CPU in bfloat16, float16 or float32, with compiled steps.

    The bits of a position's logits and cache entries do not depend on the other rows of the step,
    of this text or of others. (``prefill``, in long chunks, does not promise this.) Low-bit copies
    are made when a plan first needs them, or before, one by one: ``missing_copies``, ``make_copy``.
    On a processor that cannot convert float16, such as Intel's before 2012, a model in float16
    becomes one in float32.
    """

    abilities = Abilities(tuple(LOW_BITS), shares_steps=True, why_rows_vary=None)

    def __init__(self, model: Decoder) -> None:
        if not run_step.signatures and not any(KERNELS.glob("*.nbc")):
            print("compiling the decoding step for this machine, once: about 15 s", file=sys.stderr)
        if model.dtype == torch.float16 and not CONVERTS_FLOAT16:
            model.float()
        super().__init__(model)
        model.attend = attend_by_flash
        self.kind = KINDS[model.dtype]
        self.full = LayerPlan.full(self.num_layers)
        self.plans: dict[LayerPlan, Weights] = {}
        # The owners of the memory that ``Weights`` give by address, beside ``model``.
        self.low_bits: dict[tuple[nn.Module, int], Tensor] = {}  # packed copies of weights
        self.biases: dict[nn.Module, Tensor] = {}  # in float32
        # The first step loads the compiled code: a fifth of a second that belongs to no text.
        self(torch.zeros(1, 1, dtype=torch.int64), model.new_cache(1))

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan now."""
        if plan not in self.plans:
            self._weights(plan, 1)

    def missing_copies(self, plan: LayerPlan) -> list[tuple[nn.Linear | nn.Embedding, int]]:
        """Weights, each with its bits, whose low-bit copies a plan needs and that are not made."""
        return [
            (product, bits)
            for product, bits in self._products(plan)
            if bits not in (0, FULL) and (product, bits) not in self.low_bits
        ]

    def _products(self, plan: LayerPlan) -> Iterator[tuple[nn.Linear | nn.Embedding, int]]:
        """Weights of the blocks in the order of the step's tables, and of the head, with bits."""
        for block, attention, mlp in zip(self.model.layers, plan.attention, plan.mlp, strict=True):
            for number, name in enumerate(MATRICES):
                yield block.get_submodule(name), attention if number <= O else mlp
        yield self.model.lm_head or self.model.embed_tokens, plan.head

    def make_copy(self, product: nn.Linear | nn.Embedding, bits: int) -> Iterator[None]:
        """Make the low-bit copy of one weight, by the importance of its inputs, in pieces of a
        millisecond or two: see ``pack``.
        """
        importance = self.importance.get(product)
        self.low_bits[product, bits] = yield from pack(product.weight.detach(), bits, importance)

    def take_copy(self, product: nn.Linear | nn.Embedding, bits: int, content: Tensor) -> None:
        """Use the bytes ``[n]`` uint8 of a copy that was made before."""
        self.low_bits[product, bits] = content.view(-(-len(product.weight) // LANES), -1)

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Logits ``[batch, T, vocab]`` float32 after tokens ``[batch, T]`` from ``start`` on."""
        if cache is None:
            return self.model(tokens, cache, start, plan)
        return self.together([(tokens, cache, start)], plan)[0]

    def together(
        self, calls: Sequence[tuple[Tensor, KVCache, int]], plan: LayerPlan | None = None
    ) -> list[Tensor]:
        """Logits of calls ``(tokens, cache, start)`` under one plan, in as few steps as possible.

        Each call has its own cache. The logits of a call have the same bits as alone.
        """
        plan = plan or self.full
        for tokens, cache, start in calls:
            cache.claim(plan.attention_layers, start, tokens.shape[1])
        batch = Batch(*map(np.concatenate, zip(*(rows_of(*call) for call in calls), strict=True)))
        positions = max(cache.capacity for _, cache, _ in calls)
        weights = self.plans.get(plan)
        if weights is None or weights.cos.shape[1] < positions:
            weights = self._weights(plan, positions)
        steps = [
            step(weights, Batch(*(each[first : first + MOST_ROWS] for each in batch)))
            for first in range(0, len(batch.tokens), MOST_ROWS)
        ]
        logits = torch.from_numpy(np.concatenate(steps) if len(steps) > 1 else steps[0])
        by_call = logits.split([tokens.numel() for tokens, _, _ in calls])
        return [each.view(*call[0].shape, -1) for each, call in zip(by_call, calls, strict=True)]

    @torch.no_grad()
    def _weights(self, plan: LayerPlan, positions: int) -> Weights:
        """New arguments of the step for a plan, with rotary angles for these positions at least."""
        for missing in self.missing_copies(plan):
            list(self.make_copy(*missing))
        model = self.model
        config = model.config
        size = 1 << (positions - 1).bit_length()
        *matrices, head = (self._matrix(*each) for each in self._products(plan))
        norms = [
            scales(part)
            for block in model.layers
            for part in block.children()
            if isinstance(part, RMSNorm)
        ]
        head_norms = [
            [scales(block.self_attn.q_norm), scales(block.self_attn.k_norm)]
            for block in model.layers
            if config.head_norms
        ]
        ropes = list(dict.fromkeys(config.ropes))
        tables = [
            rotary_table(rope, config.head_dim, size, torch.float32, model.device) for rope in ropes
        ]
        cos, sin = map(torch.stack, zip(*tables, strict=True))
        self.plans[plan] = Weights(
            kind=self.kind,
            embedding=model.embed_tokens.weight.data_ptr(),
            embedding_scale=np.float32(model.embedding_scale),
            eps=np.float32(config.norm_eps),
            attention_task=attention_task(self.kind),
            attention_factors=np.array(
                [config.attention_scale, config.attention_soft_cap or 0], np.float32
            ),
            final_soft_cap=np.float32(config.final_soft_cap or 0),
            is_gemma=config.block == "gemma2",
            matrices=np.array(matrices, MATRIX).reshape(config.num_layers, len(MATRICES)),
            head=np.array([head], MATRIX),
            norms=np.stack(norms).reshape(config.num_layers, 2, -1, config.hidden_size),
            final_norm=scales(model.norm),
            head_norms=np.array(head_norms, np.float32).reshape(-1, 2, config.head_dim),
            windows=np.array([window or UNLIMITED for window in config.windows]),
            ropes=np.array([ropes.index(rope) for rope in config.ropes]),
            cos=cos.chunk(2, 2)[0].contiguous().numpy(),
            sin=sin.chunk(2, 2)[1].contiguous().numpy(),
        )
        return self.plans[plan]

    def _matrix(self, product: nn.Linear | nn.Embedding, bits: int) -> tuple[int, ...]:
        """Record ``tasks.MATRIX`` of a weight in ``bits`` bits."""
        if not bits:
            return (0,) * len(MATRIX)
        kind = LOW_BITS.get(bits, self.kind)
        weight = product.weight if bits == FULL else self.low_bits[product, bits]
        bias = 0
        if getattr(product, "bias", None) is not None:
            bias = self.biases.setdefault(product, product.bias.float()).data_ptr()
        rows = BLOCK_ROWS if bits == FULL else 1  # of ``weight`` in a block
        return (  # in the order of the record
            input_task(kind),
            product_task(kind),
            weight.data_ptr(),
            weight.stride(0) * weight.itemsize * rows,
            -(-len(weight) // rows),
            len(product.weight),
            bias,
        )


def scales(norm: RMSNorm) -> np.ndarray:
    """Factors by which a norm scales, float32."""
    return (norm.weight.float() + (1 - norm.neutral)).numpy()


def rows_of(tokens: Tensor, cache: KVCache, start: int) -> Batch:
    """Rows of one call, text by text."""
    texts, count = tokens.shape
    return Batch(
        tokens=tokens.numpy().ravel(),
        positions=np.arange(texts * count) % count + start,
        entries=cache.addresses.numpy().repeat(count, 0),
        head_bytes=np.full(texts * count, cache.keys[0].stride(1) * cache.keys[0].itemsize),
    )


def attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, *, scale: float, soft_cap: float | None
) -> Tensor:
    """``model.layers.attend_causally``, without a mask where the last T of S positions attend to
    all before them.

    q ``[B, H, T, D]``, k and v ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``.
    """
    count = q.shape[2]
    size = k.shape[2]
    if count in (1, size) or soft_cap is not None or (window is not None and size > window):
        return attend_causally(q, k, v, window, scale=scale, soft_cap=soft_cap)
    before = size - count
    chunk = FLASH(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
    earlier = FLASH(q, k[:, :, :before], v[:, :, :before], scale=scale)
    out, log_sums = (torch.stack(pair) for pair in zip(chunk, earlier, strict=True))
    shares = log_sums.softmax(0).reshape(out.shape[:-1])
    return (out * shares[..., None]).sum(0).to(q.dtype)
