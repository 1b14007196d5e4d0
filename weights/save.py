"""Saving of a model as a Hugging Face folder: ``config.json`` and safetensors, in one file or in shards."""

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
    """Write a folder that ``load_model`` and transformers can load, in the model's dtype.

    A file holds up to ``max_shard_bytes`` of weights, or a single larger tensor. ``tokenizer_from`` is a model folder
    whose tokenizer, chat template and special token ids are copied too. A checkpoint in ``folder`` is replaced once the
    new one is written in full. Raises InputError when the folder cannot be written.
    """
    shards = _shards(model, max_shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    files = dict(zip(names, shards, strict=True))
    source = {} if tokenizer_from is None else read_optional_json(tokenizer_from / "config.json")
    config = {key: source[key] for key in TOKEN_IDS if key in source} | config_json(model.config)
    texts = {"config.json": config | {"torch_dtype": str(model.dtype).removeprefix("torch.")}}
    if count > 1:
        size = sum(parameter.nbytes for parameter in model.parameters())
        places = {tensor: name for name, shard in files.items() for tensor in shard}
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": places}
    with explaining(f"{folder} cannot be written", (OSError, SafetensorError)):
        with ExitStack() as written:  # every file is complete under a temporary name before the first is renamed
            for name, shard in files.items():
                save_file(shard, written.enter_context(atomic_path(folder / name)), metadata={"format": "pt"})
            for name, text in texts.items():
                write_json(written.enter_context(atomic_path(folder / name)), text)
        for stale in {*folder.glob("model*.safetensors"), folder / INDEX} - {folder / name for name in files | texts}:
            stale.unlink(missing_ok=True)
        if tokenizer_from is not None and tokenizer_from.resolve() != folder.resolve():
            for path in filter(Path.exists, (tokenizer_from / name for name in TOKENIZER_FILES)):
                with atomic_path(folder / path.name) as temporary:
                    shutil.copyfile(path, temporary)


def _shards(model: Decoder, max_bytes: int) -> list[dict[str, Tensor]]:
    """Shards of up to ``max_bytes``: the parameters in order, by their Hugging Face names."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, parameter in model.named_parameters():
        if shards[-1] and size + parameter.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name if name.startswith("lm_head.") else f"model.{name}"] = parameter.detach().contiguous()
        size += parameter.nbytes
    return shards
