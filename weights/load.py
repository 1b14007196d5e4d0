"""safetensors -> module, straight into the wanted dtype and device.

Headers are checked against the config before a byte of weight memory is taken; then each tensor is
copied in slices, so that memory peaks at the weights themselves plus one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from model import Decoder, InputError, build, parse_config
from weights.files import read_json

SLICE_BYTES = 16 << 20
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old Llama checkpoints carry


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is, from a safetensors header."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def load_model(folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Decoder:
    """The model of a Hugging Face folder, ready to decode: eval mode, no gradients.

    ``dtype`` None keeps the checkpoint's own. Raises InputError for anything wrong with the folder.
    """
    config = parse_config(read_json(folder / "config.json"))
    stored = stored_tensors(folder)
    depth = 1 + max((int(name.split(".")[1]) for name in stored if _is_layer(name)), default=-1)
    if config.num_layers > depth:
        raise InputError(f"{folder}: config.json names {config.num_layers} layers, the weights hold {depth}")
    with torch.device("meta"):
        model = build(config)
    wanted = dict(model.named_parameters())
    _check(folder, wanted, stored, tied=model.lm_head is None)
    dtype = dtype or stored["embed_tokens.weight"].dtype
    state = {name: _copy(stored[name], dtype, device) for name in wanted}
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's safetensors files, by its name without the ``model.`` prefix."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as header:
                for name in header.keys():  # noqa: SIM118 - not a dict, it has no __iter__
                    view = header.get_slice(name)
                    if name.endswith(IGNORED_SUFFIX):
                        continue
                    if view.get_dtype() not in FLOAT_DTYPES:
                        raise InputError(
                            f"{file}: tensor {name} is stored as {view.get_dtype()}: quantised checkpoints do not "
                            "load; use the original float weights"
                        )
                    short = name.removeprefix("model.")
                    tensors[short] = StoredTensor(file, name, tuple(view.get_shape()), FLOAT_DTYPES[view.get_dtype()])
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is not a whole safetensors file ({error}): fetch or export it again") from None
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the shards its index names, or the single file.

    Raises InputError for a missing shard, and for pickled weights, which can run any code when opened.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        raw = read_json(index)
        mapping = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
            raise InputError(f"{index} must hold a weight_map from tensor names to files")
        files = []
        for shard in sorted(set(mapping.values())):
            if Path(shard).name != shard or "\0" in shard:
                raise InputError(f"{index} names {shard!r:.80}, which is not a file of the folder")
            if not (folder / shard).is_file():
                raise InputError(f"{folder}: the index names {shard}, which is missing: fetch it again")
            files.append(folder / shard)
        _check_index(index, mapping, files)
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise InputError(
            f"{folder}: {pickled[0]} is a pickle, which can run any code when opened, so it is not loaded: "
            "convert it with transformers' save_pretrained, which writes safetensors"
        )
    raise InputError(f"{folder} holds no model.safetensors and no model.safetensors.index.json")


def _check_index(index: Path, mapping: dict[str, str], files: list[Path]) -> None:
    """Every tensor that the index names is in the shard it names."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as header:
                names = set(header.keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is not a whole safetensors file ({error}): fetch it again") from None
        for name, shard in mapping.items():
            if shard == file.name and name not in names:
                raise InputError(f"{index} says that {shard} holds {name}, but it does not")


def _is_layer(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "layers" and len(parts) > 2 and parts[1].isdecimal() and len(parts[1]) < 6


def _check(folder: Path, wanted: dict[str, nn.Parameter], stored: dict[str, StoredTensor], *, tied: bool) -> None:
    for name, parameter in wanted.items():
        if name not in stored:
            raise InputError(
                f"{folder}: tensor {name} is missing; the config wants it with shape {list(parameter.shape)}"
            )
        if stored[name].shape != tuple(parameter.shape):
            raise InputError(
                f"{folder}: tensor {name} has shape {list(stored[name].shape)}, "
                f"the config wants {list(parameter.shape)}"
            )
    # Tied checkpoints may carry the head as a second copy of the embedding.
    extra = sorted(set(stored) - set(wanted) - ({"lm_head.weight"} if tied else set()))
    if extra:
        raise InputError(
            f"{folder}: tensor {extra[0]} (shape {list(stored[extra[0]].shape)}) has no place in the model that "
            f"config.json describes ({len(extra)} such tensors)"
        )


def _copy(stored: StoredTensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Copy one stored tensor, a slice of rows at a time.

    The file is mapped afresh for each slice: pages of a mapping stay in memory until it is closed.
    """
    out = torch.empty(stored.shape, dtype=dtype, device=device)
    row_bytes = max(1, stored.dtype.itemsize * out[:1].numel())
    rows = max(1, SLICE_BYTES // row_bytes)
    for first in range(0, stored.shape[0] if stored.shape else 0, rows):
        with safe_open(stored.file, framework="pt") as file:
            out[first : first + rows].copy_(file.get_slice(stored.name)[first : first + rows])
    return out
