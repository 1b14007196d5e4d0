"""Finds out whether the rows of a step depend on how many there are, on this machine, with these libraries.

What a library computes for a row may differ in the last bits of a float32 sum, which rounding to bf16 hides nearly
always and a long text meets all the same. So sums are made to cancel: what is left of them shows every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model.config import ModelConfig
from model.decoder import Decoder
from model.fast.parts import FastNorm, PackedLinear, can_pack
from model.fast.pieces import LONGEST_STEP, attend_in_pieces, pieces

COUNTS = range(1, LONGEST_STEP)
LARGE = 1 << 23  # weights from which a product is tried with some counts only, to take no time that is noticed
SOME_COUNTS = [1, 2, 3, 8, 16]
STARTS = {24: COUNTS, 500: SOME_COUNTS, 1016: SOME_COUNTS, 2040: SOME_COUNTS}  # within a block, or across its end


@torch.inference_mode()
def why_rows_vary(model: Decoder) -> str | None:
    """The reason why rows of a prepared model's steps depend on how many there are; None where they do not.

    Products whose lone row differs from several are set to compute two rows (``PackedLinear.doubles``).
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"steps are made independent of their length in bfloat16 on a CPU, not in {dtype} on {model.device.type}"
    if not can_pack(model.device, model.dtype):
        return "this machine has no oneDNN kernels for bfloat16, and other products depend on the number of rows"
    generator = torch.Generator().manual_seed(0)
    return (
        _check_products(model, generator)
        or _check_attention(model.config, generator)
        or _check_small_operators(model, generator)
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells 0 from -0 and finds NaN equal to itself."""
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _products(model: Decoder) -> Iterator[PackedLinear]:
    for block in model.layers:
        yield from (block.self_attn.qkv_proj, block.self_attn.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj)
    yield model.lm_head


def _check_products(model: Decoder, generator: torch.Generator) -> str | None:
    verdicts: dict[torch.Size, list[int]] = {}
    for product in _products(model):
        if product.shape not in verdicts:
            verdicts[product.shape] = differing_counts(product, generator)
        differing = verdicts[product.shape]
        if differing not in ([], [1]):
            size = "×".join(str(length) for length in product.shape)
            return f"the rows of a {size} product are rounded otherwise among {differing[-1]} rows than among more"
        product.doubles = differing == [1]
    return None


def differing_counts(product: PackedLinear, generator: torch.Generator) -> list[int]:
    """How many rows must be computed together for them to differ from what they are among ``LONGEST_STEP``.

    The fused addition subtracts the rounded result from the float32 sum that it was rounded from.
    """
    counts = COUNTS if product.shape.numel() < LARGE else SOME_COUNTS
    x = torch.randn(1, LONGEST_STEP, product.shape[1], generator=generator).bfloat16()
    cancelling = -product.multiply(x, None)
    expected = product.multiply(x, cancelling)
    return [
        count
        for count in counts
        if not same_bits(product.multiply(x[:, :count], cancelling[:, :count]), expected[:, :count])
    ]


def _check_attention(config: ModelConfig, generator: torch.Generator) -> str | None:
    for window in set(config.windows):
        for start in STARTS:
            if start + LONGEST_STEP <= config.max_positions and not attention_holds(config, window, start, generator):
                return f"attention at {start} positions gives other bits to several rows than to one"
    return None


def attention_holds(config: ModelConfig, window: int | None, start: int, generator: torch.Generator) -> bool:
    """Whether tokens at ``start`` get the same attention together, fewer together, and one by one."""
    q, k, v = cancelling_attention(config, window, start, generator)

    def attended(begin: int, end: int) -> Tensor:
        sees = pieces(start + begin, end - begin, window, config, q)
        part = q[:, :, begin:end]
        return attend_in_pieces(part, k, v, sees, scale=config.attention_scale, soft_cap=config.attention_soft_cap)

    whole = attended(0, LONGEST_STEP)
    parts = [(0, count) for count in STARTS[start]] + [(count, count + 1) for count in STARTS[start]]
    return all(same_bits(attended(*part), whole[:, :, slice(*part)]) for part in parts)


def cancelling_attention(
    config: ModelConfig, window: int | None, start: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of ``LONGEST_STEP`` tokens at ``start``, whose weighted sums of values nearly cancel.

    All queries are one, and what only some of them see has next to no weight: so one value can cancel the others.
    """
    size, last = config.head_dim, start + LONGEST_STEP
    room = (config.num_kv_heads, pieces(last - 1, 1, None, config, torch.empty(0))[0].span, size)
    query, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in ((size,), room, room))
    common = slice(max(0, last - (window or last)), start)
    some = torch.ones(room[1], dtype=torch.bool)
    some[common] = False
    k[:, some] = -4 * query
    scores = (k.double() @ query.double()) * config.attention_scale
    if config.attention_soft_cap is not None:
        scores = config.attention_soft_cap * torch.tanh(scores / config.attention_soft_cap)
    weights = torch.softmax(scores[:, :last], -1)
    for place in (1, 0):  # coarsely by the second heaviest, then finely by the heaviest
        heads, heaviest = torch.arange(room[0]), weights.topk(2).indices[:, place]
        v[heads, heaviest] = 0
        left = (weights[:, None] @ v[:, :last].double())[:, 0]
        v[heads, heaviest] = (-left / weights[heads, heaviest][:, None]).bfloat16()
    q = query.expand(1, config.num_heads, LONGEST_STEP, size)
    return q, k[None], v[None]


def _check_small_operators(model: Decoder, generator: torch.Generator) -> str | None:
    x = torch.randn(1, LONGEST_STEP, model.config.hidden_size, generator=generator)
    norm: FastNorm = model.norm
    inverse = norm.inverse(x.bfloat16())
    if not all(same_bits(norm.inverse(x[:, :count].bfloat16()), inverse[:, :count]) for count in COUNTS):
        return "a norm gives other bits to several rows than to one"
    if not rounds_alike(model.layers[0].mlp.activation, model.config.intermediate_size):
        return "the activation depends on where in memory a number stands"
    capped = (model.config.attention_soft_cap, model.config.final_soft_cap) != (None, None)
    if capped and len(ambiguous(torch.tanh)):
        return "the soft cap depends on where in memory a number stands"
    return None


def ambiguous(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Those of all bf16 numbers that vector instructions give another result than scalar ones, which finish a row."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()]
    apart = torch.stack((every, every), 1)[:, 0]  # not side by side, so that they are taken one by one
    vector, scalar = function(every).view(torch.int16), function(apart).view(torch.int16)
    return every[vector != scalar]


def rounds_alike(activation: Callable[[Tensor], Tensor], size: int) -> bool:
    """Whether rows of ``size`` activations, as they lie in a gated MLP, do not depend on how many there are."""
    for number in ambiguous(activation)[:1]:
        rows = activation(number.expand(1, LONGEST_STEP, 2 * size).contiguous()[..., :size])
        for count in COUNTS:
            some = activation(number.expand(1, count, 2 * size).contiguous()[..., :size])
            if not same_bits(some, rows[:, :count]):
                return False
    return True
