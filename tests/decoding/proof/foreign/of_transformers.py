"""Texts by ``transformers``, plain and assisted, on Llamas of two layers and three tokens.

Each function writes up to three tokens with the sampling parameters named by ``PARAMETERS`` in the
environment, by default those of temperature alone.
"""

import os
from functools import partial

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SETS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "typical": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.2},
    "repetition penalty": {"repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "minimum length": {"min_new_tokens": 2, "eos_token_id": 1},
    "bad words": {"bad_words_ids": [[1, 2]]},
    "suppressed tokens": {"suppress_tokens": [2]},
    "end of text": {"eos_token_id": 1},
}
PROMPT = torch.tensor([[0, 1, 2, 0, 1]])


def random_model(seed: int) -> LlamaForCausalLM:
    """Llama with random weights, large enough that its distributions differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=3,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.8,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double().eval()


TARGET = random_model(0)
DRAFT = random_model(1)


ASSISTED = {
    "draft model": {"assistant_model": DRAFT},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "early exit": {"assistant_early_exit": 1},
}


def plain(
    parameters: str = os.environ.get("PARAMETERS", "temperature"), **assistance: object
) -> tuple[int, ...]:
    """Tokens of a sampled text."""
    helper = assistance.pop("assistant_model", None)
    config = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "pad_token_id": 0}
    config = GenerationConfig(
        **config | SETS[parameters] | assistance,
        num_assistant_tokens=2,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    mask = torch.ones_like(PROMPT)
    written = TARGET.generate(
        PROMPT, attention_mask=mask, generation_config=config, assistant_model=helper
    )
    return tuple(written[0, PROMPT.shape[1] :].tolist())


draft_model = partial(plain, **ASSISTED["draft model"])
prompt_lookup = partial(plain, **ASSISTED["prompt lookup"])
early_exit = partial(plain, **ASSISTED["early exit"])
