"""Texts by the self-speculation of fast-llm-inference, in the clone that FAST_LLM names."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.decoding.proof.foreign.bigrams import DRAFT, PROMPT, TARGET, TOKENS, Bigrams, foreign

# Its block is of an older transformers; the tables take its place.
block = ModuleType("layerskip_modeling.modeling_layerskip_gemma2")
block.LayerSkipGemma2ForCausalLM = None
sys.modules[block.__name__] = block
loop = foreign("FAST_LLM", "self_speculative_decoding.run_self_sepculative_decoding")
sample = loop.sample_next_token


class SelfDrafting(Bigrams):
    """Table of the target, and of the draft in its draft mode."""

    def set_draft_mode(self, drafts: bool) -> None:
        self.table = DRAFT if drafts else TARGET

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return super().__call__(input_ids)


def write(with_residual: bool) -> tuple[int, ...]:
    """A text in rounds of one drafted token, cut to its length. Its own function can draw from the
    residual, which its loop does not ask for.
    """
    tokens = SimpleNamespace(eos_token_id=-1, pad_token_id=0)
    model = SelfDrafting(TARGET)
    text = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT))}
    while text["input_ids"].shape[1] < len(PROMPT) + TOKENS:
        loop.sample_next_token = sample
        text, drafted, _ = loop.drafter_speculative_decode(model, tokens, text, gamma=1)
        if with_residual:
            loop.sample_next_token = partial(sample, diff_probs=drafted)
        text, *_ = loop.target_speculative_decode(model, tokens, text, drafted)
    return tuple(text["input_ids"][0, len(PROMPT) : len(PROMPT) + TOKENS].tolist())


speculative = partial(write, with_residual=False)
corrected = partial(write, with_residual=True)
