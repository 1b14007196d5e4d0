"""Checkpoints by their names: parity with transformers of ids, logits and greedy texts, and plans
that fit them.
"""

from pathlib import Path

import pytest
import torch
import transformers

import generate
from tests.commands import Run

transformers.logging.set_verbosity_error()

EXITS = {"small-llama": 4, "tiny-llama": 6, "tiny-gemma2": 6}  # after about a quarter of the layers
SAME_TOKENIZER = {"tiny-llama", "tiny-gemma2"}  # so that either can draft for the other
STORY = "Write a short story about a fox."
CONVERSATIONS = {  # the first is longer than Gemma-2's sliding window
    "long": [{"role": "user", "content": STORY * 10}],
    "short": [{"role": "user", "content": "What is the capital of France?"}],
    "conversation": [
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light the most."},
        {"role": "user", "content": "And at sunset?"},
    ],
}
NEW_TOKENS = 24


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", *EXITS])
@torch.inference_mode()
def test_plain_decoding_of_a_chat_is_transformers_greedy_text_up_to_and_with_the_end_of_turn(
    name: str, smollm2: Path
) -> None:
    session = generate.load(
        name, draft="none", max_new_tokens=NEW_TOKENS, device="cpu", dtype="float32"
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        session.folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(session.folder)
    ending = torch.tensor(theirs.generation_config.eos_token_id).flatten().tolist()
    assert session.tokenizer.eos_ids == {*ending}
    for conversation in CONVERSATIONS.values():
        applied = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        prompt = session.encode(conversation)
        assert prompt == applied["input_ids"]
        written = session.finish(session.begin(prompt)).tokens
        tokens = torch.tensor([prompt + written[:-1]])
        logits = theirs(tokens).logits
        torch.testing.assert_close(session.model(tokens), logits, rtol=1e-4, atol=2e-3)
        assert written == logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        assert not {*written[:-1]} & {*ending}
        assert len(written) == NEW_TOKENS or written[-1] in ending


@pytest.mark.parametrize("name", EXITS)
def test_a_shipped_model_writes_by_name_and_drafting_changes_nothing(name: str, run: Run) -> None:
    """By the plan in its folder, which skips some layers, and at an exit, also of another model."""
    options = [STORY, "--model", name, "--dtype", "float32", "--max-new-tokens", "40", "--json"]
    text = run(*options, "--draft", "none").result["text"]
    assert sum(word.isalpha() and word.isascii() for word in text.split()) > 15
    drafts = [["skip", "--gamma", "4"], ["exit", "--exit-layer", EXITS[name]]]
    for other in SAME_TOKENIZER - {name} if name in SAME_TOKENIZER else ():
        drafts.append(["model", "--draft-model", other])
    for draft in drafts:
        result = run(*options, "--draft", *draft).result
        assert result["text"] == text and 0.2 < result["acceptance_rate"] < 1
