"""Decoder on a CPU whose short steps are one compiled function; torch reads prompts, on the same weights."""

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.decoder import Decoder
from model.fast.cpu import KERNELS
from model.fast.cpu.dot import BF16, BLOCK, F16, F32, GROUP, LANES, LOW_BITS
from model.fast.cpu.rounding import judge
from model.fast.cpu.step import ABSENT, MATRICES, Batch, O, Weights, step
from model.fast.flash import attend_by_flash
from model.layers import RMSNorm, rotary_table
from model.plan import FULL, LayerPlan
from model.quantise import Quantised, rounded

KINDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
MOST_ROWS = 64  # tokens per step
STEPPING = threading.Lock()  # Numba's threads run one step at a time


class FastDecoder:
    """``Decoder`` on a CPU in bfloat16, float16 or float32, with compiled steps; all else is the decoder's.

    The bits of a position's logits and cache entries do not depend on the other rows of the step, of this text or of
    others. (``prefill``, in long chunks, does not promise this.) Low-bit copies are made when a plan first needs them.
    """

    step, why_rows_vary = staticmethod(step), None
    fast_bits = tuple(LOW_BITS)

    def __init__(self, model: Decoder) -> None:
        if not step.signatures and not any(KERNELS.glob("*.nbc")):
            print("compiling the decoding step for this machine, once: about 15 s", file=sys.stderr)
        self.model, model.attend, model.rounded = model, attend_by_flash, partial(rounded, judge=judge)
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
        steps = [slice(first, first + MOST_ROWS) for first in range(0, len(batch.tokens), MOST_ROWS)]
        with STEPPING:  # a text's earlier tokens first
            parts = [torch.from_numpy(self.step(weights, Batch(*(each[part] for each in batch)))) for part in steps]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        shapes = [tokens.shape for tokens, _, _ in calls]
        parts = logits.split([shape.numel() for shape in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    @torch.no_grad()
    def _weights(self, plan: LayerPlan, positions: int) -> Weights:
        """Arguments of the step for a plan, with rotary angles for at least ``positions`` positions."""
        weights = self.plans.get(plan)
        if weights is not None and len(weights.cos) >= positions:
            return weights
        model, config, size = self.model, self.model.config, 1 << (positions - 1).bit_length()
        matrices = np.full((config.num_layers, len(MATRICES), 5), ABSENT)
        for layer, (block, attention, mlp) in enumerate(zip(model.layers, plan.attention, plan.mlp, strict=True)):
            for number, name in enumerate(MATRICES):
                if bits := attention if number <= O else mlp:
                    matrices[layer, number] = self._matrix(block.get_submodule(name), bits)
        norms = [part for block in (*model.layers, model) for part in block.children() if isinstance(part, RMSNorm)]
        *factors, final_norm = ((norm.weight.float() + (1 - norm.neutral)).numpy() for norm in norms)  # as in RMSNorm
        cos, sin = rotary_table(config.rope, config.head_dim, size, torch.float32, model.device)
        half = config.head_dim // 2
        self.plans[plan] = Weights(
            kind=KINDS[model.dtype],
            embedding=model.embed_tokens.weight.data_ptr(),
            embedding_scale=np.float32([model.embedding_scale]),
            eps=np.float32(config.norm_eps),
            attention_scale=np.float32(config.attention_scale),
            attention_cap=np.float32(config.attention_soft_cap or 0),
            final_cap=np.float32(config.final_soft_cap or 0),
            is_gemma=config.family == "gemma2",
            matrices=matrices,
            head=np.array([self._matrix(model.lm_head or model.embed_tokens, plan.head)]),
            norms=np.stack(factors).reshape(config.num_layers, 2, -1, config.hidden_size),
            final_norm=final_norm,
            windows=np.array([window or 0 for window in config.windows]),
            cos=cos[:, :half].contiguous().numpy(),
            sin=sin[:, half:].contiguous().numpy(),
        )
        return self.plans[plan]

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


def rows_of(call: tuple[Tensor, KVCache, int]) -> Batch:
    """Rows of one call, text by text."""
    tokens, cache, start = call
    batch, count = tokens.shape
    (text_stride, head_stride, *_), size = cache.keys[0].stride(), cache.keys[0].itemsize
    entries = np.arange(batch)[:, None, None] * (text_stride * size) + np.array(cache.addresses)
    return Batch(
        tokens=tokens.numpy().ravel(),
        positions=np.tile(np.arange(start, start + count), batch),
        entries=np.repeat(entries, count, 0),
        head_bytes=np.full(batch * count, head_stride * size),
    )


def packed(rounded: Quantised) -> Tensor:
    """Codes with their scales, uint8 ``[out, bytes]``: each row is an operand of ``dot.multiply_codes``.

    Columns are padded to whole blocks of two groups, and the words of four codes of both groups alternate. In eight
    bits a byte is a code plus 128. Otherwise a plane of four bits per code comes first: byte i of a block holds code i
    in its lower half and code i + 32 in its upper half. In six bits a plane of the two highest bits follows: byte i
    holds those of the codes i, i + 16, i + 32 and i + 48.
    """
    out, columns = rounded.codes.shape
    codes = F.pad(rounded.codes, (0, -columns % BLOCK)).view(out, -1, 2, GROUP // 4, 4)
    codes = codes.transpose(2, 3).reshape(out, -1, BLOCK)
    if rounded.bits == 8:
        return torch.cat((codes.flatten(1).view(torch.uint8) + 128, rounded.scale.view(torch.uint8)), 1)
    low, high = (codes & 15).unflatten(2, (2, -1)).unbind(2)
    planes = [low | high << 4]
    if rounded.bits == 6:
        parts = (codes >> 4).unflatten(2, (4, -1)).unbind(2)
        planes.append(parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6)
    groups = codes.shape[1] * 2
    scales, zeros = (
        F.pad(each, (0, count - each.shape[1])).contiguous().view(torch.uint8)
        for each, count in ((rounded.scale, groups), (rounded.zero, -(-groups // LANES) * LANES))
    )
    return torch.cat((*(plane.flatten(1) for plane in planes), scales, zeros), 1)
