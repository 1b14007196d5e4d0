"""Conversion of SmolLM2's GGUF file, in the format of llama.cpp, to an ordinary Hugging Face folder in bf16.

Three differences from the original checkpoint are undone here: tensor names, block quantisation, and the order of the
rows of q and k. llama.cpp rotates neighbouring pairs of rows, Hugging Face the two halves of a head, so llama.cpp's
converter interleaves the halves. ``weights.fetch`` has compared the file's checksum, so nothing is checked here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from weights.cli.files import atomic_path, write_json

CONTROL_TOKEN = 3  # llama.cpp's token type for tokens that are not text
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
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


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and weights (bf16) of a GGUF file into ``folder``."""
    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {}
    for tensor in track(reader.tensors, "dequantising", console=Console(stderr=True), transient=True):
        block, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        values = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            values = uninterleave(values, heads[part])
        name = NAMES[part] if block is None else f"layers.{block}.{NAMES[part]}"
        state[f"model.{name}.weight"] = torch.from_numpy(np.array(values)).bfloat16()
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(state, temporary, metadata={"format": "pt"})
    _write_config(fields, folder)
    _write_tokenizer(fields, folder)


def uninterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows ``[heads · head_dim, columns]`` of q or k in Hugging Face's order, from rows in llama.cpp's order.

    Within each head, rows (0, 1), (2, 3), ... of the file are pairs; they belong at i and i + head_dim / 2.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    """``config.json``; the head is tied to the embedding."""
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": fields["llama.vocab_size"],
            "hidden_size": fields["llama.embedding_length"],
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": fields["llama.attention.head_count"],
            "num_key_value_heads": fields["llama.attention.head_count_kv"],
            "max_position_embeddings": fields["llama.context_length"],
            # The file holds float32; the config held the shortest decimal that rounds to it.
            "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
            "rope_theta": float(fields["llama.rope.freq_base"]),
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
            "torch_dtype": "bfloat16",
        },
    )


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """The byte-level BPE tokenizer, chat template and end-of-text ids."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos, end_of_text = (fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "unknown"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "unk_token": tokens[end_of_text],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )
    # The end of a turn, and the <|endoftext|> that ends a document when the prompt is no chat.
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": [eos, end_of_text], "pad_token_id": eos},
    )
