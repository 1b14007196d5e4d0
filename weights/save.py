"""Saving of a model as an ordinary Hugging Face folder: ``config.json`` and safetensors, in one file or in shards."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from model import Decoder
from model.config import config_json
from weights.cli.files import atomic_path, explaining, read_optional_json, write_json

MAX_SHARD_BYTES = 5_000_000_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save_model(
    model: Decoder, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, tokenizer_from: Path | None = None
) -> None:
    """Write a folder that ``load_model`` and transformers load, in the model's dtype.

    Weights beyond ``max_shard_bytes`` are cut into shards of at most that size (a single larger tensor is a
    shard of its own). ``tokenizer_from`` is a model folder whose tokenizer, chat template and special token
    ids go with the weights. A checkpoint that the folder held before is replaced, but only once the new one
    is written in full. Raises InputError when the folder cannot be written.
    """
    shards = _shards(model, max_shard_bytes)
    if len(shards) == 1:
        files = {SINGLE: shards[0]}
    else:
        files = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}
    source = {} if tokenizer_from is None else read_optional_json(tokenizer_from / "config.json")
    config = {key: source[key] for key in TOKEN_IDS if key in source} | config_json(model.config)
    texts = {"config.json": config | {"torch_dtype": str(model.dtype).removeprefix("torch.")}}
    if len(shards) > 1:
        size = sum(parameter.nbytes for parameter in model.parameters())
        places = {tensor: name for name, shard in files.items() for tensor in shard}
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": places}
    with explaining(f"{folder} cannot be written", (OSError, SafetensorError)):
        with ExitStack() as written:  # every file is complete under a temporary name before the first gets its own
            for name, shard in files.items():
                save_file(shard, written.enter_context(atomic_path(folder / name)), metadata={"format": "pt"})
            for name, text in texts.items():
                write_json(written.enter_context(atomic_path(folder / name)), text)
        for stale in {*folder.glob("model*.safetensors"), folder / INDEX} - {folder / name for name in files | texts}:
            stale.unlink(missing_ok=True)
        copy_tokenizer(tokenizer_from, folder)


def _shards(model: Decoder, max_bytes: int) -> list[dict[str, Tensor]]:
    """The parameters in order, under their Hugging Face names, in shards of up to ``max_bytes``."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, parameter in model.named_parameters():
        if shards[-1] and size + parameter.nbytes > max_bytes:
            shards.append({})
            size = 0
        full_name = name if name.startswith("lm_head.") else f"model.{name}"
        shards[-1][full_name] = parameter.detach().contiguous()
        size += parameter.nbytes
    return shards


def copy_tokenizer(source: Path | None, folder: Path) -> None:
    """Copy the tokenizer files of one model folder into another, unless the two are the same."""
    for name in TOKENIZER_FILES if source is not None and source.resolve() != folder.resolve() else ():
        if (source / name).exists():
            with atomic_path(folder / name) as temporary:
                shutil.copyfile(source / name, temporary)
