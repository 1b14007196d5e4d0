"""The pieces both families are built of: norm, rotary embedding, attention, gated MLP.

Shapes: batch B, new tokens T, positions so far S = start + T, query heads H, key/value heads K,
G = H / K query heads to each of them, head size D. Norms, rotary angles and softmax compute in at least
float32 (``wide_dtype``), whatever the model's dtype; everything else stays in that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig, Rope

QUERIES = 128  # tokens that attend at a time: what is computed and then hidden is half of their square


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sensitive sums are taken in: float32 for bf16 models, float64 for float64 ones."""
    return torch.promote_types(dtype, torch.float32)


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last dimension, in the wide dtype (RMSNorm, arXiv 1910.07467)."""
    wide = x.to(wide_dtype(x.dtype))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Llama's RMSNorm: round to the model's dtype, then scale by the weight."""

    neutral = 1.0  # the weight that scales by one

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), self.neutral))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalise(x, self.eps).to(x.dtype)


@lru_cache(maxsize=64)
def inverse_frequencies(rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair, ``[head_dim / 2]`` (RoPE, arXiv 2104.09864, eq. 15).

    ``llama3`` leaves short wavelengths alone, divides those longer than the trained context by
    ``factor``, and blends linearly in between, as published with Llama 3.1.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=dtype, device=device)
    frequencies = 1.0 / rope.theta ** (pairs / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # kept for training too, where a tensor made in inference could not be used
def rotary_table(
    rope: Rope, head_dim: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine (see ``rotate``) for positions ``[0, size)``: two ``[size, head_dim]`` in ``dtype``."""
    wide = wide_dtype(dtype)
    positions = torch.arange(size, dtype=wide, device=device)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, wide, device))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotary_angles(config: ModelConfig, start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for positions ``[start, start + count)``: two ``[count, head_dim]`` in like's dtype."""
    size = 1 << (start + count - 1).bit_length()  # tables double, so few are ever made
    cos, sin = rotary_table(config.rope, config.head_dim, size, like.dtype, like.device)
    return cos[start : start + count], sin[start : start + count]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pair (x[i], x[i + D/2]) of ``[B, heads, T, D]`` by its angle: Hugging Face's half-rotation layout.

    x[i] becomes x[i]·cos - x[i + D/2]·sin, and x[i + D/2] becomes x[i + D/2]·cos + x[i]·sin: with the halves
    swapped, and that first minus in ``sin`` already, both are one formula.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


@dataclass(frozen=True)
class Sight:
    """Which keys new tokens see, so that attention computes little of what it would then hide.

    The T tokens attend ``rows`` at a time, and so many are given their own keys and the ``reach`` keys before these,
    less what ``mask`` hides: ``[..., G, rows, reach + rows]``, to be added to the scores; None where nothing is hidden.
    Where there are fewer tokens or keys, its last rows and columns count. ``whole``: each token sees all before it.
    """

    rows: int
    reach: int
    mask: Tensor | None
    whole: bool = False


def hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to the scores of keys, of which those marked in bool ``seen`` are seen: 0 or -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def visible(query: Tensor, key: Tensor, window: int | None, groups: int) -> Tensor:
    """Which positions ``key`` ``[N]`` tokens at positions ``query`` ``[T]`` see: bool ``[groups, T, N]``.

    Position j is seen from i if j <= i and, under a window, i - window < j.
    """
    seen = key <= query[:, None]
    if window is not None:
        seen &= key > query[:, None] - window
    return seen.repeat(groups, 1, 1)


def sight(start: int, count: int, window: int | None, groups: int, like: Tensor, rows: int = QUERIES) -> Sight:
    """What ``count`` new tokens at ``start`` see, ``rows`` of them at a time; a single one sees all that it is given.

    The mask is on the device and in the dtype of ``like``.
    """
    rows, mask = min(count, rows), None
    reach = start + (count - 1) // rows * rows  # of the last so many
    if window is not None:
        reach = min(reach, window - 1)
    if count > 1:
        key = torch.arange(reach + rows, device=like.device)  # counted from the first key that the last rows are given
        mask = hiding(visible(key[reach:], key, window, groups), like.dtype)
    return Sight(rows, reach, mask, window is None or start + count <= window)


@dataclass(frozen=True)
class Positions:
    """Where the T new tokens of one forward pass stand, and what every layer needs to know of it.

    ``cos`` and signed ``sin`` are ``[T, D]``; ``sights`` holds one Sight for each window that the model's layers use.
    """

    start: int
    cos: Tensor
    sin: Tensor
    sights: dict[int | None, Sight]


def place(config: ModelConfig, start: int, count: int, like: Tensor) -> Positions:
    """The Positions of ``count`` new tokens at ``start``, on the device and in the dtype of ``like``."""
    groups = config.num_heads // config.num_kv_heads
    sights = {window: sight(start, count, window, groups, like) for window in set(config.windows)}
    return Positions(start, *rotary_angles(config, start, count, like), sights)


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Sight, *, scale: float, soft_cap: float | None) -> Tensor:
    """Causal grouped-query attention (arXiv 2305.13245) of the last T of S positions to those that each of them sees.

    q ``[B, H, T, D]``, k and v ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``. With a soft cap, scores become
    cap·tanh(score / cap) before the mask (Gemma 2, arXiv 2408.00118, section 2), which no fused kernel of torch
    computes: then the explicit formula runs.
    """
    count, before, out = q.shape[2], k.shape[2] - q.shape[2], []
    if sees.whole and not before and soft_cap is None:
        shared = q.shape[1] // k.shape[1]
        k, v = (entries[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2) for entries in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    for begin in range(0, count, sees.rows):
        end = min(count, begin + sees.rows)
        first, last = max(0, before + begin - sees.reach), before + end
        mask = None if sees.mask is None else sees.mask[..., begin - end :, first - last :].flatten(-3, -2)
        queries, keys, values = q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last]
        out.append(attend_to(queries, keys, values, mask, scale=scale, soft_cap=soft_cap))
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def attend_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, soft_cap: float | None) -> Tensor:
    """``attend`` to all keys given, with ``mask`` ``[..., G · T, S]`` added to the scores."""
    batch, heads, count, size = q.shape
    # Query heads that share a key head are laid end to end, as if they were more tokens: no key is copied.
    q = q.reshape(batch, k.shape[1], -1, size)
    if soft_cap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) * (scale / soft_cap))
        scores = scores.unflatten(0, (batch, -1))
        scores = scores * soft_cap if mask is None else torch.add(mask, scores, alpha=soft_cap)
        weights = torch.softmax(scores, dim=-1)  # in the wide dtype, within
        out = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))
    return out.reshape(batch, heads, count, size)


class Attention(nn.Module):
    """Projections, rotary embedding, cache and attention of one layer. Parameter names are Hugging Face's."""

    attend = staticmethod(attend)  # ``model.fast`` puts a faster one here

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, positions: Positions, cache: KVCache | None) -> Tensor:
        """``[B, T, hidden]`` -> the same shape; writes keys and values at its positions if there is a cache."""
        batch, count, _ = x.shape
        q, k, v = self.project(x, positions)
        if cache is not None:
            k, v = cache.write(self.layer, positions.start, k, v)
        sees = positions.sights[self.config.windows[self.layer]]
        out = self.attend(q, k, v, sees, scale=self.config.attention_scale, soft_cap=self.config.attention_soft_cap)
        return self.o_proj(out.transpose(1, 2).reshape(batch, count, -1))

    def project(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, H, T, D]`` and keys ``[B, K, T, D]``, rotated, and values ``[B, K, T, D]``."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, positions.cos, positions.sin), rotate(k, positions.cos, positions.sin), v


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)) (arXiv 2002.05202); SiLU in Llama, tanh GELU in Gemma-2."""

    def __init__(self, config: ModelConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
