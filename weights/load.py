"""Model folders: their place, config, weights, and fingerprint.

Weights are safetensors. Their headers are compared with the config before memory for weights is
allocated, and loading takes the memory of the weights and of one stored tensor. Knows nothing of
options and decoding.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.common.command_line import say
from app.common.files import check_is_fetched, read_json, read_optional_json
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.device import multiplies_bf16
from model.errors import InputError, explaining
from model.families import build

if TYPE_CHECKING:
    from model.parallel import Cut, Shard

WEIGHTS = Path(__file__).parent
# by name on a command line, and in a safetensors header
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
STORED_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SAMPLES = 4  # of each tensor, for the fingerprint
SAMPLE_BYTES = 1024  # of each sample
INDEX = "model.safetensors.index.json"
NOT_INSTALLED = ("small-llama", "tiny-gemma2")  # that the repository has, and a wheel leaves out
# what is often given in place of a model, by the ends of its names of files
OTHER_FORMATS = {
    ".gguf": "is in GGUF, the format of llama.cpp: give the original checkpoint, in safetensors",
    "adapter_config.json": "is an adapter, not a model: merge it into its model by merge_and_unload"
    " of peft, and save the result",
}


@dataclass(frozen=True)
class StoredTensor:
    """Place and shape of a tensor in a safetensors file, and its dtype there, a key of
    STORED_DTYPES if it can be loaded.
    """

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

    def read(self, cut: Cut = None) -> Tensor:
        """Return a copy of the tensor, or of the part that ``cut`` selects.

        NumPy copies a whole tensor, in one thread. Torch would start its threads, which wait long
        for each other beside other programs.
        """
        with safe_open(self.file, framework="pt") as file:
            tensor = file.get_tensor(self.name)  # mapped: only what is copied is read
        if cut is not None:
            dimension, part = cut
            return tensor.narrow(dimension, part.start, len(part)).clone()
        copy = torch.empty_like(tensor)
        np.copyto(bytes_of(copy), bytes_of(tensor))
        return copy


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes ``[n]`` of a tensor, in its memory."""
    return tensor.view(-1).view(torch.uint8).numpy()


def shown_name(folder: Path) -> str:
    """Return the name of a model: its folder's, or ORG/NAME in the hub's cache, where a folder is a
    commit.
    """
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the model folder at a path, of this name under ``weights/``, or downloaded from the
    hub.

    The first of these that exists is taken; ``revision`` is one on the hub. Raises InputError where
    there is none.
    """
    for folder in (Path(name), WEIGHTS / name):
        if os.path.isfile(folder / "config.json"):
            if revision is not None:
                raise InputError(f"--revision is for models on the hub, but {folder} is a folder")
            return folder
    if HUB_NAME.fullmatch(name) and not os.path.exists(name):
        from weights.hub import download  # its library takes long to import

        return download(name, revision)
    refuse_other_formats(Path(name))
    known = sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))
    remedy = "give a path, or ORG/NAME to download a model from the Hugging Face hub"
    if os.path.isfile(WEIGHTS / "configs" / name / "config.json"):
        remedy = f"fetch it: python -m weights.fetch {name}"
    elif name in NOT_INSTALLED:
        remedy = f"clone the project's repository, and give the path of weights/{name} there"
    raise InputError(
        f"no folder {name!r:.200} with a config.json, and weights/ holds {', '.join(known)}:"
        f" {remedy}"
    )


def refuse_other_formats(path: Path) -> None:
    """Raise InputError for a file, or a folder with a file, of another format than a model's."""
    files = path.glob("*") if os.path.isdir(path) else [path]
    for file, (end, remedy) in product(files, OTHER_FORMATS.items()):
        if file.name.endswith(end):
            raise InputError(f"{path} {remedy}")


def pick_dtype(name: str, folder: Path, device: torch.device) -> torch.dtype:
    """Return the dtype of a name in DTYPES; "auto" is that of the checkpoint's embedding.

    Where the device is slow in that dtype, "auto" is another: float32 in place of float16 on a CPU,
    and float16 in place of bfloat16 on an old GPU, or float32 for Gemma, whose activations exceed
    float16's range. A line says so, also where the slow dtype was asked for.
    """
    dtype = DTYPES.get(name) or stored_tensors(folder)[EMBEDDING].dtype
    if dtype == torch.float16 and device.type == "cpu":
        slow, faster = "a CPU", "float32"
    elif dtype == torch.bfloat16 and not multiplies_bf16(device):
        slow = torch.cuda.get_device_name(device)
        faster = "float32" if read_config(folder).block == "gemma2" else "float16"
    else:
        return dtype
    remedy = f"--dtype {faster} is faster" if name in DTYPES else f"the model runs in {faster}"
    say(f"{slow} is slow in {str(dtype).removeprefix('torch.')}: {remedy}")
    return DTYPES.get(name, DTYPES[faster])


def load_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Decoder:
    """Return the model of a Hugging Face folder, in eval mode and without gradients.

    ``dtype`` None is the checkpoint's. With a ``shard``, only that part of the weights is read.
    Raises InputError for anything wrong with the folder.
    """
    config = read_config(folder)
    stored = stored_tensors(folder)
    dtype = dtype or stored[EMBEDDING].dtype
    if config.tie_embeddings and HEAD in stored:
        tied = (stored[name].read().to(dtype) for name in (EMBEDDING, HEAD))
        if not torch.equal(*tied):  # as transformers does
            config = replace(config, tie_embeddings=False)
            say(f"{folder.name}: {HEAD} and {EMBEDDING}, tied in config.json, differ: both stay")
    with (
        torch.device("meta"),
        explaining(
            f"the weights in {folder} are not those that its config.json describes, fetch or export"
            " both again",
            (RuntimeError,),
        ),
    ):
        model = build(config)
        extra = sorted(stored.keys() - model.state_dict().keys())  # masks, heads of training
        stored = {name: tensor for name, tensor in stored.items() if name not in extra}
        # raises where names or shapes are others
        model.load_state_dict(
            {name: torch.empty(each.shape, dtype=each.dtype) for name, each in stored.items()}
        )
        if extra:
            names = ", ".join(extra[:3]) + ", ..." * (len(extra) > 3)
            say(f"{folder.name} stores tensors that this model does not read: {names}")
        if shard:
            model = build(replace(shard.local, tie_embeddings=config.tie_embeddings))
    state = {}
    for name, tensor in stored.items():
        state[name] = tensor.read(shard.cut(name) if shard else None).to(device, dtype)
        if dtype == torch.float16 != tensor.dtype and not state[name].isfinite().all():
            raise InputError(f"{folder}: numbers of {name} exceed float16: give --dtype float32")
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def read_config(folder: Path) -> ModelConfig:
    """Return the config of a Hugging Face folder. Raises InputError for an unsupported
    architecture.
    """
    return parse_config(read_json(folder / "config.json"))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
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
        for name, entry in read_header(path).items():
            short = name.removeprefix("model.")
            if short in tensors:
                raise InputError(
                    f"{path}: tensor {name!r:.100} is stored twice, also in"
                    f" {tensors[short].file.name}: remove the files of another download"
                )
            shape = tuple(entry.get_shape())
            tensors[short] = StoredTensor(path, name, shape, entry.get_dtype())
    if EMBEDDING not in tensors and HEAD in tensors and read_config(folder).tie_embeddings:
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


def read_header(path: Path) -> dict[str, Any]:
    """Return the stored dtype and shape of each tensor in a safetensors file, as a slice of the
    library.

    Raises InputError for a missing or damaged file.
    """
    check_is_fetched(path)
    trouble = f"{path} is not a whole safetensors file, fetch or export it again"
    with explaining(trouble, (SafetensorError, OSError)), safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name) for name in sorted(file.keys())}


def model_fingerprint(folder: Path) -> str:
    """Return a hash of config, tensor names, shapes, dtypes, and evenly spaced bytes of each
    tensor: 16 hex digits.

    It is fast at any size, and differs after any training step, also of one tensor. So a file made
    for one model is not used with another.
    """
    files = sorted(each for each in folder.iterdir() if each.suffix in (".json", ".safetensors"))
    stats = [each.stat() for each in files]
    return fingerprint_at(folder, tuple((each.st_mtime_ns, each.st_size) for each in stats))


@lru_cache
def fingerprint_at(folder: Path, changes: tuple[tuple[int, int], ...]) -> str:
    """Compute ``model_fingerprint`` once between ``changes`` of the folder's files."""
    digest = hashlib.sha256(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    stored = stored_tensors(folder)
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tensor.shape} {STORED_DTYPES.get(tensor.stored_as)}".encode())
        with safe_open(tensor.file, framework="pt") as file:
            stored_bytes = bytes_of(file.get_tensor(tensor.name))  # mapped
        for sample in range(SAMPLES):
            begin = max(0, len(stored_bytes) - SAMPLE_BYTES) * sample // (SAMPLES - 1)
            digest.update(stored_bytes[begin : begin + SAMPLE_BYTES])
    return digest.hexdigest()[:16]
