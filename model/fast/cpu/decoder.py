"""Decoder on a CPU whose short steps are one compiled function; torch reads prompts, on the same weights."""

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

from model.cache import KVCache
from model.decoder import Decoder
from model.fast.cpu import KERNELS
from model.fast.cpu.dot import BF16, F16, F32, LOW_BITS
from model.fast.cpu.pack import packed
from model.fast.cpu.rounding import round_groups
from model.fast.cpu.step import ABSENT, MATRICES, Batch, O, Weights, step
from model.fast.flash import attend_by_flash
from model.layers import RMSNorm, rotary_table
from model.plan import FULL, LayerPlan
from model.quantise import rounded

KINDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
MOST_ROWS = 64  # tokens per step
STEPPING = threading.Lock()  # Numba's threads run one step at a time


class FastDecoder:
    """``Decoder`` on a CPU in bfloat16, float16 or float32, with compiled steps; all else is the decoder's.

    The bits of a position's logits and cache entries do not depend on the other rows of the step, of this text or of
    others. (``prefill`` runs in long chunks and does not promise this.) Weights in low bits are copies, made once when
    a plan first asks for them.
    """

    step, why_rows_vary = staticmethod(step), None
    fast_bits = tuple(LOW_BITS)

    def __init__(self, model: Decoder) -> None:
        if not step.signatures and not any(KERNELS.glob("*.nbc")):
            print("compiling the decoding step for this machine, once: about 15 s", file=sys.stderr)
        self.model, model.attend, model.rounded = model, attend_by_flash, partial(rounded, round_groups=round_groups)
        self.plans: dict[LayerPlan, Weights] = {}
        self.low_bits: dict[tuple[nn.Module, int], Tensor] = {}  # packed copies of weights
        self.biases: dict[nn.Module, Tensor] = {}  # in float32

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan now."""
        self._weights(plan, 1)

    def forget_low_bits(self) -> None:
        """Free all low-bit copies, and the tables of plans with their addresses."""
        self.plans.clear()
        self.low_bits.clear()

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        """Logits after each token at ``[start, start + T)``: ``[batch, T]`` ids -> ``[batch, T, vocab]`` float32."""
        if cache is None:
            return self.model(tokens, cache, start, plan)
        return self.together([(tokens, cache, start)], plan)[0]

    def together(self, calls: Sequence[tuple[Tensor, KVCache, int]], plan: LayerPlan | None = None) -> list[Tensor]:
        """Logits of several calls ``(tokens, cache, start)`` under one plan, in as few steps as possible.

        Each call has its own cache. The logits of a call have the same bits as alone.
        """
        plan = plan or LayerPlan.full(self.model.num_layers)
        for tokens, cache, start in calls:
            for layer, bits in enumerate(plan.attention):
                if bits:
                    cache.claim(layer, start, tokens.shape[1])
        batch = Batch(*map(np.concatenate, zip(*map(rows_of, calls), strict=True)))
        weights = self._weights(plan, max(cache.capacity for _, cache, _ in calls))
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        parts = []
        for first in range(0, len(batch.tokens), MOST_ROWS):  # a text's earlier tokens first
            with STEPPING:
                part = self.step(weights, Batch(*(each[first : first + MOST_ROWS] for each in batch)))
            parts.append(torch.from_numpy(part))
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        shapes = [tokens.shape for tokens, _, _ in calls]
        parts = logits.split([shape.numel() for shape in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _weights(self, plan: LayerPlan, positions: int) -> Weights:
        """Arguments of the step for a plan, with rotary angles for at least ``positions`` positions."""
        weights = self.plans.get(plan)
        if weights is None or len(weights.cos) < positions:
            weights = self.plans[plan] = self._tables(plan, 1 << (positions - 1).bit_length())
        return weights

    @torch.no_grad()
    def _tables(self, plan: LayerPlan, positions: int) -> Weights:
        model, config = self.model, self.model.config
        matrices = np.full((config.num_layers, 7, 5), ABSENT)
        for layer, (block, *bits) in enumerate(zip(model.layers, plan.attention, plan.mlp, strict=True)):
            for number, name in enumerate(MATRICES):
                if each := bits[number > O]:
                    matrices[layer, number] = self._matrix(block.get_submodule(name), each)
        head = np.array([self._matrix(model.lm_head or model.embed_tokens, plan.head)])
        cos, sin = rotary_table(config.rope, config.head_dim, positions, torch.float32, model.device)
        half = config.head_dim // 2
        norms = [[scale_of(part) for part in block.children() if isinstance(part, RMSNorm)] for block in model.layers]
        return Weights(
            kind=KINDS[model.dtype],
            embedding=model.embed_tokens.weight.data_ptr(),
            embedding_scale=np.float32([model.embedding_scale]),
            eps=np.float32(config.norm_eps),
            attention_scale=np.float32(config.attention_scale),
            attention_cap=np.float32(config.attention_soft_cap or 0),
            final_cap=np.float32(config.final_soft_cap or 0),
            is_gemma=config.family == "gemma2",
            matrices=matrices,
            head=head,
            norms=np.stack(norms).reshape(config.num_layers, 2, -1, config.hidden_size),
            final_norm=scale_of(model.norm),
            windows=np.array([window or 0 for window in config.windows]),
            cos=cos[:, :half].contiguous().numpy(),
            sin=sin[:, half:].contiguous().numpy(),
        )

    def _matrix(self, product: nn.Linear | nn.Embedding, bits: int) -> list[int]:
        """Row of a table for a weight in ``bits`` bits: kind, address, bytes per row, rows, address of its bias."""
        weight, kind, bias = product.weight, KINDS[self.model.dtype], ABSENT
        if bits != FULL:
            kind = LOW_BITS[bits]
            if (product, bits) not in self.low_bits:
                self.low_bits[product, bits] = packed(self.rounded(product, bits))
            weight = self.low_bits[product, bits]
        if getattr(product, "bias", None) is not None:
            bias = self.biases.setdefault(product, product.bias.float()).data_ptr()
        return [kind, weight.data_ptr(), weight.stride(0) * weight.itemsize, len(weight), bias]


def scale_of(norm: RMSNorm) -> np.ndarray:
    """Factors of a norm, ``[hidden]`` float32; Gemma-2 stores them less one."""
    return (norm.weight.detach().float() + (1 - norm.neutral)).numpy()


def rows_of(call: tuple[Tensor, KVCache, int]) -> Batch:
    """Rows of one call, text by text."""
    tokens, cache, start = call
    batch, count = tokens.shape
    (text_stride, head_stride, *_), size = cache.keys[0].stride(), cache.keys[0].itemsize
    pairs = zip(cache.keys, cache.values, strict=True)
    first = np.array([[keys.data_ptr(), values.data_ptr()] for keys, values in pairs])
    entries = np.arange(batch)[:, None, None] * (text_stride * size) + first
    return Batch(
        tokens=tokens.numpy().ravel(),
        positions=np.tile(np.arange(start, start + count), batch),
        entries=np.repeat(entries, count, 0),
        head_bytes=np.full(batch * count, head_stride * size),
    )
