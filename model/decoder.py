"""Decoder: base class of all model families, with the pass over its blocks for explicit positions,
cache and plan.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig
from model.layers import attend_causally, layer_positions
from model.plan import LayerPlan
from model.quantise import rounded
from model.twins import Twins

PREFILL_CHUNK = 2048  # prompt tokens per forward pass: bounds the memory of activations


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head; ``lm_head`` is None where it is tied to the embedding.

    A family's file supplies ``norm`` and ``layers``, modules called as ``block(x, positions, cache,
    attention=..., mlp=...)``. Parameter names are those of the checkpoint, without the prefix
    ``model.``. ``fast_bits`` are the numbers of bits in which a draft takes less time; low bits are
    only a reference here. ``trouble`` is the reason why static steps fell back to the readable
    blocks, if they did. ``why_rows_vary`` is None if the bits of a position's logits do not
    depend on the other rows of the step; else one line with the reason.
    """

    layers: nn.ModuleList
    norm: nn.Module
    embedding_scale = 1.0
    fast_bits: tuple[int, ...] = ()
    trouble: str | None = None
    why_rows_vary: str | None = "the readable blocks round a row differently alone and among others"
    # ``model.fast`` puts faster functions here
    attend, rounded = staticmethod(attend_causally), staticmethod(rounded)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.max_positions, self.num_layers = config.max_positions, config.num_layers
        # Not initialised: on the meta device torch's initialisation would import its compiler, in
        # two seconds.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.twins = Twins(self)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan now, not while a text is timed."""
        self(torch.zeros(1, 1, dtype=torch.int64, device=self.device), plan=plan)

    def initialise(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Set a new model's weights for training: matrices and embedding normal with ``std``,
        biases 0.
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std, generator=generator)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Empty cache for ``capacity`` positions, in the model's dtype and on its device."""
        shape = (batch, self.config.num_kv_heads, capacity, self.config.head_dim)
        return KVCache(self.num_layers, shape, self.dtype, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens: ``[batch, T]`` ids -> ``[batch, T, hidden]``."""
        return self.embed_tokens(tokens)

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Hidden states after the blocks of ``plan`` (all by default): ``[batch, T]`` ids ->
        ``[batch, T, hidden]``.

        The T tokens have positions ``[start, start + T)``, and their keys and values are written
        there. Without a cache the tokens attend to each other only.
        """
        plan, x = plan or LayerPlan.full(self.num_layers), self.embed(tokens)
        positions = layer_positions(self.config, start, tokens.shape[1], x, self.attend)
        for layer, (attention, mlp) in enumerate(zip(plan.attention, plan.mlp, strict=True)):
            block = self.twins.block(layer, attention, mlp)
            x = block(x, positions[layer], cache, attention=attention > 0, mlp=mlp > 0)
        return x

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits by final norm and head: ``[batch, T, hidden]`` -> ``[batch, T, vocab]`` in the
        model's dtype.

        ``head`` is the low-bit twin to use in place of the model's head.
        """
        hidden = self.norm(hidden)
        if head is not None:
            return head(hidden)
        return (
            F.linear(hidden, self.embed_tokens.weight)
            if self.lm_head is None
            else self.lm_head(hidden)
        )

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Next-token logits after each token: ``[batch, T]`` ids -> ``[batch, T, vocab]``. See
        ``hidden``.
        """
        return self.logits(
            self.hidden(tokens, cache, start, plan), self.twins.head(plan.head) if plan else None
        )

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        """Write the cache entries of ``[batch, T]`` prompt tokens; the head does not run.

        Chunks end at multiples of ``PREFILL_CHUNK``, however a prompt is split over calls.
        """
        while tokens.shape[1]:
            count = chunk_at(start)
            self.hidden(tokens[:, :count], cache, start)
            tokens, start = tokens[:, count:], start + count


def chunk_at(start: int) -> int:
    """Most prompt tokens of a chunk that begins at position ``start``."""
    return PREFILL_CHUNK - start % PREFILL_CHUNK
