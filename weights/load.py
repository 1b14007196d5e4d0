"""Model folders: found by name or on the Hugging Face hub, loaded, and told apart by a fingerprint.

From the top: names and the hub, configs and dtypes, loading, the fingerprint. The hub's library
downloads into its cache, and obeys HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT. A
checkpoint's tensors are compared with its config before memory for them is allocated. Loading takes
the memory of the weights and of one stored tensor; where a tied head is stored too, both matrices
are compared before. Knows nothing of decoding, and options only by their names, which its messages
give.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub as hub  # imports its parts when they are used
import torch
from rich.filesize import decimal

from app.common.command_line import say
from app.common.files import read_json
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.device import multiplies_bf16
from model.errors import InputError, explaining, one_line
from weights.checkpoint import (
    EMBEDDING,
    HEAD,
    INDEX,
    STORED_DTYPES,
    TOKENIZER_FILES,
    WHOLE,
    StoredTensor,
    indexed_files,
    refuse_other_formats,
    stored_tensors,
)
from weights.memory import free_bytes, parameter_count

if TYPE_CHECKING:
    from model.parallel import Shard

WEIGHTS = Path(__file__).parent
# by their names on a command line
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
CONFIG = "config.json"
DOWNLOADED = [CONFIG, INDEX, WHOLE, *TOKENIZER_FILES]  # from the hub, before any shards
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
COMMIT_DIGITS = 40
SAMPLES = 4  # of each tensor, for the fingerprint
SAMPLE_BYTES = 1024  # of each sample


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model: a path, a name under ``weights/`` or one on the hub, in this
    order.

    A model on the hub is downloaded, at ``revision``. Raises InputError where there is none.
    """
    for folder in (Path(name), WEIGHTS / name):
        if os.path.isfile(folder / CONFIG):
            if revision is not None:
                raise InputError(f"--revision is for models on the hub, but {folder} is a folder")
            return folder
    if HUB_NAME.fullmatch(name) and not os.path.exists(name):
        return download(name, revision)
    refuse_other_formats(Path(name))
    known = sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))
    remedy = "give a path, or ORG/NAME to download a model from the Hugging Face hub"
    if os.path.isfile(WEIGHTS / "configs" / name / CONFIG):
        remedy = f"fetch it: python -m weights.fetch {name}"
    raise InputError(
        f"no folder {name!r:.200} with a config.json, and weights/ holds {', '.join(known)}:"
        f" {remedy}"
    )


@cache
def download(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model on the hub, at a branch, tag or commit: ``main`` by default. A
    process asks the hub once.

    Only safetensors, config and tokenizer files are downloaded, after ``config.json`` has shown
    that the model can run here. Raises InputError for a model that is unknown, gated or cannot run
    here, and where the download fails.
    """
    try:
        if not isinstance(hub.try_to_load_from_cache(name, CONFIG, revision=revision), str):
            # once, where hf_hub_download would try for half a minute
            hub.get_hf_file_metadata(hub.hf_hub_url(name, CONFIG, revision=revision))
        config = Path(hub.hf_hub_download(name, CONFIG, revision=revision))
        check_size(name, parse_config(read_json(config)))
        # the commit of this config.json, so that all files are of one version
        commit = config.parent.name
        folder = Path(hub.snapshot_download(name, revision=commit, allow_patterns=DOWNLOADED))
        if not (folder / WHOLE).exists():
            shards = [path.name for path in indexed_files(folder)]
            hub.snapshot_download(name, revision=commit, allow_patterns=shards)
        return folder
    except InputError:
        raise
    except Exception as error:  # of the hub, the network and their libraries
        raise InputError(f"{name} {reason_of(error, revision)}") from None


def check_size(name: str, config: ModelConfig) -> None:
    """Raise InputError where the weights in bfloat16 need more than all free memory."""
    needed = parameter_count(config) * torch.bfloat16.itemsize
    gpus = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    free = max(free_bytes(torch.device("cpu")), sum(map(free_bytes, gpus)))
    if needed > free:
        raise InputError(
            f"{name} does not fit: its weights take {decimal(needed)}, and {decimal(free)} are"
            " free: give a smaller --model"
        )


def reason_of(error: Exception, revision: str | None) -> str:
    """Return the reason of a failed download, and its remedy, to follow the name of the model."""
    from huggingface_hub import errors  # takes long to import, which a failure alone pays

    # In this order: the first kind counts, and a GatedRepoError is a RepositoryNotFoundError too.
    reasons = {
        errors.GatedRepoError: "is gated: ask for access on its page, and set HF_TOKEN",
        errors.RepositoryNotFoundError: "is no folder, and no model on the hub that you may see:"
        " check its name, or set HF_TOKEN if it is private",
        errors.RevisionNotFoundError: f"has no revision {revision!r:.80}: give a branch, a tag or a"
        " commit",
        errors.RemoteEntryNotFoundError: f"has no {CONFIG}: it is no model in Hugging Face's"
        " format",
        errors.OfflineModeIsEnabled: "is no folder, and the cache of the hub lacks it: unset"
        " HF_HUB_OFFLINE to fetch it",
        Exception: "is no folder, and could not be downloaded from the hub: check the network, and"
        f" run the same command again: {one_line(error)}",
    }
    return next(reason for kind, reason in reasons.items() if isinstance(error, kind))


def shown_name(folder: Path) -> str:
    """Return the name of a model: its folder's, or ORG/NAME in the hub's cache, where a folder is a
    commit. A suffix after the commit, as of a copied folder, is kept.
    """
    if folder.parent.name == "snapshots":
        hub_name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return hub_name + folder.name[COMMIT_DIGITS:]
    return folder.resolve().name


def read_config(folder: Path) -> ModelConfig:
    """Return the config of a Hugging Face folder. Raises InputError for an unsupported
    architecture.
    """
    return parse_config(read_json(folder / CONFIG))


def config_of_weights(folder: Path, dtype: torch.dtype) -> ModelConfig:
    """Return the config of a folder's model in this dtype: a head that config.json ties is not tied
    where another one than the embedding is stored, as in transformers.

    Raises InputError as ``read_config`` and ``stored_tensors`` do.
    """
    config = read_config(folder)
    stored = stored_tensors(folder, config)
    if not (config.tie_embeddings and HEAD in stored):
        return config
    embedding, head = (stored[name].mapped().to(dtype) for name in (EMBEDDING, HEAD))
    return replace(config, tie_embeddings=torch.equal(embedding, head))


def pick_dtype(name: str, folder: Path, device: torch.device) -> torch.dtype:
    """Return the dtype of a name in DTYPES; "auto" is that of the checkpoint's embedding.

    Where the device is slow in that dtype, "auto" is another: float32 in place of float16 on a CPU,
    and float16 in place of bfloat16 on an old GPU, or float32 for a family whose activations exceed
    float16's range. A line says so, also where the slow dtype was asked for.
    """
    asked = DTYPES.get(name)
    dtype = asked or stored_tensors(folder, read_config(folder))[EMBEDDING].dtype
    if dtype == torch.float16 and device.type == "cpu":
        slow, faster = "a CPU", "float32"
    elif dtype == torch.bfloat16 and not multiplies_bf16(device):
        slow = torch.cuda.get_device_name(device)
        faster = "float16" if read_config(folder).family.fits_float16 else "float32"
    else:
        return dtype
    remedy = f"--dtype {faster} is faster" if asked else f"the model runs in {faster}"
    say(f"{slow} is slow in {str(dtype).removeprefix('torch.')}: {remedy}")
    return asked or DTYPES[faster]


def load_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Decoder:
    """Return the model of a Hugging Face folder, in eval mode and without gradients.

    ``dtype`` None is the checkpoint's. With a ``shard`` of ``config_of_weights``, only that
    part of the weights is read. Raises InputError for anything wrong with the folder.
    """
    described = read_config(folder)
    stored = stored_tensors(folder, described)
    dtype = dtype or stored[EMBEDDING].dtype
    config = config_of_weights(folder, dtype)
    if config != described:
        say(f"{folder.name}: {HEAD} and {EMBEDDING}, tied in config.json, differ: both stay")
    wanted = wanted_tensors(folder, config, stored)
    with torch.device("meta"):
        model = Decoder(shard.local if shard else config)
    state = {
        name: tensor.read(shard.cut(name) if shard else None).to(device, dtype)
        for name, tensor in wanted.items()
    }
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def wanted_tensors(
    folder: Path, config: ModelConfig, stored: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return those of a folder's ``stored`` tensors that the model has. A line names the others,
    such as masks.

    Raises InputError where one is missing or has another shape than the config describes.
    """
    trouble = (
        f"the weights in {folder} are not those that its config.json describes, fetch or export"
        " both again"
    )
    with torch.device("meta"), explaining(trouble, (RuntimeError,)):
        model = Decoder(config)
        wanted = {name: stored[name] for name in model.state_dict() if name in stored}
        # raises where names or shapes are others
        model.load_state_dict(
            {name: torch.empty(each.shape, dtype=each.dtype) for name, each in wanted.items()}
        )
    if others := sorted(stored.keys() - wanted.keys()):
        names = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
        say(f"{folder.name} stores tensors that this model does not read: {names}")
    return wanted


@cache
def model_fingerprint(folder: Path) -> str:
    """Return a hash of config, tensor names, shapes, dtypes, and evenly spaced bytes of each
    tensor, 16 hex digits, computed once per process and folder: a folder that is written
    later keeps its old one.

    It is fast at any size. In practice a training step changes some of these bytes of every tensor
    that it trains. So a file made for one model is not used with another.
    """
    digest = hashlib.sha256(json.dumps(read_json(folder / CONFIG), sort_keys=True).encode())
    for name, tensor in sorted(stored_tensors(folder, read_config(folder)).items()):
        # Plans hold hashes of this text, so it must not change. A dtype that is not in
        # STORED_DTYPES is "None".
        digest.update(f"{name} {tensor.shape} {STORED_DTYPES.get(tensor.stored_as)}".encode())
        stored = tensor.mapped().view(-1).view(torch.uint8).numpy()
        for sample in range(SAMPLES):
            begin = max(0, len(stored) - SAMPLE_BYTES) * sample // (SAMPLES - 1)
            digest.update(stored[begin : begin + SAMPLE_BYTES])
    return digest.hexdigest()[:16]
