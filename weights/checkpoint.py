"""Checkpoint files: which tensors the safetensors files of a folder hold, and how one is read.

Only headers are read until a tensor is asked for. Knows nothing of models.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.common.files import check_is_fetched, read_optional_json
from model.config import ModelConfig
from model.errors import InputError, explaining

if TYPE_CHECKING:
    from model.parallel import Cut

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
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

    def read(self, cut: Cut = None) -> Tensor:
        """Return a copy of the tensor, or of the part that ``cut`` selects.

        NumPy copies a whole tensor, in one thread. Torch would start its threads, which wait long
        for each other beside other programs.
        """
        tensor = self.mapped()
        if cut is not None:
            dimension, part = cut
            return tensor.narrow(dimension, part.start, len(part)).clone()
        copy = torch.empty_like(tensor)
        np.copyto(bytes_of(copy), bytes_of(tensor))
        return copy


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes ``[n]`` of a tensor, in its memory."""
    return tensor.view(-1).view(torch.uint8).numpy()


def stored_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files, by name without the ``model.`` prefix.

    They are in one file, in those that an index names, or else in shards. Pickles are not loaded,
    because opening one can run any code. A tied head stands for an embedding that is not stored.
    Raises InputError for a missing or damaged file, and without an embedding.
    """
    files = sorted(folder.glob("model.safetensors")) or indexed_files(folder)
    files = files or sorted(folder.glob("model-*.safetensors"))
    if not files:
        refuse_other_formats(folder)
        raise InputError(
            f"{folder} holds no model.safetensors and no shards of it: fetch it again, or convert"
            " its weights with save_pretrained of transformers"
        )
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for tensor in read_header(path):
            short = tensor.name.removeprefix("model.")
            if short in tensors:
                raise InputError(
                    f"{path}: tensor {tensor.name!r:.100} is stored twice, also in"
                    f" {tensors[short].file.name}: remove the files of another download"
                )
            tensors[short] = tensor
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
