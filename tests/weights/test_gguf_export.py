"""A GGUF file holds the model that was written: tensor by tensor, and as llama.cpp runs it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader

from model import Decoder, InputError, build, parse_config
from tests.folders import GEMMA2, LLAMA, write_folder
from weights.gguf.export import interleave, open_in_llama_cpp, write_gguf
from weights.gguf.llama import hugging_face_name, uninterleave
from weights.load import load_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
HEADS = {"attn_q": 4, "attn_k": 2}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_comes_back_to_the_bit(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path / "model", LLAMA | {"tie_word_embeddings": tied}, dtype=dtype))
    write_gguf(model, tmp_path / "model.gguf")
    read = {}
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        bits = torch.from_numpy(tensor.data.copy()).view(dtype if len(tensor.shape) > 1 else torch.float32)
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if part in HEADS:
            bits = torch.from_numpy(uninterleave(bits.float().numpy(), HEADS[part])).to(dtype)
        read[hugging_face_name(tensor.name).removeprefix("model.")] = bits
    state = model.state_dict()
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name].to(dtype), state[name]) for name in state)


def test_interleaving_lays_the_pairs_that_turn_together_side_by_side() -> None:
    rows = torch.arange(8)[:, None]
    assert interleave(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    "config", [GEMMA2, LLAMA | {"attention_bias": True}, LLAMA | {"mlp_bias": True}], ids=["gemma", "qkv", "mlp"]
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    model: Decoder = build(parse_config(config))
    with pytest.raises(InputError, match="only Llama models without biases"):
        write_gguf(model, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [{}, {"rope_scaling": LLAMA3}, {"tie_word_embeddings": True}, {"head_dim": 16}])
def test_llama_cpp_writes_the_same_greedy_text(more: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which compiles for minutes: pip install it to run this"
    )
    folder = write_folder(tmp_path / "model", LLAMA | more)
    model, tokens = load_model(folder), [5, 9, 200, 31] * 20
    theirs = open_in_llama_cpp(folder, torch.float32, torch.device("cpu"), 128)
    found = list(islice(theirs.generate(tokens, temp=0.0), 16))
    for _ in range(16):
        tokens = [*tokens, model(torch.tensor([tokens]))[0, -1].argmax().item()]
    assert found == tokens[-16:]
