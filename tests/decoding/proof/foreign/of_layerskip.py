"""Texts by the self-speculation of LayerSkip, in the clone that LAYERSKIP names."""

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


def early(model: Any, tokens: Tensor, *unused: Any) -> Any:
    """The draft's logits in place of those of the first layers."""
    return SimpleNamespace(
        logits=DRAFT.log()[tokens.long()], past_key_values=(), exit_query_cache=None
    )


def remainder(model: Any, tokens: Tensor, *unused: Any) -> Any:
    """The target's logits in place of those of the other layers."""
    return SimpleNamespace(logits=TARGET.log()[tokens.long()], past_key_values=())


generator.forward_early = early
generator.forward_remainder = remainder


def speculative() -> tuple[int, ...]:
    """A text by ``generate_token_ids``, with two drafted tokens per round."""
    settings = generator.GenerationConfig(
        max_steps=TOKENS, exit_layer=1, num_speculations=2, temperature=1.0, top_k=0, top_p=1.0
    )
    model = SimpleNamespace(device=torch.device("cpu"))
    strategy = generator.SelfSpeculativeGenerationStrategy()
    return tuple(strategy.generate_token_ids(model, PROMPT, [-1], settings).predicted_tokens)
