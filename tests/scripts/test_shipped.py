"""Checkpoints that ship with the project: they work by name, also in transformers, and their plans
fit them.
"""

from pathlib import Path

import pytest
import torch
import transformers

from tests.commands import Run
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

EXITS = {  # after about a quarter of the layers
    "small-llama": 4,
    "tiny-llama": 6,
    "tiny-gemma2": 6,
}
SAME_TOKENIZER = {"tiny-llama", "tiny-gemma2"}  # so that either can draft for the other
PROMPT = "Write a short story about a fox."


@pytest.fixture(scope="module", params=EXITS)
def folder(request: pytest.FixtureRequest) -> Path:
    return model_folder(request.param)


@torch.inference_mode()
def test_logits_and_tokens_of_a_shipped_model_are_those_of_transformers(folder: Path) -> None:
    """The text is longer than Gemma-2's sliding window."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": PROMPT * 10}]
    ids = Tokenizer(folder).encode_chat(messages)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ids
    assert len(ids) > 64
    tokens, ours = torch.tensor([ids]), load_model(folder, torch.float32)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_shipped_model_writes_by_name_and_drafting_changes_nothing(
    folder: Path, run: Run
) -> None:
    """By the plan in its folder, which skips some layers, and at an exit, also of another model."""
    options = [PROMPT, "--model", folder.name, "--dtype", "float32", "--max-new-tokens", "40"]
    text = run(*options, "--json", "--draft", "none").result["text"]
    assert sum(word.isalpha() and word.isascii() for word in text.split()) > 15
    drafts = [["skip", "--gamma", "4"], ["exit", "--exit-layer", EXITS[folder.name]]]
    if folder.name in SAME_TOKENIZER:
        (other,) = SAME_TOKENIZER - {folder.name}
        drafts.append(["model", "--draft-model", other])
    for draft in drafts:
        result = run(*options, "--json", "--draft", *draft).result
        assert result["text"] == text and 0.2 < result["acceptance_rate"] < 1
