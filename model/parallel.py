"""A decoder split over several processes: tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3).

    part          what each process holds             what the processes exchange
    ---------------------------------------------------------------------------------------------------
    embedding     rows: its share of the tokens       a sum: of all rows but a token's own, zeros
    norms         all                                 nothing
    q, k, v       rows: those of its heads            nothing: its heads attend, and have a cache of their own
    o             columns: those of its heads         a sum, to which the bias is added
    gate, up      rows: its share                     nothing
    down          columns: the same share             a sum, to which the bias is added
    head          rows: its share of the tokens       the first process gathers the logits

So every process has the whole residual stream. The blocks are those of one process, for a config with fewer heads.

What is to be computed, the first process tells the others: see ``model.leader``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import InputError

Cut = tuple[int, range] | None  # a dimension, and the indices along it that a process holds; None: it holds all


@dataclass(frozen=True)
class Share:
    """What process ``rank`` of ``size`` holds of a model of this config. Raises InputError where heads do not divide.

    A key/value head that serves the query heads of several processes is held by each of them.
    """

    config: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        heads, shared = self.config.num_heads, self.config.num_kv_heads
        fit = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
        if self.size not in fit:
            raise InputError(
                f"{heads} query heads and {shared} key/value heads do not divide over {self.size} processes: "
                f"start {' or '.join(map(str, fit))}"
            )

    def part(self, length: int, at_least: int = 0) -> range:
        """Its part of so many: up to where the next one's begins, but ``at_least`` so many, though others have them."""
        first = length * self.rank // self.size
        return range(first, max(first + at_least, length * (self.rank + 1) // self.size))

    @property
    def leads(self) -> bool:
        """Whether this process is the first, which decides (``model.leader``) and so has all logits."""
        return self.rank == 0

    @property
    def tokens(self) -> range:
        """The rows of embedding and head: all of them where the vocabulary does not divide."""
        vocab = self.config.vocab_size
        return range(vocab) if vocab % self.size else self.part(vocab)

    @property
    def local(self) -> ModelConfig:
        """The config of the model that this process builds."""
        c = self.config
        heads = {"num_heads": len(self.part(c.num_heads)), "num_kv_heads": len(self.part(c.num_kv_heads, 1))}
        return replace(c, **heads, intermediate_size=len(self.part(c.intermediate_size)), vocab_size=len(self.tokens))

    def cut(self, name: str) -> Cut:
        """What it holds of the parameter of this name."""
        c, (product, kind) = self.config, name.split(".")[-2:]
        queries, keys = (
            range(part.start * c.head_dim, part.stop * c.head_dim)
            for part in (self.part(c.num_heads), self.part(c.num_kv_heads, 1))
        )
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "embed_tokens": self.tokens, "lm_head": self.tokens}
        rows |= dict.fromkeys(("gate_proj", "up_proj"), self.part(c.intermediate_size))
        columns = {"o_proj": queries, "down_proj": self.part(c.intermediate_size)}
        if product in columns and kind == "weight":
            return 1, columns[product]
        return (0, rows[product]) if product in rows else None


def exchange(operation: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    """One collective operation of all processes. Raises InputError when one of them has gone."""
    try:
        operation(*arguments, **more)
    except RuntimeError:
        raise InputError("one of the processes that share the model has ended, so the others end too") from None


class SummedLinear(nn.Linear):
    """A product of which each process has some columns, and so a term of the result."""

    def __init__(self, product: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = product.weight, product.bias

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        exchange(dist.all_reduce, out)
        return out if self.bias is None else out + self.bias


class SummedEmbedding(nn.Embedding):
    """An embedding of which each process has the rows of some tokens."""

    def __init__(self, embedding: nn.Embedding, tokens: range) -> None:
        nn.Module.__init__(self)
        self.weight, self.tokens = embedding.weight, tokens

    def forward(self, ids: Tensor) -> Tensor:
        others = (ids < self.tokens.start) | (ids >= self.tokens.stop)
        rows = F.embedding((ids - self.tokens.start).masked_fill(others, 0), self.weight)
        rows = rows.masked_fill(others[..., None], 0)
        exchange(dist.all_reduce, rows)
        return rows


def split(model: Decoder, share: Share) -> Decoder:
    """Let a model built from ``share.local`` exchange what it must; its parameters keep their names."""
    for block in model.layers:
        block.self_attn.o_proj = SummedLinear(block.self_attn.o_proj)
        block.mlp.down_proj = SummedLinear(block.mlp.down_proj)
    if len(share.tokens) < share.config.vocab_size:
        model.embed_tokens = SummedEmbedding(model.embed_tokens, share.tokens)
    return model


def gather_logits(model: Decoder, share: Share, hidden: Tensor) -> Tensor | None:
    """``model.logits`` over the whole vocabulary, ``[batch, T, vocab]``, on the first process; None on the others."""
    if len(share.tokens) == share.config.vocab_size:
        return model.logits(hidden) if share.leads else None
    logits = model.logits(hidden)
    parts = [torch.empty_like(logits) for _ in range(share.size)] if share.leads else None
    exchange(dist.gather, logits, parts)
    return torch.cat(parts, -1) if share.leads else None
