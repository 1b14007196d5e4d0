"""Layers of all model families: norm, rotary embedding, attention, gated MLP.

Shapes: batch B, new tokens T, positions so far S = start + T, query heads H, key/value heads K, G =
H / K query heads per key/value head, head size D. Norms, rotary angles and softmax compute in at
least float32 (``wide_dtype``), whatever the model's dtype; everything else stays in that dtype.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig, Rope
from model.plan import SINKS

QUERIES = 128  # per chunk of a long prompt
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms, angles and softmax: float32 for bf16 models, float64 for float64
    ones.
    """
    return torch.promote_types(dtype, torch.float32)


def normalise(x: Tensor, eps: float) -> Tensor:
    """Return RMSNorm without weight, x / sqrt(mean(x²) + eps), in the wide dtype (arXiv
    1910.07467).
    """
    wide = x.to(wide_dtype(x.dtype))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Llama's RMSNorm: round to the model's dtype, then scale by the weight."""

    neutral = 1.0  # the weight that leaves numbers as they are

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), self.neutral))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalise(x, self.eps).to(x.dtype)


def inverse_frequencies(
    rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the radians per position of each rotated pair, ``[head_dim / 2]`` (RoPE, arXiv
    2104.09864, eq. 15).

    ``default`` leaves them as they are, and so does ``dynamic`` within the model's context.
    ``linear`` divides all frequencies by ``factor``. ``llama3`` keeps short wavelengths, divides
    the frequencies of those longer than the trained context by ``factor``, and interpolates
    linearly in between, as published with Llama 3.1. ``yarn`` does the same, but interpolates
    between pairs (arXiv 2309.00071, section 3.2). Raises ValueError for any other kind.
    """
    columns = torch.arange(0, head_dim, 2, dtype=dtype, device=device)  # the first of each pair
    frequencies = 1.0 / rope.theta ** (columns / head_dim)
    if rope.kind in ("default", "dynamic"):
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    elif rope.kind == "yarn":
        first, last = yarn_borders(rope, head_dim)
        keep = (last - columns / 2) / (last - first)
    else:
        raise ValueError(f"a rope of the kind {rope.kind!r} has no frequencies here: add them")
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def yarn_borders(rope: Rope, head_dim: int) -> tuple[float, float]:
    """Return the numbers of the pairs between which yarn interpolates: they turn ``beta_fast`` and
    ``beta_slow`` times in the trained context.
    """
    turns = torch.tensor([rope.beta_fast, rope.beta_slow], dtype=torch.float64)
    wavelengths = rope.original_max_positions / (2 * math.pi * turns)
    pairs = head_dim / 2 * wavelengths.log() / math.log(rope.theta)
    first = max(pairs[0].floor().item(), 0)
    last = min(pairs[1].ceil().item(), head_dim - 1)
    return first, last + 0.001 * (first == last)  # as in transformers, no division by 0


@lru_cache(maxsize=32)  # a model has up to two ropes, and its texts have several sizes
@torch.inference_mode(False)  # the cached tensors must serve training too
def rotary_table(
    rope: Rope, head_dim: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the cosine and signed sine (see ``rotate``) for ``[0, size)``, times the rope's
    attention factor: two ``[size, head_dim]``.
    """
    wide = wide_dtype(dtype)
    angles = torch.outer(
        torch.arange(size, dtype=wide, device=device),
        inverse_frequencies(rope, head_dim, wide, device),
    )
    cos = rope.attention_factor * angles.cos()
    sin = rope.attention_factor * angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of ``[B, heads, T, D]``: each pair (x[i], x[i + D/2]) turned by
    its angle, as Hugging Face does.

    x[i] becomes x[i]·cos - x[i + D/2]·sin, and x[i + D/2] becomes x[i + D/2]·cos + x[i]·sin. Both
    are one formula: ``roll`` swaps the halves, and ``sin`` already holds the minus of the first.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def attend_by_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, soft_cap: float | None
) -> Tensor:
    """Return softmax(scale · q kᵀ + mask) · v, with the softmax in the wide dtype.

    q ``[B, K, N, D]``, k and v ``[B, K, S, D]``, mask ``[N, S]`` or None -> ``[B, K, N, D]``. A
    soft cap turns scores into cap · tanh(score / cap) before the mask (Gemma 2, arXiv 2408.00118,
    section 2). Queries are scaled, not scores: q·k of a large model can exceed float16.
    """
    scores = ((scale * q) @ k.transpose(2, 3)).to(wide_dtype(q.dtype))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1).to(q.dtype) @ v


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, soft_cap: float | None
) -> Tensor:
    """Return masked grouped-query attention (arXiv 2305.13245): see ``attend_by_formula``.

    q ``[B, H, T, D]``, k and v ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``. ``mask``
    ``[T, S]`` is added to the scores of every head; None masks nothing. Torch has a fused kernel
    for attention without a soft cap.
    """
    groups = q.shape[1] // k.shape[1]
    # The G query heads of a key head are laid end to end, as if they were more tokens: no key is
    # copied.
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    mask = None if mask is None else mask.repeat(groups, 1)
    if soft_cap is None:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    else:
        out = attend_by_formula(rows, k, v, mask, scale=scale, soft_cap=soft_cap)
    return out.reshape(q.shape)


def causal_mask(
    queries: Tensor,
    keys: Tensor,
    window: int | None,
    dtype: torch.dtype,
    newest: int | None = None,
) -> Tensor:
    """Return the additive causal mask ``[T, N]`` of queries and keys at positions ``[T]`` and
    ``[N]``.

    Query i attends to key j if j <= i and, with a window, i - window < j. With ``newest``, the
    window of a layer plan, it also needs i - newest < j or j < ``SINKS``. Where it attends the mask
    is 0, and -inf elsewhere. For three queries at positions 2 to 4 and five keys at 0 to 4, without
    a window and with a window of two tokens:

                   key 0     1     2     3     4          key 0     1     2     3     4
        query 2        0     0     0  -inf  -inf           -inf     0     0  -inf  -inf
        query 3        0     0     0     0  -inf           -inf  -inf     0     0  -inf
        query 4        0     0     0     0     0           -inf  -inf  -inf     0     0
    """
    distance = queries[:, None] - keys
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    if newest is not None:
        hidden |= (distance >= newest) & (keys >= SINKS)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -math.inf
    )


class Attend(Protocol):
    """Attention of one layer: q ``[B, H, T, D]``, k and v ``[B, K, S, D]`` with K dividing H ->
    ``[B, H, T, D]``. The caller of the layers chooses it: see ``Positions``.

    ``newest`` is the window of a plan. ``Decoder.hidden`` binds it; layers never pass it.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        *,
        scale: float,
        soft_cap: float | None,
        newest: int | None = None,
    ) -> Tensor:
        """Return the values of S positions, weighted for the T queries."""


def attend_causally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    *,
    scale: float,
    soft_cap: float | None,
    newest: int | None = None,
) -> Tensor:
    """Return causal attention of the last T of S positions, by ``attend_masked`` and
    ``causal_mask``.

    Long prompts are divided into chunks of queries, so that the scores of all queries and keys are
    never held at once. Keys outside of the family's ``window`` are not multiplied at all.
    ``newest`` is the window of a layer plan.
    """
    count = q.shape[2]
    size = k.shape[2]
    is_full = all(width is None or size <= width for width in (window, newest))
    if count == size and soft_cap is None and is_full:  # torch has a kernel for this
        k, v = (entries.repeat_interleave(q.shape[1] // k.shape[1], 1) for entries in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    out = []
    end = size - count
    for queries in q.split(QUERIES, 2):
        begin = end
        end += queries.shape[2]
        first = 0 if window is None else max(0, begin + 1 - window)
        mask = None  # a single query attends to all of these keys
        if queries.shape[2] > 1 or newest is not None:
            keys = torch.arange(first, end, device=q.device)
            mask = causal_mask(keys[begin - first :], keys, window, q.dtype, newest)
        out.append(
            attend_masked(
                queries,
                k[:, :, first:end],
                v[:, :, first:end],
                mask,
                scale=scale,
                soft_cap=soft_cap,
            )
        )
    return torch.cat(out, 2)


@dataclass(frozen=True)
class Positions:
    """Positions of the T new tokens of a forward pass, for the layer of this number.

    ``start`` is the first one. ``cos`` and signed ``sin`` ``[T, D]`` are their rotary angles.
    ``window`` is the layer's sliding window in tokens; None is full attention. ``attend`` computes
    the attention: it is ``attend_causally``, or another that is faster or has another mask.
    """

    layer: int
    start: int
    cos: Tensor
    sin: Tensor
    window: int | None = None
    attend: Attend = attend_causally


def layer_positions(
    config: ModelConfig,
    start: int,
    count: int,
    like: Tensor,
    attend: Attend = attend_causally,
) -> list[Positions]:
    """Return the positions ``[start, start + count)`` for each layer, with angles in the dtype of
    ``like``.
    """
    end = start + count
    size = 1 << (end - 1).bit_length()  # sizes double, so that few tables are made
    angles = {
        rope: [
            table[start:end]
            for table in rotary_table(rope, config.head_dim, size, like.dtype, like.device)
        ]
        for rope in set(config.ropes)
    }
    return [
        Positions(layer, start, *angles[rope], window, attend)
        for layer, (rope, window) in enumerate(zip(config.ropes, config.windows, strict=True))
    ]


class Attention(nn.Module):
    """Attention sublayer: projections, norms of heads, rotary embedding, cache, attention.

    Parameter names are Hugging Face's. Where the family has ``head_norms``, each head of q and k is
    normed by itself (arXiv 2302.05442, section 2). The layers of a model differ in weights alone:
    what else depends on the layer comes with positions and cache.
    """

    def __init__(self, config: ModelConfig, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        self.config = config
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias="q" in config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias="k" in config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias="v" in config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias="o" in config.attention_bias)
        new_norm = norm if config.family.head_norms else nn.Identity
        self.q_norm = new_norm(config.head_dim, config.norm_eps)
        self.k_norm = new_norm(config.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values, ``[B, T, heads · D]`` each."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Tensor, positions: Positions, cache: KVCache | None) -> Tensor:
        """Return ``[B, T, hidden]`` for the same shape; the cache, if given, is written at the
        layer's positions.

        Attention is ``positions.attend``: in a pass of ``Decoder.hidden`` that of the decoder, with
        the window of the plan.
        """
        config = self.config
        q, k, v = (  # [B, H or K, T, D]
            heads.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for heads in self.project(x)
        )
        q = rotate(self.q_norm(q), positions.cos, positions.sin)
        k = rotate(self.k_norm(k), positions.cos, positions.sin)
        if cache is not None:
            k, v = cache.write(positions.layer, positions.start, k, v)
        out = positions.attend(
            q,
            k,
            v,
            positions.window,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """MLP sublayer: down(activation(gate(x)) · up(x)) (arXiv 2002.05202); SiLU in Llama, tanh GELU
    in Gemma-2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.family.activation]
        self.gate_proj = nn.Linear(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias
        )
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return the products by gate and up, ``[B, T, intermediate]`` each."""
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.down_proj(self.activation(gate) * up)
