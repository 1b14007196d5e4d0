"""safetensors -> module, straight into the wanted dtype and device.

Headers are checked against the config before a byte of weight memory is taken; then each tensor is
copied in slices, so that memory peaks at the weights themselves plus one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model import Decoder, InputError, ModelConfig, build, parse_config
from weights.cli.files import is_file, is_there, one_line, read_json

if TYPE_CHECKING:
    from model.parallel import Cut, Shard

SLICE_BYTES = 16 << 20
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old Llama checkpoints carry


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is, from a safetensors header."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def load_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Decoder:
    """The model of a Hugging Face folder, ready to decode: eval mode, no gradients.

    ``dtype`` None keeps the checkpoint's own. With a ``shard``, only that part of the weights is read.
    Raises InputError for anything wrong with the folder.
    """
    config = read_config(folder)
    stored = stored_tensors(folder)
    depth = 1 + max((int(name.split(".")[1]) for name in stored if _is_layer(name)), default=-1)
    if config.num_layers > depth:
        raise InputError(f"{folder}: config.json names {config.num_layers} layers, the weights hold {depth}")
    with torch.device("meta"):
        model = build(config)
        local = build(shard.local) if shard else model
    wanted = dict(model.named_parameters())
    _check(folder, wanted, stored, tied=model.lm_head is None)
    dtype = dtype or stored[EMBEDDING].dtype
    cuts = {name: shard.cut(name) if shard else None for name in wanted}
    state = {name: _copy(stored[name], dtype, device, cut) for name, cut in cuts.items()}
    if model.lm_head is None and HEAD in stored:
        _check_tied(folder, stored[HEAD], stored[EMBEDDING], state[EMBEDDING], cuts[EMBEDDING])
    local.load_state_dict(state, assign=True)
    return local.requires_grad_(False).eval()


def read_config(folder: Path) -> ModelConfig:
    """The config of a Hugging Face folder. Raises InputError for one that this project cannot compute."""
    return parse_config(read_json(folder / "config.json"))


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype a checkpoint is stored in, read off its embedding's header: what ``load_model`` keeps by default."""
    stored = stored_tensors(folder)
    if EMBEDDING not in stored:
        raise InputError(f"{folder}: tensor {EMBEDDING} is missing")
    return stored[EMBEDDING].dtype


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
                            f"{file}: tensor {name!r:.100} is stored as {view.get_dtype()}: quantised checkpoints do "
                            "not load; use the original float weights"
                        )
                    short = name.removeprefix("model.")
                    if short in tensors:
                        raise InputError(
                            f"{file}: tensor {name!r:.100} is stored twice, also as {tensors[short].name!r:.100} in "
                            f"{tensors[short].file.name}: remove one of them, or export the checkpoint again"
                        )
                    tensors[short] = StoredTensor(file, name, tuple(view.get_shape()), FLOAT_DTYPES[view.get_dtype()])
        except (SafetensorError, OSError) as error:
            raise _not_whole(file, error) from None
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the shards its index names, or the single file.

    Raises InputError for a missing shard, and for pickled weights, which can run any code when opened.
    """
    index = folder / "model.safetensors.index.json"
    if is_there(index):
        raw = read_json(index)
        mapping = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
            raise InputError(f"{index} must hold a weight_map from tensor names to files")
        files = []
        for shard in sorted(set(mapping.values())):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise InputError(f"{index} names {shard!r:.80}, which is not a safetensors file of the folder")
            if not is_file(folder / shard):
                raise InputError(f"{folder}: the index names {shard!r:.80}, which is missing: fetch it again")
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
    raise InputError(f"{folder} holds no model.safetensors and no model.safetensors.index.json: fetch it again")


def _check_index(index: Path, mapping: dict[str, str], files: list[Path]) -> None:
    """Every tensor that the index names is in the shard it names."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as header:
                names = set(header.keys())
        except (SafetensorError, OSError) as error:
            raise _not_whole(file, error) from None
        for name, shard in mapping.items():
            if shard == file.name and name not in names:
                raise InputError(f"{index} says that {shard!r:.80} holds {name!r:.100}, but it does not")


def _not_whole(file: Path, error: Exception) -> InputError:
    return InputError(f"{file} is not a whole safetensors file ({one_line(error)}): fetch or export it again")


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
    extra = sorted(set(stored) - set(wanted) - ({HEAD} if tied else set()))
    if extra:
        raise InputError(
            f"{folder}: tensor {extra[0]!r:.100} (shape {list(stored[extra[0]].shape)}) has no place in the model "
            f"that config.json describes ({len(extra)} such tensors)"
        )


def _check_tied(folder: Path, head: StoredTensor, stored: StoredTensor, embedding: Tensor, cut: Cut) -> None:
    """A stored head that is no copy of the embedding would be dropped in silence: the config must untie it."""
    if head.shape != stored.shape or not all(
        torch.equal(rows.to(embedding), embedding[first : first + len(rows)]) for first, rows in _slices(head, cut)
    ):
        raise InputError(
            f"{folder}: {HEAD} is not the embedding, though config.json ties the two: set tie_word_embeddings to "
            f"false, or remove {HEAD} from the weights"
        )


def _copy(stored: StoredTensor, dtype: torch.dtype, device: torch.device | str, cut: Cut) -> Tensor:
    """A stored tensor, or the indices of one dimension that ``cut`` names."""
    shape = list(stored.shape)
    if cut:
        shape[cut[0]] = len(cut[1])
    out = torch.empty(shape, dtype=dtype, device=device)
    for first, rows in _slices(stored, cut):
        out[first : first + len(rows)].copy_(rows)
    return out


def _slices(stored: StoredTensor, cut: Cut) -> Iterator[tuple[int, Tensor]]:
    """What ``_copy`` wants of a stored tensor, a slice of rows at a time, each with the number of its first row.

    The file is mapped afresh for each slice: pages of a mapping stay in memory until it is closed.
    """
    dimension, own = cut or (0, range(stored.shape[0]))
    rows, columns = (own, ()) if dimension == 0 else (range(stored.shape[0]), (slice(own.start, own.stop),))
    row_bytes = stored.dtype.itemsize * math.prod(stored.shape[1:])
    count = max(1, SLICE_BYTES // row_bytes)
    for first in range(rows.start, rows.stop, count):
        try:
            with safe_open(stored.file, framework="pt") as file:
                last = min(first + count, rows.stop)
                yield first - rows.start, file.get_slice(stored.name)[(slice(first, last), *columns)]
        except (SafetensorError, OSError) as error:  # it was whole when its header was read
            raise _not_whole(stored.file, error) from None
