"""Texts by the self-speculation of LayerSkip, in the clone that LAYERSKIP names."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.decoding.proof.foreign.bigrams import (
    DRAFT,
    PROMPT,
    TARGET,
    TOKENS,
    foreign,
    unfiltered,
)

# of older versions; nothing is filtered here
transformers.top_k_top_p_filtering = unfiltered
generator = foreign("LAYERSKIP", "self_speculation.self_speculation_generator")


def answering(table: Tensor) -> Callable[..., Any]:
    """A function that gives this table's logits in place of those of some layers."""
    return lambda model, tokens, *unused: SimpleNamespace(
        logits=table.log()[tokens.long()], past_key_values=(), exit_query_cache=None
    )


generator.forward_early = answering(DRAFT)
generator.forward_remainder = answering(TARGET)


def speculative() -> tuple[int, ...]:
    """A text by ``generate_token_ids``, with two drafted tokens per round."""
    settings = generator.GenerationConfig(
        max_steps=TOKENS, exit_layer=1, num_speculations=2, temperature=1.0, top_k=0, top_p=1.0
    )
    model = SimpleNamespace(device=torch.device("cpu"))
    strategy = generator.SelfSpeculativeGenerationStrategy()
    return tuple(strategy.generate_token_ids(model, PROMPT, [-1], settings).predicted_tokens)
