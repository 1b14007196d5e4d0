"""Checkpoint files: which tensors the safetensors files of a folder hold, how one is read, and how
a model is written.

Only headers are read until a tensor is asked for. Knows nothing of training.
"""

import os
import shutil
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from app.common.files import atomic_path, check_is_fetched, read_optional_json, write_json
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.errors import InputError, explaining

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = {  # by their names in a header
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
OTHER_FORMATS = {  # often given in place of a model: the end of a file's name, what to do
    ".gguf": "is in GGUF, the format of llama.cpp: give the original checkpoint, in safetensors",
    "adapter_config.json": "is an adapter, not a model: merge it into its model by merge_and_unload"
    " of peft, and save the result",
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# glob patterns
TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class StoredTensor:
    """Place and shape of a tensor in a safetensors file, and the name of its dtype there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    stored_as: str

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype. Raises InputError for one of quantised weights."""
        if self.stored_as not in STORED_DTYPES:
            raise InputError(
                f"{self.file}: tensor {self.name!r:.100} is stored as {self.stored_as}: load the"
                " original float weights, not a quantised checkpoint"
            )
        return STORED_DTYPES[self.stored_as]

    def mapped(self) -> Tensor:
        """Return the tensor in the memory of its file: only the parts that are used are read."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)

    def read(self, cut: tuple[int, range] | None = None) -> Tensor:
        """Return a copy of the tensor, or of the part that ``cut`` selects: a dimension, and the
        indices there.
        """
        tensor = self.mapped()
        if cut is not None:
            dimension, part = cut
            tensor = tensor.narrow(dimension, part.start, len(part))
        return tensor.clone()


def stored_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files, by name without the ``model.`` prefix.

    They are in one file, or else in the shards that an index names. Pickles are not loaded, because
    opening one can run any code. Where only the head of a tied model is stored, it is the
    embedding. Raises InputError for a missing or damaged file, and without an embedding.
    """
    files = [folder / WHOLE] if (folder / WHOLE).exists() else indexed_files(folder)
    if not files:
        refuse_other_formats(folder)
        raise InputError(
            f"{folder} holds no {WHOLE} and no index that names shards: fetch it again, or convert"
            " its weights with save_pretrained of transformers"
        )
    tensors = {
        tensor.name.removeprefix("model."): tensor for path in files for tensor in read_header(path)
    }
    if EMBEDDING not in tensors and HEAD in tensors and config.tie_embeddings:
        tensors[EMBEDDING] = tensors.pop(HEAD)
    if EMBEDDING not in tensors:
        raise InputError(
            f"{folder}: tensor {EMBEDDING} is missing: fetch the whole checkpoint again"
        )
    return tensors


def indexed_files(folder: Path) -> list[Path]:
    """Return the files that the index of a folder names: none without an index."""
    index = folder / INDEX
    weights = read_optional_json(index).get("weight_map", {})
    with explaining(f"{index} is damaged: fetch it again", (AttributeError, TypeError)):
        return [folder / name for name in sorted({*weights.values()})]


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file by its header, in the order of their names.

    Raises InputError for a missing or damaged file.
    """
    check_is_fetched(path)
    trouble = f"{path} is not a whole safetensors file, fetch or export it again"
    with explaining(trouble, (SafetensorError, OSError)), safe_open(path, framework="pt") as file:
        entries = {name: file.get_slice(name) for name in sorted(file.keys())}
        return [
            StoredTensor(path, name, tuple(entry.get_shape()), entry.get_dtype())
            for name, entry in entries.items()
        ]


def refuse_other_formats(path: Path) -> None:
    """Raise InputError for a file of another format than a model's, or a folder with one."""
    files = path.glob("*") if os.path.isdir(path) else [path]
    for file, (end, remedy) in product(files, OTHER_FORMATS.items()):
        if file.name.endswith(end):
            raise InputError(f"{path} {remedy}")


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files of a folder, those that are there."""
    found = chain.from_iterable(map(folder.glob, TOKENIZER_FILES))
    return [path for path in found if path.is_file()]


def save_model(model: Decoder, folder: Path, *, tokenizer_from: Path | None = None) -> None:
    """Write a folder that ``load_model`` and transformers can load, in the model's dtype.

    ``tokenizer_from`` is a model folder whose tokenizer, chat template and special token ids are
    copied too. Raises InputError when the folder cannot be written, and for a config that was
    changed without its ``source``, from which the file is made.
    """
    state = {
        name if name.startswith("lm_head.") else f"model.{name}": parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
    }
    source = read_optional_json(tokenizer_from / "config.json") if tokenizer_from else {}
    config = {
        **{
            key: value
            for key, value in model.config.source.items()
            if key not in (*TOKEN_IDS, "dtype")
        },
        **{key: source[key] for key in TOKEN_IDS if key in source},
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.config.tie_embeddings,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
    if parse_config(config) != model.config:
        raise InputError(
            "the model's config differs from that of its source, which config.json is made from:"
            " change the source, and parse it"
        )
    with explaining(f"{folder} cannot be written", (OSError, SafetensorError)):
        with atomic_path(folder / WHOLE) as temporary:
            save_file(state, temporary, metadata={"format": "pt"})
            write_json(folder / "config.json", config)
        if tokenizer_from is not None and tokenizer_from.resolve() != folder.resolve():
            for path in tokenizer_files(tokenizer_from):
                with atomic_path(folder / path.name) as temporary:
                    shutil.copyfile(path, temporary)
