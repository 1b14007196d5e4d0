"""Texts by Draft & Verify, in the clone that DRAFT_AND_VERIFY names."""

from functools import partial
from typing import Any

import torch
import transformers

from tests.decoding.proof.foreign.bigrams import (
    PROMPT,
    TARGET,
    TOKENS,
    Bigrams,
    foreign,
    unfiltered,
)

# of older versions; nothing is filtered here
transformers.top_k_top_p_filtering = unfiltered
decoding = foreign("DRAFT_AND_VERIFY", "decoding")


class SelfDrafting(Bigrams):
    """Model that answers by a dictionary."""

    def __call__(self, **given: Any) -> dict[str, Any]:
        return vars(super().__call__(**given))


def write(**options: bool) -> tuple[int, ...]:
    """A text by ``self_speculative_sample``, in rounds of up to two drafted tokens, which the
    draft's confidence does not end.
    """
    found = decoding.self_speculative_sample(
        SelfDrafting(TARGET),
        None,
        torch.tensor([PROMPT]),
        max_new_tokens=TOKENS,
        max_step_draft=2,
        th_stop_draft=0.0,
        auto_th_stop_draft=False,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        **options,
    )
    return tuple(found["generate_ids"][0, :TOKENS].tolist())


greedy_draft = write
speculative = partial(write, do_sample_draft=True)
