"""Texts by ``speculative_decode`` of gpt-fast, in the clone that GPT_FAST names."""

from typing import Any

import torch
from torch import Tensor

from tests.decoding.proof.foreign.bigrams import DRAFT, PROMPT, TARGET, TOKENS, foreign

generate = foreign("GPT_FAST", "generate")


class Mask:
    """Stands for a block mask, which no table reads."""

    BLOCK_SIZE = (128, 128)
    mask_mod = None

    def __getitem__(self, places: Any) -> "Mask":
        return self


def table_model(table: Tensor) -> Any:
    """Model called with tokens and positions, and before them a mask or none."""

    def model(*given: Tensor) -> Tensor:
        return table.log()[given[-2].reshape(1, -1).long()]

    model.max_seq_length = 64
    return model


def sample(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Token and probabilities without a batch, as ``speculative_decode`` reads them. At the commit
    judged, the clone's own function gives them with one, and the two do not fit together.
    """
    probs = generate.logits_to_probs(logits[0, -1], **options)
    return generate.multinomial_sample_one_no_sync(probs), probs


generate.create_block_mask = lambda *given, **named: Mask()
generate.sample = sample


def speculative() -> tuple[int, ...]:
    """A text of several rounds of two drafted tokens, cut to its length."""
    text = torch.tensor(PROMPT)
    while len(text) < len(PROMPT) + TOKENS:
        round = generate.speculative_decode(
            table_model(TARGET), table_model(DRAFT), text[-1], len(text) - 1, 2
        )
        text = torch.cat((text, round.long()))
    return tuple(text[len(PROMPT) : len(PROMPT) + TOKENS].tolist())
