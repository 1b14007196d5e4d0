"""Loading of safetensors into a model, in the wanted dtype and on the wanted device.

Headers are compared with the config before memory for weights is allocated. Then each tensor is copied in slices, so
that memory peaks at the weights plus one slice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model import Decoder, InputError, ModelConfig, build, parse_config
from weights.cli.files import explaining, read_json, read_optional_json

if TYPE_CHECKING:
    from model.parallel import Cut, Shard

SLICE_BYTES = 16 << 20
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old Llama checkpoints carry


@dataclass(frozen=True)
class StoredTensor:
    """Place, shape and dtype of a tensor, from a safetensors header."""

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
    """Model of a Hugging Face folder, in eval mode and without gradients.

    ``dtype`` None is the checkpoint's. With a ``shard``, only that part of the weights is read. Raises InputError for
    anything wrong with the folder.
    """
    config = read_config(folder)
    stored = stored_tensors(folder)
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
    """Config of a Hugging Face folder. Raises InputError for an architecture that is not supported."""
    return parse_config(read_json(folder / "config.json"))


def stored_dtype(folder: Path) -> torch.dtype:
    """Dtype of a stored checkpoint, that of its embedding: the default of ``load_model``."""
    stored = stored_tensors(folder)
    if EMBEDDING not in stored:
        raise InputError(f"{folder}: tensor {EMBEDDING} is missing")
    return stored[EMBEDDING].dtype


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of a folder's safetensors files, by name without the ``model.`` prefix.

    Raises InputError for quantised tensors.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict, it has no __iter__
                if name.endswith(IGNORED_SUFFIX):
                    continue
                view = file.get_slice(name)
                dtype = FLOAT_DTYPES.get(view.get_dtype())
                if dtype is None:
                    raise InputError(
                        f"{path}: tensor {name!r:.100} is stored as {view.get_dtype()}: quantised checkpoints do not "
                        "load; use the original float weights"
                    )
                tensors[name.removeprefix("model.")] = StoredTensor(path, name, tuple(view.get_shape()), dtype)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files of a folder: the shards in its index, or the single file.

    Raises InputError for a missing shard, and for pickled weights, because opening a pickle can run any code.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        places = read_optional_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise InputError(f"{index} must hold a weight_map from tensor names to files")
        shards = sorted(set(map(str, places.values())))
        for shard in shards:
            if Path(shard).suffix != ".safetensors" or Path(shard).name != shard or not os.path.isfile(folder / shard):
                raise InputError(f"{index} names {shard!r:.80}, which is no safetensors file of the folder: fetch it")
        return [folder / shard for shard in shards]
    if single.exists():
        return [single]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise InputError(
            f"{folder}: {pickled[0]} is a pickle, which can run any code when opened, so it is not loaded: "
            "convert it to safetensors with save_pretrained of transformers"
        )
    raise InputError(f"{folder} holds no model.safetensors and no model.safetensors.index.json: fetch it again")


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """An opened safetensors file. Raises InputError for a damaged one."""
    trouble = f"{path} is not a whole safetensors file, fetch or export it again"
    with explaining(trouble, (SafetensorError, OSError)), safe_open(path, framework="pt") as file:
        yield file


def _check(folder: Path, wanted: dict[str, nn.Parameter], stored: dict[str, StoredTensor], *, tied: bool) -> None:
    """Raises InputError unless the stored tensors have the names and shapes that follow from the config."""
    for name, parameter in wanted.items():
        shape = stored[name].shape if name in stored else None
        if shape != tuple(parameter.shape):
            found = "is missing" if shape is None else f"has shape {list(shape)}"
            raise InputError(f"{folder}: tensor {name} {found}, the config wants {list(parameter.shape)}")
    # Tied checkpoints may carry the head as a second copy of the embedding.
    extra = sorted(set(stored) - set(wanted) - ({HEAD} if tied else set()))
    if extra:
        raise InputError(
            f"{folder}: tensor {extra[0]!r:.100} (shape {list(stored[extra[0]].shape)}) has no place in the model "
            f"that config.json describes ({len(extra)} such tensors)"
        )


def _check_tied(folder: Path, head: StoredTensor, stored: StoredTensor, embedding: Tensor, cut: Cut) -> None:
    """Raises InputError where the config ties head and embedding, but the stored head is no copy of the embedding."""
    if head.shape != stored.shape or not all(
        torch.equal(rows.to(embedding), embedding[first : first + len(rows)]) for first, rows in _slices(head, cut)
    ):
        raise InputError(
            f"{folder}: {HEAD} is not the embedding, though config.json ties the two: set tie_word_embeddings to "
            f"false, or remove {HEAD} from the weights"
        )


def _copy(stored: StoredTensor, dtype: torch.dtype, device: torch.device | str, cut: Cut) -> Tensor:
    """A stored tensor, or the part of it that ``cut`` selects: a dimension and a range of indices."""
    shape = list(stored.shape)
    if cut:
        shape[cut[0]] = len(cut[1])
    out = torch.empty(shape, dtype=dtype, device=device)
    for first, rows in _slices(stored, cut):
        out[first : first + len(rows)].copy_(rows)
    return out


def _slices(stored: StoredTensor, cut: Cut) -> Iterator[tuple[int, Tensor]]:
    """Slices of rows of a stored tensor, or of the part that ``cut`` selects, each with the number of its first row.

    The file is mapped anew for each slice, because pages of a mapping stay in memory until it is closed.
    """
    dimension, kept = cut or (0, range(stored.shape[0]))
    rows, columns = (kept, ()) if dimension == 0 else (range(stored.shape[0]), (slice(kept.start, kept.stop),))
    row_bytes = stored.dtype.itemsize * math.prod(stored.shape[1:])
    count = max(1, SLICE_BYTES // row_bytes)
    for first in range(rows.start, rows.stop, count):
        with open_safetensors(stored.file) as file:
            last = min(first + count, rows.stop)
            yield first - rows.start, file.get_slice(stored.name)[(slice(first, last), *columns)]
