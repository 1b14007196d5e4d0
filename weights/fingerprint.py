"""Fingerprint of a model folder, so that a file made for one model is not used with another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from weights.cli.files import explaining, read_json
from weights.load import stored_tensors, weight_files

SAMPLES, SAMPLE_BYTES = 64, 1024  # of each weight file: fast at any size, and any training step changes them


def model_fingerprint(folder: Path) -> str:
    """Hash of config, tensor names, shapes, dtypes, and evenly spaced bytes of the weights: 16 hex digits."""
    digest = hashlib.sha256(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
    for path in weight_files(folder):
        with explaining(f"{path} cannot be read"), path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, path.stat().st_size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
