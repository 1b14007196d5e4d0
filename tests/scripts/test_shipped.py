"""Checkpoints that ship with the project: they work by name, also in transformers, and their plans
fit them.
"""

from pathlib import Path

import pytest
import torch
import transformers

from decoding.run.plan_file import read_plan
from model import LayerPlan
from tests.commands import Run
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

EXITS = {  # after about a quarter and a half of the layers
    "small-llama": (4, 8),
    "tiny-llama": (6, 12),
    "tiny-gemma2": (6, 12),
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
    options = [PROMPT, "--model", folder.name, "--dtype", "float32", "--max-new-tokens", "40"]
    text = run(*options, "--json", "--draft", "none").result["text"]
    assert sum(word.isalpha() and word.isascii() for word in text.split()) > 15
    drafts = [["skip", "--gamma", "4"], ["exit", "--exit-layer", EXITS[folder.name][0]]]
    if folder.name in SAME_TOKENIZER:
        (other,) = SAME_TOKENIZER - {folder.name}
        drafts.append(["model", "--draft-model", other])
    for draft in drafts:
        result = run(*options, "--json", "--draft", *draft).result
        assert result["text"] == text and result["acceptance_rate"] > 0.2


@torch.inference_mode()
def test_early_layers_of_a_shipped_model_speak_better_the_deeper_the_exit(folder: Path) -> None:
    """Greedy agreement with the full model on a short story."""
    model, tokenizer = load_model(folder, torch.float32), Tokenizer(folder)
    text = "Write a story about a bear.\n\nOnce upon a time, a little bear named Max lived in the"
    tokens = torch.tensor([tokenizer.encode(f"{text} woods.")])
    full = model(tokens).argmax(-1)
    agreement = [
        (model(tokens, plan=LayerPlan.early_exit(model.num_layers, layer)).argmax(-1) == full)
        .float()
        .mean()
        .item()
        for layer in (1, *EXITS[folder.name], model.num_layers)
    ]
    assert agreement == sorted(agreement) and agreement[1] > 0.6 and agreement[-1] == 1


def test_the_plan_of_a_shipped_model_was_made_for_it_and_skips_layers(folder: Path) -> None:
    plan = read_plan(folder / "plan.json", load_model(folder).num_layers, folder)
    assert plan.gamma is not None and plan.plan.skipped_attention and plan.plan.skipped_mlp
