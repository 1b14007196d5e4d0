"""The files of a training run: the state to go on from, the log, and the picture drawn from it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model import InputError
from weights.files import atomic_path, one_line
from weights.tokenizer import Tokenizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """Master weights, both moments of AdamW, and the step, as saved. ``settings``: all that the losses depend on."""

    step: int
    settings: dict[str, Any]
    tensors: dict[str, Tensor]

    def restore(self, model: nn.Module, optimiser: torch.optim.AdamW) -> None:
        """Put weights and moments back where they were."""
        for name, parameter in model.named_parameters():
            parameter.data.copy_(self.tensors[name])
            moments = {moment: self.tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
            optimiser.state[parameter] = {"step": torch.tensor(float(self.step), device=parameter.device), **moments}


def save_state(path: Path, model: nn.Module, optimiser: torch.optim.AdamW, step: int, settings: dict[str, Any]) -> None:
    """Write the state as one safetensors file, replaced as a whole. Raises InputError when it cannot be written."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach().contiguous()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = optimiser.state[parameter][moment].contiguous()
    metadata = {"step": str(step), "settings": json.dumps(settings, sort_keys=True)}
    try:
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} cannot be written ({one_line(error)}): the state saved before it is kept; make room and run the "
            "same command again"
        ) from None


def read_state(path: Path, settings: dict[str, Any]) -> State | None:
    """The state in ``path``; None where there is none. Raises InputError when it is of a run with other settings."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        state = State(int(metadata["step"]), json.loads(metadata["settings"]), tensors)
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a training state: {one_line(error)}") from None
    for name, value in sorted(settings.items()):
        if state.settings.get(name) != value:
            found = one_line(state.settings.get(name))
            raise InputError(f"{path} is of a run with another {name} ({found}): give the same, or another --out")
    return state


def check_folder(out: Path, source: Path | None, start: Path | None) -> None:
    """Raises InputError, before anything is written, when ``out`` holds what this run must not replace."""
    if start and start.resolve() == out.resolve():
        raise InputError("--out must be another folder than --start-from")
    if (out / "config.json").exists() and not (out / "training").exists():
        raise InputError(f"{out} holds a model that train.py did not make: give another --out")
    goes_on = (out / "training" / "state.safetensors").exists()
    if goes_on and source and Tokenizer(source).vocabulary.pieces != Tokenizer(out).vocabulary.pieces:
        raise InputError(f"{out} holds a run with another tokenizer than {source}: give the same, or another --out")


def trim_log(path: Path, step: int) -> None:
    """Keep the whole lines up to ``step``: what a killed run logged after its last checkpoint is made again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        with atomic_path(path) as temporary:
            temporary.write_text("".join(line for line in lines if _step_of(line) <= step), encoding="utf-8")


def _step_of(line: str) -> float:
    """The step that a line of the log tells of; infinity where a kill or a failing disk has left half of one."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def plot_losses(log: Path, picture: Path) -> None:
    """Draw the held-out loss of each exit over the steps, and its agreement with the full model."""
    rows = [row for row in map(json.loads, log.read_text(encoding="utf-8").splitlines()) if "agreement" in row]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, key, label in zip(
        axes, ("held_out_loss", "agreement"), ("loss, nats a token", "greedy agreement"), strict=True
    ):
        layers = len(rows[0][key])
        for layer in range(layers):
            colour = colormaps["viridis"](layer / max(1, layers - 1))
            axis.plot([row["step"] for row in rows], [row[key][layer] for row in rows], color=colour, linewidth=1.2)
        axis.set_xlabel("step")
        axis.set_title(f"held-out {label}")
        axis.grid(alpha=0.3)
    scale = ScalarMappable(Normalize(1, layers), "viridis")
    figure.colorbar(scale, ax=axes, label="exit after layer")
    with atomic_path(picture) as temporary:
        figure.savefig(temporary, format=picture.suffix[1:])
