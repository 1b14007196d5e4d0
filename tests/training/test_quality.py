"""Bits per byte: the code length of a text under a model, in bits, over the bytes of the text."""

from pathlib import Path

import pytest
import torch

from tests.folders import LLAMA, VOCAB_SIZE, write_folder
from training.quality import bits_per_byte, main
from weights.load import load_model
from weights.tokenizer import Tokenizer


def test_each_token_costs_the_logarithm_of_the_vocabulary_under_a_model_that_knows_nothing(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "model", LLAMA)
    model = load_model(folder, torch.float32)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    tokenizer = Tokenizer(folder)
    documents = ["the tin hen", "naïve"]
    coded = sum(len(tokenizer.encode(each)) - 1 for each in documents)
    size = sum(len(each.encode()) for each in documents)
    expected = coded * torch.tensor(VOCAB_SIZE).log2().item() / size
    assert bits_per_byte(model, tokenizer, documents) == pytest.approx(expected)


def test_text_without_a_held_out_document_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line\n")
    folder = write_folder(tmp_path / "model", LLAMA)
    assert main(["--model", str(folder), "--data", str(text)]) == 2
    assert "none of the documents is held out: give more text" in capsys.readouterr().err
