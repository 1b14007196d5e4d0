"""A Llama GGUF file of llama.cpp -> an ordinary Hugging Face folder in bf16.

Three things differ from the original checkpoint and are undone here: tensor names, block quantisation,
and the order of the rows of q and k. llama.cpp rotates neighbouring pairs of rows, Hugging Face the
halves of a head, so its converter interleaves the two halves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from model import InputError
from weights.cli.files import atomic_path, one_line, write_json

READABLE = ("F32", "F16", "Q4_1", "Q8_0")
CONTROL_TOKEN = 3  # llama.cpp's token type for tokens that are not text
PRE_TOKENIZER = "smollm"  # digits one by one, then GPT-2's rule
NEEDED = (
    "llama.vocab_size",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.block_count",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.context_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.chat_template",
)
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
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
    """Write config, tokenizer and ``model.safetensors`` (bf16) of a GGUF file into ``folder``.

    Raises InputError for another architecture, tokenizer or quantisation than this reads.
    """
    try:
        reader = GGUFReader(gguf)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise InputError(f"{gguf.name} is not a whole GGUF file: {one_line(error)}") from None
    _check(gguf.name, fields)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {}
    progress = track(reader.tensors, "dequantising", console=Console(stderr=True), transient=True)
    for tensor in progress:
        if tensor.tensor_type.name not in READABLE:
            raise InputError(
                f"{gguf.name}: {tensor.name!r:.100} is stored as {tensor.tensor_type.name}, which is not read"
            )
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if part in heads:
            values = uninterleave(values, heads[part])
        state[hugging_face_name(tensor.name)] = torch.from_numpy(np.array(values)).bfloat16()
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(state, temporary, metadata={"format": "pt"})
    _write_config(fields, folder, tied="lm_head.weight" not in state)
    _write_tokenizer(fields, folder)


def _check(file: str, fields: dict[str, Any]) -> None:
    """Raises InputError unless the file's metadata says all that is needed and nothing that is not computed."""
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.model") != "gpt2":
        raise InputError(f"{file} is not a Llama model with a byte-level BPE tokenizer")
    missing = [key for key in NEEDED if key not in fields]
    if missing:
        raise InputError(f"{file} does not say its {missing[0]}")
    if fields["tokenizer.ggml.pre"] != PRE_TOKENIZER:
        raise InputError(f"{file} splits text by the rule {fields['tokenizer.ggml.pre']!r:.80}, not {PRE_TOKENIZER!r}")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise InputError(f"{file} has rope scaling {fields['llama.rope.scaling.type']!r:.80}, which is not read")


def uninterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """``[heads · head_dim, columns]`` in llama.cpp's row order -> Hugging Face's.

    Within each head, rows (0, 1), (2, 3), ... of the file are pairs; they belong at i and i + head_dim / 2.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def hugging_face_name(name: str) -> str:
    """llama.cpp's name of a tensor -> Hugging Face's."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block and block[2] in BLOCK_NAMES:
        return f"model.layers.{block[1]}.{BLOCK_NAMES[block[2]]}.weight"
    outer = name.removesuffix(".weight")
    if outer not in OUTER_NAMES:
        raise InputError(f"the GGUF file holds {name!r:.100}, which no Llama has")
    return f"{OUTER_NAMES[outer]}.weight"


def _write_config(fields: dict[str, Any], folder: Path, *, tied: bool) -> None:
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
            # The file holds float32; the shortest decimal that rounds to it is what was meant.
            "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
            "rope_theta": float(fields["llama.rope.freq_base"]),
            "hidden_act": "silu",
            "tie_word_embeddings": tied,
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
