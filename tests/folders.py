"""Tiny random checkpoints on disk, laid out like those of the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from model.config import parse_config
from model.decoder import Decoder
from tests.configs import small

END = "<|end|>"
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("i", "n"), ("e", "r"), ("Ġ", "a")]
VOCAB_SIZE = 256 + len(MERGES) + 1  # every byte, the merges, and END

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA = small("llama", hidden=32, layers=4, **SIZES)
GEMMA2 = small("gemma2", hidden=32, layers=4, query_pre_attn_scalar=8, sliding_window=16, **SIZES)


def random_state(
    config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random tensors of every name and shape that the config asks for, as a checkpoint names
    them.
    """
    with torch.device("meta"):
        parameters = dict(Decoder(parse_config(config)).named_parameters())
    generator = torch.Generator().manual_seed(seed)
    return {
        name if name.startswith("lm_head") else f"model.{name}": (
            (
                0.3 * torch.randn(parameter.shape, generator=generator)
                + (1.0 if parameter.dim() == 1 else 0.0)
            ).to(dtype)
        )
        for name, parameter in parameters.items()
    }


def write_folder(
    folder: Path,
    config: dict[str, Any] = LLAMA,
    state: dict[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    eos_ids: tuple[int, ...] = (),
) -> Path:
    """A whole model folder: config, weights, by default random ones, byte-level tokenizer. Ends
    texts only at ``eos_ids``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(eos_ids)}), encoding="utf-8"
    )
    state = state or random_state(config, seed=seed, dtype=dtype)
    save_file(state, folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Every byte is a token, a few merges make longer ones, and END is a control token."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, MERGES)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(END, normalized=False)])
    return tokenizer
