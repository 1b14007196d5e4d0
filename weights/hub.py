"""Models by name: ``ORG/NAME`` on the Hugging Face hub, downloaded by its library into its cache.

Only safetensors, config and tokenizer files are downloaded, after ``config.json`` has shown that
the model can run here. The library obeys HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

from pathlib import Path

import torch
from huggingface_hub import constants, errors, hf_hub_download, snapshot_download
from rich.filesize import decimal

from cli.files import explaining
from model import InputError, ModelConfig
from weights.load import read_config
from weights.memory import free_bytes, parameter_count
from weights.save import TOKENIZER_FILES

FILES = ("config.json", "model.safetensors", "model-*.safetensors", *TOKENIZER_FILES)
NARROWEST = 2  # bytes per weight in bfloat16 and float16


def download(name: str, revision: str | None = None) -> Path:
    """Folder of a model on the hub, at a branch, tag or commit: ``main`` by default.

    Raises InputError for a model that is unknown, gated or cannot run here, and where the download
    fails.
    """
    trouble = f"{name} could not be downloaded, run the same command again"
    with explaining(trouble, (Exception,)):  # of the network and its libraries
        try:
            config = Path(hf_hub_download(name, "config.json", revision=revision))
            check_size(name, read_config(config.parent))
            # the commit of this config.json, so that all files are of one version
            commit = config.parent.name
            return Path(snapshot_download(name, revision=commit, allow_patterns=list(FILES)))
        except (errors.EntryNotFoundError, errors.HfHubHTTPError) as error:
            if reason := refusal(name, revision, error):
                raise InputError(reason) from None
            raise


def check_size(name: str, config: ModelConfig) -> None:
    """Raises InputError where the weights in the narrowest dtype need more than all free memory."""
    needed = parameter_count(config) * NARROWEST
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    free = max(free_bytes(torch.device("cpu")), sum(map(free_bytes, gpus)))
    if needed > free:
        raise InputError(
            f"{name} does not fit: its weights take {decimal(needed)}, and {decimal(free)} are"
            " free: give a smaller --model"
        )


def refusal(name: str, revision: str | None, error: Exception) -> str | None:
    """Reason and remedy for an error of the hub that is final; None for one worth another try."""
    if constants.HF_HUB_OFFLINE:
        return f"no folder {name}, and the cache of the hub lacks it: unset HF_HUB_OFFLINE to fetch"
    reasons = {
        errors.GatedRepoError: "is gated: ask for access on its page, and set HF_TOKEN",
        errors.RepositoryNotFoundError: "is no folder, and no model on the hub that you may see:"
        " check its name, or set HF_TOKEN if it is private",
        errors.RevisionNotFoundError: f"has no revision {revision!r:.80}: give a branch, a tag or a"
        " commit",
        errors.LocalEntryNotFoundError: "is no folder, and the hub cannot be reached: check the"
        " network, or give a folder",
        errors.EntryNotFoundError: "has no config.json: it is no model in Hugging Face's format",
    }
    found = (reason for kind, reason in reasons.items() if isinstance(error, kind))
    return next((f"{name} {reason}" for reason in found), None)
