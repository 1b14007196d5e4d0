"""Checkpoints travel both ways between this project and transformers."""

import filecmp
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.common.files import read_json
from model.fast import accelerate
from tests.configs import FAMILIES, LLAMA3_ROPE, small
from tests.folders import LLAMA, write_folder
from tests.laws import random_model
from tests.oracle import (
    VOCAB,
    configs,
    lifted,
    oracle_logits,
    oracle_model,
    our_model,
)
from tests.refusal import refusal
from weights.checkpoint import INDEX, save_model
from weights.load import load_model

all_families = pytest.mark.parametrize("family", FAMILIES)
TOKENS = torch.arange(14)[None] % VOCAB


def raw_config(family: str, **more: object) -> dict[str, object]:
    raw = small(
        family,
        hidden=16,
        layers=2,
        vocab_size=VOCAB,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        tie_word_embeddings=family.startswith("gemma"),
        rope_theta=5000.0,
        rope_scaling=LLAMA3_ROPE | {"original_max_position_embeddings": 32},
        rope_local_base_freq=100.0,
    )
    return raw | more


@all_families
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_one_library_saves_loads_in_the_other_with_the_same_logits(family, tied, tmp_path):
    """Ours with every weight that transformers wants, without its float32 casts; and theirs in
    several files. A model prepared for speed has the same tensors.
    """
    ours = random_model(raw_config(family, tie_word_embeddings=tied, attention_bias=True))
    save_model(ours, tmp_path)
    with lifted():
        oracle, report = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values()), report
        logits = oracle_logits(oracle, TOKENS).detach()
    oracle.save_pretrained(tmp_path / "theirs", max_shard_size=3000)
    assert (tmp_path / "theirs" / INDEX).exists()
    for model in (ours, load_model(tmp_path / "theirs")):
        torch.testing.assert_close(model(TOKENS), logits, rtol=0, atol=1e-9)  # in float64 too
    names = load_file(tmp_path / "model.safetensors").keys()
    save_model(accelerate(ours.float()), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == names


@all_families
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_config_survives_saving_and_loading(family, data, tmp_path_factory):
    """As transformers reads it too."""
    folder, ours = tmp_path_factory.mktemp("saved"), random_model(data.draw(configs(family)))
    save_model(ours, folder)
    again, oracle = load_model(folder), oracle_model(read_json(folder / "config.json"), seed=1)
    assert again.config == ours.config and torch.equal(again(TOKENS), ours(TOKENS))
    expected = oracle_logits(oracle, TOKENS)
    torch.testing.assert_close(our_model(oracle)(TOKENS), expected, rtol=0, atol=1e-4)


def test_a_write_that_fails_leaves_the_checkpoint_before_it_untouched(tmp_path, monkeypatch):
    save_model(random_model(raw_config("llama")), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("weights.checkpoint.write_json", Mock(side_effect=full))
    said = refusal(save_model, random_model(raw_config("gemma2")), tmp_path)
    assert "cannot be written: No space left on device" in said
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_tokenizer_and_the_ids_that_end_a_text_go_with_the_weights(tmp_path):
    """Those of another folder, and then of this one."""
    ids = {"eos_token_id": [7, 9], "bos_token_id": 3}
    source, folder = write_folder(tmp_path / "source", LLAMA | ids), tmp_path / "saved"
    (source / "notes.txt").write_text("not the tokenizer's")
    for taken_from in (source, folder):
        save_model(random_model(raw_config("llama")), folder, tokenizer_from=taken_from)
        assert (ids | {"hidden_size": 16}).items() <= read_json(folder / "config.json").items()
        assert filecmp.dircmp(source, folder).left_only == ["notes.txt"]
        assert filecmp.cmp(folder / "tokenizer.json", source / "tokenizer.json", shallow=False)
