"""Module -> an ordinary Hugging Face folder: ``config.json`` and safetensors, in one file or in shards."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from model import Decoder, InputError
from model.config import config_json
from weights.cli.files import atomic_path, is_there, read_optional_json, write_json

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
    names = [SINGLE] if len(shards) == 1 else _shard_names(len(shards))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:  # every file is complete under a temporary name before the first gets its own
            for name, shard in zip(names, shards, strict=True):
                save_file(shard, files.enter_context(atomic_path(folder / name)), metadata={"format": "pt"})
            if len(shards) > 1:
                size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
                places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
                write_json(
                    files.enter_context(atomic_path(folder / INDEX)),
                    {"metadata": {"total_size": size}, "weight_map": places},
                )
            config = {**_token_ids(tokenizer_from), **config_json(model.config)}
            config["torch_dtype"] = str(model.dtype).removeprefix("torch.")
            write_json(files.enter_context(atomic_path(folder / "config.json")), config)
        kept = {*names, INDEX} if len(shards) > 1 else {*names}
        for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
            if stale.name not in kept:
                stale.unlink(missing_ok=True)
        copy_tokenizer(tokenizer_from, folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be written: {error}") from None


def _shards(model: Decoder, max_bytes: int) -> list[dict[str, Tensor]]:
    """The parameters in order, under their Hugging Face names, cut where a shard would grow beyond max_bytes."""
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


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _token_ids(folder: Path | None) -> dict[str, Any]:
    raw = {} if folder is None else read_optional_json(folder / "config.json")
    return {key: raw[key] for key in TOKEN_IDS if key in raw}


def copy_tokenizer(source: Path | None, folder: Path) -> None:
    """Copy the tokenizer files of one model folder into another; nothing to do where they are the same."""
    for name in TOKENIZER_FILES if source is not None and source.resolve() != folder.resolve() else ():
        if is_there(source / name):
            with atomic_path(folder / name) as temporary:
                shutil.copyfile(source / name, temporary)
