"""Decoder of all model families: the pass over its blocks, at explicit positions under a plan."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig
from model.gemma2 import Gemma2Block
from model.layers import Attend, attend_causally, layer_positions
from model.llama import LlamaBlock
from model.low_bits import PlannedBlocks
from model.plan import LayerPlan
from model.steps import Steps

PREFILL_CHUNK = 256  # prompt tokens per forward pass: bounds the memory of activations
BLOCKS = {"llama": LlamaBlock, "gemma2": Gemma2Block}


class Decoder(Steps, nn.Module):
    """Embedding, blocks, final norm, head; ``lm_head`` is None where it is tied to the embedding.

    A new decoder has no weights: load them, or call ``initialise``. Its block, one of ``BLOCKS``,
    has the type of the final norm too, and is called as ``block(x, positions, cache, attention=...,
    mlp=...)``. Parameter names are those of the checkpoint, without the prefix ``model.``.
    ``importance`` holds, for each linear layer where it was measured, the mean square of its
    inputs, ``[in]``: weights are rounded by it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.num_layers = config.num_layers
        self.importance: dict[nn.Module, Tensor] = {}
        # Not initialised: on the meta device that would import torch's compiler, which takes two
        # seconds.
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size), freeze=False
        )
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        new_block = BLOCKS[config.family.block]
        self.layers = nn.ModuleList(new_block(config) for _ in range(config.num_layers))
        self.norm = new_block.norm(config.hidden_size, config.norm_eps)
        # ``model.fast`` replaces both by faster ones
        self.attend: Attend = attend_causally  # of prompts
        self.planned = PlannedBlocks(self)

    def initialise(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Set a new model's weights: matrices and embedding normal with ``std``, biases 0."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def embedding_scale(self) -> float:
        """Factor of embeddings, 1 or √hidden, rounded to the model's dtype as in training: √3584
        is 59.75 in bf16.
        """
        scale = self.config.hidden_size**0.5 if self.config.family.scaled_embedding else 1.0
        return torch.tensor(scale, dtype=self.dtype).item()

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Return an empty cache of ``capacity`` positions in the model's dtype and device."""
        return KVCache(
            self.num_layers,
            (batch, self.config.num_kv_heads, capacity, self.config.head_dim),
            self.dtype,
            self.device,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens: ``[batch, T]`` ids -> ``[batch, T, hidden]``."""
        return self.embed_tokens(tokens) * self.embedding_scale

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Return the hidden states after the blocks of ``plan`` (all by default): ``[batch, T]``
        ids -> ``[batch, T, hidden]``.

        The T tokens have positions ``[start, start + T)``, and their keys and values are written
        there. Without a cache the tokens attend to each other only. Raises ValueError as
        ``LayerPlan.of`` does and, with a cache, as ``check`` does.
        """
        plan = LayerPlan.of(self.num_layers, plan)
        if cache is not None:
            self.check(plan, tokens, cache, start)
        x = self.embed(tokens)
        attend = partial(self.attend, newest=plan.window) if plan.window else self.attend
        by_layer = layer_positions(self.config, start, tokens.shape[1], x, attend)
        for (block, attention, mlp), positions in zip(
            self.planned.blocks(plan), by_layer, strict=True
        ):
            x = block(x, positions, cache, attention=attention, mlp=mlp)
        return x

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits by final norm and head: ``[batch, T, hidden]`` ->
        ``[batch, T, vocab]``.

        ``head`` is a low-bit copy to use in place of the model's head.
        """
        head = head or self.lm_head or partial(F.linear, weight=self.embed_tokens.weight)
        logits = head(self.norm(hidden))
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Return the logits after each token, ``[batch, T]`` ids -> ``[batch, T, vocab]``: see
        ``hidden``.
        """
        return self.logits(
            self.hidden(tokens, cache, start, plan), self.planned.head(plan.head) if plan else None
        )

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        """Write the cache entries of ``[batch, T]`` prompt tokens; the head does not run."""
        for chunk, chunk_start in chunks(tokens, start):
            self.hidden(chunk, cache, chunk_start)


def chunks(tokens: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the chunks of ``[batch, T]`` prompt tokens, each with its first position.

    They end at multiples of ``PREFILL_CHUNK``, however a prompt is split over calls.
    """
    while tokens.shape[1]:
        count = PREFILL_CHUNK - start % PREFILL_CHUNK
        yield tokens[:, :count], start
        tokens = tokens[:, count:]
        start += count
