"""Texts by feifeibear/LLMSpeculativeSampling, in the clone that LLM_SPECULATIVE_SAMPLING names."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.decoding.proof.foreign.bigrams import (
    DRAFT,
    PROMPT,
    TARGET,
    TOKENS,
    Bigrams,
    foreign,
)

rules = foreign("LLM_SPECULATIVE_SAMPLING", "sampling.speculative_sampling")


def write(rule: Callable[..., Tensor], **options: int) -> tuple[int, ...]:
    """A text by this function, cut to its length."""
    written = rule(
        torch.tensor([PROMPT]), Bigrams(DRAFT), Bigrams(TARGET), TOKENS, gamma=2, **options
    )
    return tuple(written[0, len(PROMPT) :][:TOKENS].tolist())


with_cache = partial(write, rules.speculative_sampling)
without_cache = partial(write, rules.speculative_sampling_v2)
# which it sets again before each number
with_a_seed = partial(write, rules.speculative_sampling, random_seed=1)
