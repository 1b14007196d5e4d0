"""Checkpoints that ship with the project: they work by name, also in transformers, and their plans
fit them.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers

import generate
from decoding.run.plan_file import read_plan
from model import LayerPlan
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

NAMES = ("tiny-llama", "tiny-gemma2")
PROMPT = "Write a short story about a fox."
EARLY, MIDDLE = 6, 12  # exits of their 24 layers


@pytest.fixture(scope="module", params=NAMES)
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
    tokens = torch.tensor([ids])
    ours = load_model(folder, torch.float32)(tokens)
    torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_shipped_model_writes_by_name_and_drafting_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = next(name for name in NAMES if name != folder.name)
    texts = []
    for draft in (
        ["none"],
        ["skip", "--gamma", "4"],
        ["exit", "--exit-layer", str(EARLY)],
        ["model", "--draft-model", other],
    ):
        options = [PROMPT, "--model", folder.name, "--dtype", "float32", "--max-new-tokens", "40"]
        assert generate.main([*options, "--json", "--draft", *draft]) == 0
        result = json.loads(capsys.readouterr().out)
        texts.append(result["text"])
        assert draft == ["none"] or result["acceptance_rate"] > 0.2
    assert len(set(texts)) == 1
    assert sum(word.isalpha() and word.isascii() for word in texts[0].split()) > 15


@torch.inference_mode()
def test_early_layers_of_a_shipped_model_speak_better_the_deeper_the_exit(folder: Path) -> None:
    """Greedy agreement with the full model on a short story."""
    model, tokenizer = load_model(folder, torch.float32), Tokenizer(folder)
    text = (
        "Write a story about a bear.\n\nOnce upon a time, a little bear named Max lived in the"
        " woods."
    )
    tokens = torch.tensor([tokenizer.encode(text)])
    full = model(tokens).argmax(-1)
    agreement = [
        (model(tokens, plan=LayerPlan.early_exit(model.num_layers, layer)).argmax(-1) == full)
        .float()
        .mean()
        .item()
        for layer in (1, EARLY, MIDDLE, model.num_layers)
    ]
    assert agreement == sorted(agreement) and agreement[1] > 0.6 and agreement[-1] == 1


def test_the_plan_of_a_shipped_model_was_made_for_it_and_skips_layers(folder: Path) -> None:
    plan = read_plan(folder / "plan.json", load_model(folder).num_layers, folder)
    assert plan.gamma is not None
    assert plan.plan.skipped_attention and plan.plan.skipped_mlp
