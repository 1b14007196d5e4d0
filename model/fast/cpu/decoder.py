"""A decoder on a CPU whose short steps run as one compiled function; prompts stay torch's, on the same weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

from model.cache import KVCache
from model.decoder import Decoder
from model.fast.cpu.dot import BF16, F16, F32, LOW_BITS
from model.fast.cpu.pack import packed
from model.fast.cpu.tables import ABSENT, MOST_ROWS, Cache, Rows, Weights
from model.fast.flash import attend_causally
from model.layers import RMSNorm, rotary_table
from model.plan import FULL, LayerPlan
from model.quantise import rounded

KINDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
MATRICES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}

STEPPING = threading.Lock()  # Numba's threads serve one step at a time


class FastDecoder:
    """``Decoder`` on a CPU in bfloat16, float16 or float32; everything but its steps is the decoder's own.

    The logits of a position and the cache entries written there have the same bits whatever other rows the step has,
    of this text or of others, and whatever follows. (``prefill`` runs in long chunks and promises no such thing.)
    Weights in low bits are copies, made once when a plan first asks for them.
    """

    row_invariant = True
    why_rows_vary = None
    fast_bits = tuple(LOW_BITS)

    def __init__(self, model: Decoder, step: Callable[[Weights, Cache, Rows, np.ndarray], None]) -> None:
        """``step``: see ``model.fast.cpu.compile``."""
        self.model, self.step = model, step
        for block in model.layers:
            block.self_attn.attend = attend_causally
        self.plans: dict[LayerPlan, Weights] = {}
        self.low_bits: dict[tuple[nn.Module, int], Tensor] = {}  # packed copies of weights
        self.biases = [np.zeros(0, np.float32)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies that the plan asks for now."""
        self._weights(plan, 1)

    def forget_low_bits(self) -> None:
        """Free all low-bit copies, and the tables of plans, which hold their addresses."""
        self.plans.clear()
        self.low_bits.clear()

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, start: int = 0, plan: LayerPlan | None = None
    ) -> Tensor:
        """Logits after each token at ``[start, start + T)``: ``[batch, T]`` ids -> ``[batch, T, vocab]`` float32."""
        if cache is None:
            return self.model(tokens, cache, start, plan)
        plan = plan or LayerPlan.full(self.model.num_layers)
        batch, count = tokens.shape
        logits = torch.empty(batch, count, self.model.vocab_size)
        for texts, columns in pieces(batch, count):
            part = tokens[texts, columns]
            for layer, bits in enumerate(plan.attention):
                if bits:
                    cache.claim(layer, start + columns.start, part.shape[1])
            positions = torch.arange(start + columns.start, start + columns.stop).expand_as(part)
            rows = torch.arange(texts.start, texts.stop)[:, None].expand_as(part)
            found = logits[texts, columns] if batch == 1 else torch.empty(*part.shape, self.model.vocab_size)
            self._step(plan, cache, Rows(*(each.flatten().numpy() for each in (part, positions, rows))), found)
            if batch > 1:
                logits[texts, columns] = found
        return logits

    def _step(self, plan: LayerPlan, cache: KVCache, rows: Rows, logits: Tensor) -> None:
        weights = self._weights(plan, cache.capacity)
        stride, size = cache.keys[0].stride(), cache.keys[0].itemsize
        entries = [[keys.data_ptr(), values.data_ptr()] for keys, values in zip(cache.keys, cache.values, strict=True)]
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        with STEPPING:
            places = Cache(np.array(entries), stride[0] * size, stride[1] * size)
            self.step(weights, places, rows, logits.flatten(0, -2).numpy())

    def _weights(self, plan: LayerPlan, positions: int) -> Weights:
        """The model under a plan, with rotary angles for ``positions`` at least."""
        weights = self.plans.get(plan)
        if weights is None or len(weights.cos) < positions:
            weights = self.plans[plan] = self._tables(plan, 1 << (positions - 1).bit_length())
        return weights

    @torch.no_grad()
    def _tables(self, plan: LayerPlan, positions: int) -> Weights:
        model, config = self.model, self.model.config
        matrices = np.full((config.num_layers, 7, 5), ABSENT)
        for layer, (block, *bits) in enumerate(zip(model.layers, plan.attention, plan.mlp, strict=True)):
            products = (
                (getattr(getattr(block, name), product), each)
                for (name, products), each in zip(MATRICES.items(), bits, strict=True)
                for product in products
            )
            for number, (product, each) in enumerate(products):
                if each:
                    matrices[layer, number] = self._matrix(product, each)
        head = np.array([self._matrix(model.lm_head or model.embed_tokens, plan.head)])
        cos, sin = rotary_table(config.rope, config.head_dim, positions, torch.float32, model.device)
        half = config.head_dim // 2
        norms = [[scale_of(part) for part in block.children() if isinstance(part, RMSNorm)] for block in model.layers]
        return Weights(
            kind=KINDS[model.dtype],
            hidden=config.hidden_size,
            mlp=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            embedding=model.embed_tokens.weight.data_ptr(),
            embedding_scale=np.float32(model.embedding_scale),
            eps=np.float32(config.norm_eps),
            attention_scale=np.float32(config.attention_scale),
            attention_cap=np.float32(config.attention_soft_cap or 0),
            final_cap=np.float32(config.final_soft_cap or 0),
            is_gemma=config.family == "gemma2",
            matrices=matrices,
            head=head,
            biases=np.concatenate(self.biases),
            norms=np.stack(norms),
            final_norm=scale_of(model.norm),
            windows=np.array([window or 0 for window in config.windows]),
            cos=cos[:, :half].contiguous().numpy(),
            sin=sin[:, half:].contiguous().numpy(),
        )

    def _matrix(self, product: nn.Linear | nn.Embedding, bits: int) -> list[int]:
        """A weight's row in a table, rounded to ``bits``: kind, address, bytes per row, rows, place of its bias."""
        weight, kind = product.weight, KINDS[self.model.dtype]
        if bits != FULL:
            kind = LOW_BITS[bits]
            if (product, bits) not in self.low_bits:
                self.low_bits[product, bits] = packed(rounded(product, bits))
            weight = self.low_bits[product, bits]
        bias, place = getattr(product, "bias", None), ABSENT
        if bias is not None:
            place = sum(map(len, self.biases))
            self.biases.append(bias.float().numpy())
        return [kind, weight.data_ptr(), weight.stride(0) * weight.itemsize, len(weight), place]


def scale_of(norm: RMSNorm) -> np.ndarray:
    """What a norm multiplies by, ``[hidden]`` float32: Gemma-2 stores it less one."""
    return (norm.weight.detach().float() + (1 - norm.neutral)).numpy()


def pieces(batch: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Steps of at most ``MOST_ROWS`` rows that make up ``batch`` texts of ``count`` tokens: earlier tokens first."""
    width = max(1, MOST_ROWS // batch)
    for first in range(0, count, width):
        for text in range(0, batch, MOST_ROWS):
            yield slice(text, min(batch, text + MOST_ROWS)), slice(first, min(count, first + width))
