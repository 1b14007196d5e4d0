"""Finds out whether the rows of a step depend on how many there are, on this machine, with these libraries.

What a library computes for a row may differ in the last bits of a float32 sum, which rounding to bf16 hides nearly
always and a long text meets all the same. So sums are made to cancel: what is left of them shows every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model.cache import BLOCK
from model.config import ModelConfig
from model.decoder import Decoder
from model.fast.flash import shares
from model.fast.parts import FastNorm, PackedLinear, can_pack
from model.fast.pieces import LONGEST_STEP, attend_in_pieces, pieces

COUNTS = range(1, LONGEST_STEP)
LARGE = 1 << 23  # weights from which a product is tried with some counts only, to take no time that is noticed
SOME_COUNTS = [1, 2, 3, 8, 16]
ROWS = (32, 16, 8, 4, 1)  # at once in attention: torch itself goes by 32, and some products of oneDNN change before
STARTS = {24: COUNTS, 500: SOME_COUNTS, 1016: SOME_COUNTS, 2040: SOME_COUNTS}  # within a block, or across its end


@torch.inference_mode()
def examine(model: Decoder) -> tuple[int, str | None]:
    """How many rows of a prepared model may attend together, and why its rows depend on how many there are.

    The reason is None where they do not. Products whose lone row differs from several are set to compute two rows
    (``PackedLinear.doubles``).
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        return 0, f"steps do not depend on their length in bfloat16 on a CPU; this is {dtype} on {model.device.type}"
    if not can_pack(model.device, model.dtype):
        return 0, "this machine has no oneDNN kernels for bfloat16, and other products depend on the number of rows"
    generator = torch.Generator().manual_seed(0)
    rows = next((rows for rows in ROWS if attention_holds(model.config, rows, generator)), 0)
    if not rows:
        return 0, "attention rounds several rows differently from one"
    reason = _check_products(model, generator) or _check_small_operators(model, generator)
    for product in _products(model) if reason else ():
        product.doubles = False  # it would cost, and promise nothing
    return rows, reason


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells 0 from -0 and finds NaN equal to itself."""
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _products(model: Decoder) -> Iterator[PackedLinear]:
    for block in model.layers:
        yield from (block.self_attn.qkv_proj, block.self_attn.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj)
    yield model.lm_head


def _check_products(model: Decoder, generator: torch.Generator) -> str | None:
    doubled: dict[torch.Size, bool] = {}
    for product in _products(model):
        if product.shape not in doubled:
            differing = differing_counts(product, generator)
            if differing == [1]:
                product.doubles = True
                differing = differing_counts(product, generator)
            if differing:
                size = "×".join(str(length) for length in product.shape)
                return f"a {size} product rounds {differing[-1]} rows differently from more"
            doubled[product.shape] = product.doubles
        product.doubles = doubled[product.shape]
    return None


def differing_counts(product: PackedLinear, generator: torch.Generator) -> list[int]:
    """How many rows must be computed together for them to differ from what they are among ``LONGEST_STEP``.

    The fused addition subtracts the rounded result from the float32 sum that it was rounded from.
    """
    small = product.shape.numel() < LARGE
    x = torch.randn(1, LONGEST_STEP, product.shape[1], generator=generator).bfloat16()
    cancelling = -product(x)
    expected = product(x, cancelling)

    def differs(rows: slice) -> bool:
        return not same_bits(product(x[:, rows], cancelling[:, rows]), expected[:, rows])

    return [
        count
        for count in (COUNTS if small else SOME_COUNTS)
        if any(differs(slice(at, at + count)) for at in range(0, LONGEST_STEP + 1 - count if small else 1, count))
    ]


def attention_holds(config: ModelConfig, rows: int, generator: torch.Generator) -> bool:
    """Whether tokens get the same attention together, fewer together, and one by one, with up to ``rows`` at once."""
    return all(
        _rows_hold(config, rows, window, start, *numbers)
        for window in set(config.windows)
        for start in STARTS
        if start + LONGEST_STEP <= config.max_positions
        for numbers in cancelling_attention(config, window, start, generator)
    )


def cancelling_attention(
    config: ModelConfig, window: int | None, start: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of ``LONGEST_STEP`` tokens at ``start`` which show every bit of the sums behind them.

    First scores are what is left of large numbers; then all weights are equal, and what is left is the result.
    """
    heads, size, last = config.num_kv_heads, config.head_dim, start + LONGEST_STEP
    query = torch.randn(size, generator=generator).bfloat16()
    query[:3] = 1
    q = query.repeat(1, config.num_heads, LONGEST_STEP, 1)  # not expanded: rows must lie as they do in a step
    k, v = torch.randn(2, 1, heads, -(-last // BLOCK) * BLOCK, size, generator=generator).bfloat16()
    yield q, cancel(query, (k * 2**17).transpose(2, 3)).transpose(2, 3).contiguous(), v
    equal, cancelled = (-4 * query).repeat(1, heads, k.shape[2], 1), v.clone()
    seen_by_all = slice(max(0, last - (window or last)), start)
    equal[:, :, seen_by_all] = 0
    cancelled[:, :, seen_by_all] = cancel(torch.ones(start).bfloat16()[seen_by_all], v[:, :, seen_by_all])
    yield q, equal, cancelled


def cancel(weights: Tensor, numbers: Tensor) -> Tensor:
    """``[..., n, m]`` bf16 numbers whose sum by ``[n]`` weights, of which the first three are 1, is next to nothing."""
    numbers = numbers.clone()
    numbers[..., :3, :] = 0
    for place in range(min(3, len(weights))):
        numbers[..., place, :] = -(weights.double() @ numbers.double()).bfloat16()
    return numbers


def _rows_hold(config: ModelConfig, rows: int, window: int | None, start: int, q: Tensor, k: Tensor, v: Tensor) -> bool:
    scale, soft_cap = config.attention_scale, config.attention_soft_cap

    def attended(begin: int, end: int) -> Tensor:
        sees = pieces(start + begin, end - begin, window, config, q, rows)
        return attend_in_pieces(q[:, :, begin:end], k, v, sees, scale=scale, soft_cap=soft_cap)

    whole = attended(0, LONGEST_STEP)
    parts = [(0, count) for count in STARTS[start]] + [(count, count + 1) for count in STARTS[start]]
    return all(same_bits(attended(*part), whole[:, :, slice(*part)]) for part in parts)


def _check_small_operators(model: Decoder, generator: torch.Generator) -> str | None:
    x = torch.randn(1, LONGEST_STEP, model.config.hidden_size, generator=generator)
    norm: FastNorm = model.norm
    inverse = norm.inverse(x.bfloat16())
    if not all(same_bits(norm.inverse(x[:, :count].bfloat16()), inverse[:, :count]) for count in COUNTS):
        return "a norm gives other bits to several rows than to one"
    log_sums = torch.randn(2, 3 * LONGEST_STEP, generator=generator) * 4
    joined = shares(log_sums)
    if not all(same_bits(shares(log_sums[:, :rows]), joined[:, :rows]) for rows in range(1, 3 * LONGEST_STEP)):
        return "what joins the parts of an attention depends on the number of rows"
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
