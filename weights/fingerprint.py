"""A short name for the numbers a model folder holds, so that a file made for one model is not used with another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from model import InputError
from weights.cli.files import read_json
from weights.load import stored_tensors, weight_files

SAMPLES, SAMPLE_BYTES = 64, 1024  # of each weight file: fast at any size, and any training step changes them


def model_fingerprint(folder: Path) -> str:
    """16 hex digits of config, tensor names, shapes and dtypes, and evenly spaced bytes of the weights."""
    digest = hashlib.sha256(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
    for file in weight_files(folder):
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                for sample in range(SAMPLES):
                    stream.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:16]
