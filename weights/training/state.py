"""The state of a training run on disk: weights, the optimiser's moments, the step, and the settings they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import Decoder, InputError, build
from weights.cli.files import atomic_path, one_line
from weights.save import save_model
from weights.training.optimiser import Optimiser

STATE = "training/state.safetensors"


def save_run(
    out: Path, model: Decoder, optimiser: Optimiser, settings: dict[str, Any], step: int, source: Path | None
) -> None:
    """Write the model as an ordinary bf16 folder with the tokenizer of ``source``, then the state to continue from.

    Each file is replaced as a whole; killed between the two, the run makes the model of its last steps again.
    Raises InputError when the folder cannot be written.
    """
    published = build(model.config).to(torch.bfloat16)
    published.load_state_dict(model.state_dict())
    save_model(published, out, tokenizer_from=source or out)
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    tensors = {**weights, **dict(optimiser.state(model))}
    try:
        with atomic_path(out / STATE) as temporary:
            save_file(tensors, temporary, {"step": str(step), "settings": json.dumps(settings, sort_keys=True)})
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{out / STATE} cannot be written ({one_line(error)}): the state saved before it is kept; make room and "
            "run the same command again"
        ) from None


def restore_run(out: Path, model: Decoder, optimiser: Optimiser, settings: dict[str, Any]) -> int:
    """Put weights and moments back as they were saved in ``out``; the step they had come to, 0 where none was saved.

    Raises InputError when the state is damaged, or of a run with other ``settings``: all that the losses depend on.
    """
    path = out / STATE
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        step, saved = int(metadata["step"]), json.loads(metadata["settings"])
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a training state: {one_line(error)}") from None
    for name, value in sorted(settings.items()):
        if saved.get(name) != value:
            found = one_line(saved.get(name))
            raise InputError(f"{path} is of a run with another {name} ({found}): give the same, or another --out")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[name])
    optimiser.restore(model, tensors, step)
    return step
