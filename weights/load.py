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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.command_line import say
from app.files import explaining, read_json
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.device import multiplies_bf16
from model.errors import InputError
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
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old Llama checkpoints carry


@dataclass(frozen=True)
class StoredTensor:
    """Place, shape and dtype of a tensor in a safetensors file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

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
    known = sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))
    remedy = "give a path, or ORG/NAME to download a model from the Hugging Face hub"
    if os.path.isfile(WEIGHTS / "configs" / name / "config.json"):
        remedy = f"fetch it: python -m weights.fetch {name}"
    raise InputError(
        f"no folder {name!r:.200} with a config.json, and weights/ holds {', '.join(known)}:"
        f" {remedy}"
    )


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
    if config.tie_embeddings and {EMBEDDING, HEAD} <= stored.keys():
        drop_tied_head(folder, stored)
    with (
        torch.device("meta"),
        explaining(
            f"the weights in {folder} are not those that its config.json describes, fetch or export"
            " both again",
            (RuntimeError,),
        ),
    ):
        model = build(config)
        # raises where names or shapes are others
        model.load_state_dict({name: torch.empty(each.shape) for name, each in stored.items()})
        if shard:
            model = build(shard.local)
    dtype = dtype or stored[EMBEDDING].dtype
    state = {}
    for name, tensor in stored.items():
        state[name] = tensor.read(shard.cut(name) if shard else None).to(device, dtype)
        if dtype == torch.float16 != tensor.dtype and not state[name].isfinite().all():
            raise InputError(f"{folder}: numbers of {name} exceed float16: give --dtype float32")
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def drop_tied_head(folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Take out a stored head that repeats the embedding to which config.json ties it.

    Raises InputError where they differ: libraries disagree on which of the two counts then.
    """
    embedding = stored[EMBEDDING].read()
    if not torch.equal(stored.pop(HEAD).read().to(embedding.dtype), embedding):
        raise InputError(
            f"{folder}: config.json ties {HEAD} to {EMBEDDING}, but the stored tensors differ: set"
            " tie_word_embeddings to false there to use both"
        )
    say(f"{folder.name} stores {HEAD}, which equals the tied {EMBEDDING}: one of them is loaded")


def read_config(folder: Path) -> ModelConfig:
    """Return the config of a Hugging Face folder. Raises InputError for an unsupported
    architecture.
    """
    return parse_config(read_json(folder / "config.json"))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files, by name without the ``model.`` prefix.

    They are in one file or in shards. Pickles are not loaded, because opening one can run any code.
    Raises InputError for a missing or damaged file, for quantised tensors and without an embedding.
    """
    files = sorted(folder.glob("model.safetensors")) or sorted(folder.glob("model-*.safetensors"))
    if not files:
        raise InputError(
            f"{folder} holds no model.safetensors and no shards of it: fetch it again, or convert"
            " its weights with save_pretrained of transformers"
        )
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, entry in read_header(path).items():
            dtype = entry.get_dtype()
            if dtype not in STORED_DTYPES:
                raise InputError(
                    f"{path}: tensor {name!r:.100} is stored as {dtype}: load the original float"
                    " weights, not a quantised checkpoint"
                )
            short = name.removeprefix("model.")
            if short in tensors:
                raise InputError(
                    f"{path}: tensor {name!r:.100} is stored twice, also in"
                    f" {tensors[short].file.name}: remove the files of another download"
                )
            if not name.endswith(IGNORED_SUFFIX):
                shape = tuple(entry.get_shape())
                tensors[short] = StoredTensor(path, name, shape, STORED_DTYPES[dtype])
    if EMBEDDING not in tensors:
        raise InputError(
            f"{folder}: tensor {EMBEDDING} is missing: fetch the whole checkpoint again"
        )
    return tensors


def read_header(path: Path) -> dict[str, Any]:
    """Return the stored dtype and shape of each tensor in a safetensors file, as a slice of the
    library.

    Raises InputError for a missing or damaged file.
    """
    trouble = f"{path} is not a whole safetensors file, fetch or export it again"
    with explaining(trouble, (SafetensorError, OSError)), safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name) for name in sorted(file.keys())}


def model_fingerprint(folder: Path) -> str:
    """Return a hash of config, tensor names, shapes, dtypes, and evenly spaced bytes of each
    tensor: 16 hex digits.

    It is fast at any size, and differs after any training step, also of one tensor. So a file made
    for one model is not used with another.
    """
    digest = hashlib.sha256(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    stored = stored_tensors(folder)
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        with safe_open(tensor.file, framework="pt") as file:
            stored_bytes = bytes_of(file.get_tensor(tensor.name))  # mapped
        for sample in range(SAMPLES):
            begin = max(0, len(stored_bytes) - SAMPLE_BYTES) * sample // (SAMPLES - 1)
            digest.update(stored_bytes[begin : begin + SAMPLE_BYTES])
    return digest.hexdigest()[:16]
