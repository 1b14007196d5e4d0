"""Tensor parallelism: a decoder split over processes (Megatron-LM, arXiv 1909.08053, 3).

    part          shard of a rank                     collective operation
    ---------------------------------------------------------------------------------------------
    embedding     rows: its part of the vocabulary    all-reduce of the rows, zeros elsewhere
    norms         whole                               none
    q, k, v       rows: those of its heads            none: each rank has a cache for its heads
    o             columns: those of its heads         all-reduce after attention
    gate, up      rows: its part                      none
    down          columns: the same part              all-reduce after the MLP
    head          rows: its part of the vocabulary    all-reduce of the logits, zeros elsewhere

So every rank has the whole residual stream and all logits. The blocks are those of one process, for
a config with fewer heads. Every rank must call the model with the same tokens (see
``app.processes``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import InputError, explaining

# Dimension of each weight that is divided, and the sizes of the config that give the number of
# units along it and of indices per unit.
DIVIDED = {
    "embed_tokens": (0, "vocab_size"),
    "q_proj": (0, "num_heads", "head_dim"),
    "k_proj": (0, "num_kv_heads", "head_dim"),
    "v_proj": (0, "num_kv_heads", "head_dim"),
    "o_proj": (1, "num_heads", "head_dim"),
    "gate_proj": (0, "intermediate_size"),
    "up_proj": (0, "intermediate_size"),
    "down_proj": (1, "intermediate_size"),
    "lm_head": (0, "vocab_size"),
}


@dataclass(frozen=True)
class Shard:
    """Shard of a model that one rank holds. Raises InputError where the heads do not divide over
    the ranks.
    """

    config: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        heads = self.config.num_heads
        kv_heads = self.config.num_kv_heads
        fit = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        ]
        if self.size not in fit:
            raise InputError(
                f"the heads of this model do not divide over {self.size} processes: start one of"
                f" {fit}"
            )

    def part(self, size: str, unit: int = 1) -> range:
        """Return the indices of the rank along the dimension that the config gives as ``size``. It
        has that many units, of ``unit`` indices each; a rank has at least one unit.

        Ranks may share a key head. Raises InputError where they would share another unit, whose
        products would be summed twice.
        """
        length = getattr(self.config, size)
        if length < self.size and size != "num_kv_heads":
            raise InputError(
                f"{length} parts of this model do not divide over {self.size} processes: start at"
                f" most {length}"
            )
        first = length * self.rank // self.size
        return range(first * unit, max(first + 1, length * (self.rank + 1) // self.size) * unit)

    @property
    def local(self) -> ModelConfig:
        """Config of the rank's model."""
        return replace(
            self.config,
            **{
                size: len(self.part(size))
                for size in ("vocab_size", "num_heads", "num_kv_heads", "intermediate_size")
            },
        )

    def cut(self, name: str) -> tuple[int, range] | None:
        """Return the dimension along which the parameter of this name is divided, and the rank's
        indices there; None where the rank has the whole of it.
        """
        product, kind = name.split(".")[-2:]
        if product not in DIVIDED or (kind == "bias" and DIVIDED[product][0] == 1):
            return None
        dimension, size, *unit = DIVIDED[product]
        return dimension, self.part(size, *(getattr(self.config, each) for each in unit))


def exchange(operation: Callable[..., Any], value: Any, *more: Any) -> Any:
    """Return the result of a collective operation on ``value``. Raises InputError when a rank has
    ended.
    """
    with explaining(
        "one of the processes that share the model has ended, so the others end too",
        (RuntimeError,),
    ):
        operation(value, *more)
    return value


class SplitEmbedding(nn.Module):
    """Embedding by ``rows`` of its matrix, ``weight`` ``[rows, hidden]``, summed over the ranks."""

    def __init__(self, weight: nn.Parameter, rows: range) -> None:
        super().__init__()
        self.weight = weight
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        elsewhere = (ids < self.rows.start) | (ids >= self.rows.stop)
        own = (ids - self.rows.start).masked_fill(elsewhere, 0)
        found = F.embedding(own, self.weight).masked_fill(elsewhere[..., None], 0)
        return exchange(dist.all_reduce, found)


@torch.no_grad()
def split(model: Decoder, shard: Shard) -> Decoder:
    """Change a loaded model of config ``shard.local`` into one that sums with the other ranks, and
    return it; parameter names stay.

    Its ``config`` then has the whole vocabulary, but the heads and the MLP of this rank, as its
    cache and its blocks need. A call of the model returns all logits; ``model.logits`` alone
    returns those of this rank's part of the vocabulary. ``model.fast`` refuses it.
    """
    size = shard.config.vocab_size
    vocab = shard.part("vocab_size")
    model.embed_tokens = SplitEmbedding(model.embed_tokens.weight, vocab)
    for block in model.layers:
        for sublayer, bias in (
            (block.self_attn, block.self_attn.o_proj.bias),
            (block.mlp, block.mlp.down_proj.bias),
        ):
            sublayer.register_forward_hook(
                lambda module, inputs, output: exchange(dist.all_reduce, output)
            )
            if bias is not None and shard.rank:
                bias.zero_()  # rank 0 adds it
    padding = (vocab.start, size - vocab.stop)
    model.register_forward_hook(
        lambda module, inputs, logits: exchange(dist.all_reduce, F.pad(logits, padding))
    )
    model.config = replace(model.config, vocab_size=size)
    model.vocab_size = size
    return model
