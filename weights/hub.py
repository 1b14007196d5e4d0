"""Models by name: ``ORG/NAME`` on the Hugging Face hub, downloaded by its library into its cache.

Only safetensors, config and tokenizer files are downloaded, after ``config.json`` has shown that
the model can run here. The library obeys HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

from pathlib import Path

import torch
from huggingface_hub import (
    errors,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from rich.filesize import decimal

from app.common.files import read_json
from model.config import ModelConfig, parse_config
from model.errors import InputError, one_line
from weights.checkpoint import INDEX, indexed_files
from weights.memory import free_bytes, parameter_count
from weights.save import TOKENIZER_FILES

CONFIG = "config.json"
FILES = [CONFIG, INDEX, "model.safetensors", "model-*.safetensors", *TOKENIZER_FILES]
NARROWEST = 2  # bytes per weight in bfloat16 and float16


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model on the hub, at a branch, tag or commit: ``main`` by default.

    Raises InputError for a model that is unknown, gated or cannot run here, and where the download
    fails.
    """
    try:
        if not isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str):
            # once, where hf_hub_download would try for half a minute
            get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision))
        config = Path(hf_hub_download(name, CONFIG, revision=revision))
        check_size(name, parse_config(read_json(config)))
        # the commit of this config.json, so that all files are of one version
        commit = config.parent.name
        folder = Path(snapshot_download(name, revision=commit, allow_patterns=FILES))
        if not (folder / "model.safetensors").exists():
            shards = [path.name for path in indexed_files(folder)]
            snapshot_download(name, revision=commit, allow_patterns=shards)
        return folder
    except InputError:
        raise
    except Exception as error:  # of the hub, the network and their libraries
        raise InputError(f"{name} {reason_of(error, revision)}") from None


def check_size(name: str, config: ModelConfig) -> None:
    """Raise InputError where the weights in the narrowest dtype need more than all free memory."""
    needed = parameter_count(config) * NARROWEST
    gpus = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    free = max(free_bytes(torch.device("cpu")), sum(map(free_bytes, gpus)))
    if needed > free:
        raise InputError(
            f"{name} does not fit: its weights take {decimal(needed)}, and {decimal(free)} are"
            " free: give a smaller --model"
        )


def reason_of(error: Exception, revision: str | None) -> str:
    """Return the reason of a failed download, and its remedy, to follow the name of the model."""
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
