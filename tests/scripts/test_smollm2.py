"""Parity with transformers on the real checkpoint: logits, greedy texts, chat template."""

from pathlib import Path

import pytest
import torch
import transformers

import generate
from app.session import Session

transformers.logging.set_verbosity_error()

NEW_TOKENS = 24
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light the most."},
        {"role": "user", "content": "And at sunset?"},
    ],
    [{"role": "user", "content": "Write a long story about a lighthouse keeper and a storm."}],
]


@pytest.fixture(scope="module")
def session(smollm2: Path) -> Session:
    how = {"draft": "none", "max_new_tokens": NEW_TOKENS, "device": "cpu", "dtype": "float32"}
    return generate.load(str(smollm2), **how)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "conversation", CONVERSATIONS, ids=["question", "conversation", "long answer"]
)
@torch.inference_mode()
def test_plain_decoding_of_a_chat_is_transformers_greedy_text_up_to_and_with_the_end_of_turn(
    session: Session,
    theirs: transformers.PreTrainedModel,
    smollm2: Path,
    conversation: list[dict[str, str]],
) -> None:
    """By the production loop, without a draft; the prompt's ids, the logits of the whole and the
    ids that end a text are transformers' too.
    """
    prompt = session.encode(conversation)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    how = {"add_generation_prompt": True, "return_dict": False}
    assert prompt == their_tokenizer.apply_chat_template(conversation, **how)
    eos_ids = session.tokenizer.eos_ids
    assert eos_ids == set(theirs.generation_config.eos_token_id)
    written = session.finish(session.begin(prompt)).tokens
    tokens = torch.tensor([prompt + written[:-1]])
    logits = theirs(tokens).logits
    assert (session.model(tokens) - logits).abs().max() < 2e-3
    assert written == logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    ends = [token in eos_ids for token in written]
    assert len(written) == NEW_TOKENS or ends.index(True) == len(written) - 1
