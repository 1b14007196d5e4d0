"""Conversion of SmolLM2's GGUF file, in the format of llama.cpp, to the weights of a Hugging Face folder in bf16.

Three differences from the original checkpoint are undone here: tensor names, block quantisation, and the order of the
rows of q and k. llama.cpp rotates neighbouring pairs of rows, Hugging Face the two halves of a head, so llama.cpp's
converter interleaves the halves. ``weights.fetch`` has compared the file's checksum, so nothing is checked here.
"""

from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models

from model import build
from weights.cli.files import atomic_path
from weights.load import read_config
from weights.vocabulary import byte_level_tokenizer

CONTROL_TOKEN = 3  # llama.cpp's token type for tokens that are not text


def convert(gguf: Path, folder: Path) -> None:
    """Write ``model.safetensors`` (bf16) and ``tokenizer.json`` of a GGUF file beside their ``config.json``."""
    reader, config, state = GGUFReader(gguf), read_config(folder), {}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.device("meta"):
        wanted = list(build(config).state_dict())
    for name in track(wanted, "dequantising", console=Console(stderr=True), transient=True):
        tensor = tensors[names.get_name(f"model.{name}", (".weight",))]
        values = dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name:
            values = uninterleave(values, config.num_heads)
        elif "k_proj" in name:
            values = uninterleave(values, config.num_kv_heads)
        state[f"model.{name}"] = torch.from_numpy(np.array(values)).bfloat16()
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(state, temporary, metadata={"format": "pt"})
    _tokenizer(reader).save(str(folder / "tokenizer.json"))


def uninterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows ``[heads · head_dim, columns]`` of q or k in Hugging Face's order, from rows in llama.cpp's order.

    Within each head, rows (0, 1), (2, 3), ... of the file are pairs; they belong at i and i + head_dim / 2.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE tokenizer of a GGUF file."""
    tokens, merges, kinds = (
        reader.get_field(f"tokenizer.ggml.{field}").contents() for field in ("tokens", "merges", "token_type")
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = byte_level_tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer
