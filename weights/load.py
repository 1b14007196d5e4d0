"""Model folders: found by name, loaded as a model, and told apart by a fingerprint.

A checkpoint's tensors are compared with its config before memory for them is allocated. Loading
takes the memory of the weights and of one stored tensor. Knows nothing of options and decoding.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from app.common.command_line import say
from app.common.files import read_json
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.device import multiplies_bf16
from model.errors import InputError, explaining
from model.families import build
from weights.checkpoint import (
    EMBEDDING,
    HEAD,
    STORED_DTYPES,
    StoredTensor,
    bytes_of,
    refuse_other_formats,
    stored_tensors,
)

if TYPE_CHECKING:
    from model.parallel import Shard

WEIGHTS = Path(__file__).parent
DTYPES = {  # by their names on a command line
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
NOT_INSTALLED = ("small-llama", "tiny-gemma2")  # in the repository, but in no wheel of it
SAMPLES = 4  # of each tensor, for the fingerprint
SAMPLE_BYTES = 1024  # of each sample


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model: a path, a name under ``weights/`` or one on the hub, in this
    order.

    A model on the hub is downloaded, at ``revision``. Raises InputError where there is none.
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


def shown_name(folder: Path) -> str:
    """Return the name of a model: its folder's, or ORG/NAME in the hub's cache, where a folder is a
    commit.
    """
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def read_config(folder: Path) -> ModelConfig:
    """Return the config of a Hugging Face folder. Raises InputError for an unsupported
    architecture.
    """
    return parse_config(read_json(folder / "config.json"))


def pick_dtype(name: str, folder: Path, device: torch.device) -> torch.dtype:
    """Return the dtype of a name in DTYPES; "auto" is that of the checkpoint's embedding.

    Where the device is slow in that dtype, "auto" is another: float32 in place of float16 on a CPU,
    and float16 in place of bfloat16 on an old GPU, or float32 for Gemma, whose activations exceed
    float16's range. A line says so, also where the slow dtype was asked for.
    """
    config = read_config(folder)
    dtype = DTYPES.get(name) or stored_tensors(folder, config)[EMBEDDING].dtype
    if dtype == torch.float16 and device.type == "cpu":
        slow, faster = "a CPU", "float32"
    elif dtype == torch.bfloat16 and not multiplies_bf16(device):
        slow = torch.cuda.get_device_name(device)
        faster = "float32" if config.block == "gemma2" else "float16"
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
    stored = stored_tensors(folder, config)
    dtype = dtype or stored[EMBEDDING].dtype
    if config.tie_embeddings and HEAD in stored:
        tied = (stored[name].read().to(dtype) for name in (EMBEDDING, HEAD))
        if not torch.equal(*tied):  # as transformers does
            config = replace(config, tie_embeddings=False)
            say(f"{folder.name}: {HEAD} and {EMBEDDING}, tied in config.json, differ: both stay")
    wanted = wanted_tensors(folder, config, stored)
    with torch.device("meta"):
        model = build(
            replace(shard.local, tie_embeddings=config.tie_embeddings) if shard else config
        )
    state = {}
    for name, tensor in wanted.items():
        state[name] = tensor.read(shard.cut(name) if shard else None).to(device, dtype)
        if dtype == torch.float16 != tensor.dtype and not state[name].isfinite().all():
            raise InputError(f"{folder}: numbers of {name} exceed float16: give --dtype float32")
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def wanted_tensors(
    folder: Path, config: ModelConfig, stored: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the stored tensors that the model has. A line names the others, such as masks.

    Raises InputError where one is missing or has another shape than the config describes.
    """
    trouble = (
        f"the weights in {folder} are not those that its config.json describes, fetch or export"
        " both again"
    )
    with torch.device("meta"), explaining(trouble, (RuntimeError,)):
        model = build(config)
        others = sorted(stored.keys() - model.state_dict().keys())
        wanted = {name: tensor for name, tensor in stored.items() if name not in others}
        # raises where names or shapes are others
        model.load_state_dict(
            {name: torch.empty(each.shape, dtype=each.dtype) for name, each in wanted.items()}
        )
    if others:
        names = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
        say(f"{folder.name} stores tensors that this model does not read: {names}")
    return wanted


def model_fingerprint(folder: Path) -> str:
    """Return a hash of config, tensor names, shapes, dtypes, and evenly spaced bytes of each
    tensor: 16 hex digits.

    It is fast at any size. In practice a training step changes some of these bytes of every tensor
    that it trains. So a file made for one model is not used with another.
    """
    files = sorted(each for each in folder.iterdir() if each.suffix in (".json", ".safetensors"))
    stats = [each.stat() for each in files]
    return fingerprint_at(folder, tuple((each.st_mtime_ns, each.st_size) for each in stats))


@lru_cache
def fingerprint_at(folder: Path, changes: tuple[tuple[int, int], ...]) -> str:
    """Compute ``model_fingerprint`` once between ``changes`` of the folder's files."""
    digest = hashlib.sha256(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    for name, tensor in sorted(stored_tensors(folder, read_config(folder)).items()):
        digest.update(f"{name} {tensor.shape} {STORED_DTYPES.get(tensor.stored_as)}".encode())
        stored = bytes_of(tensor.mapped())
        for sample in range(SAMPLES):
            begin = max(0, len(stored) - SAMPLE_BYTES) * sample // (SAMPLES - 1)
            digest.update(stored[begin : begin + SAMPLE_BYTES])
    return digest.hexdigest()[:16]
