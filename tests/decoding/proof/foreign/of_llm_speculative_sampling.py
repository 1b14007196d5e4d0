"""Texts by feifeibear/LLMSpeculativeSampling, in the clone that LLM_SPECULATIVE_SAMPLING names."""

import torch

from tests.decoding.proof.foreign.bigrams import (
    DRAFT,
    PROMPT,
    TARGET,
    TOKENS,
    Bigrams,
    foreign,
)

rules = foreign("LLM_SPECULATIVE_SAMPLING", "sampling.speculative_sampling")


def with_cache() -> tuple[int, ...]:
    """A text by ``speculative_sampling``, cut to its length."""
    written = rules.speculative_sampling(
        torch.tensor([PROMPT]), Bigrams(DRAFT), Bigrams(TARGET), TOKENS, gamma=2
    )
    return tuple(written[0, len(PROMPT) :][:TOKENS].tolist())


def without_cache() -> tuple[int, ...]:
    """A text by ``speculative_sampling_v2``, cut to its length."""
    written = rules.speculative_sampling_v2(
        torch.tensor([PROMPT]), Bigrams(DRAFT), Bigrams(TARGET), TOKENS, gamma=2
    )
    return tuple(written[0, len(PROMPT) :][:TOKENS].tolist())


def with_a_seed() -> tuple[int, ...]:
    """A text by ``speculative_sampling`` with a seed, which it sets again before each number."""
    written = rules.speculative_sampling(
        torch.tensor([PROMPT]), Bigrams(DRAFT), Bigrams(TARGET), TOKENS, gamma=2, random_seed=1
    )
    return tuple(written[0, len(PROMPT) :][:TOKENS].tolist())
