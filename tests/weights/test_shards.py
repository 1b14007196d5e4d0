"""The shard of a model folder that one of several processes reads and holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import weights.load
from model import InputError
from model.parallel import Shard
from tests.folders import GEMMA2, LLAMA, write_folder
from weights.load import load_model, read_config
from weights.memory import estimate, held_bytes

SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma2": GEMMA2,
    "biases and a tied head": {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "one key head": {**GEMMA2, "num_key_value_heads": 1, "vocab_size": 263},
}


class Counted:
    """``safe_open`` with a count of the numbers read of every tensor."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        outer, file = self, safe_open(*arguments, **more)

        class Slice:
            def __init__(self, name: str) -> None:
                self.name, self.view = name.removeprefix("model."), file.get_slice(name)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.view, name)

            def __getitem__(self, index: Any) -> torch.Tensor:
                rows = self.view[index]
                outer.read[self.name] = outer.read.get(self.name, 0) + rows.numel()
                return rows

        class File:
            get_slice = staticmethod(Slice)
            keys = staticmethod(file.keys)

            def __enter__(self) -> File:
                return self

            def __exit__(self, *_: object) -> None:
                """Nothing is kept open."""

        return File()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slice_bytes", [1, 1 << 20])
def test_a_process_reads_its_shard_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, slice_bytes: int
) -> None:
    """Whether tensors come whole or a row at a time."""
    folder = write_folder(tmp_path, SHAPES[shape], dtype=torch.bfloat16)
    monkeypatch.setattr(weights.load, "SLICE_BYTES", slice_bytes)
    whole = load_model(folder)
    for rank in range(2):
        shard, counted = Shard(whole.config, rank, 2), Counted()
        monkeypatch.setattr(weights.load, "safe_open", counted)
        mine = dict(load_model(folder, shard=shard).named_parameters())
        assert mine.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            cut = shard.cut(name)
            kept = parameter if cut is None else parameter.narrow(cut[0], cut[1].start, len(cut[1]))
            assert torch.equal(mine[name], kept) and counted.read[name] == kept.numel(), name
        monkeypatch.undo()
        monkeypatch.setattr(weights.load, "SLICE_BYTES", slice_bytes)


def test_a_stored_head_that_is_not_its_tied_embedding_is_found_by_the_process_that_holds_the_row(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path, SHAPES["biases and a tied head"])
    state = load_file(folder / "model.safetensors")
    head = state["model.embed_tokens.weight"].clone()
    head[200] += 1
    save_file(state | {"lm_head.weight": head}, folder / "model.safetensors")
    load_model(folder, shard=Shard(read_config(folder), 0, 2))
    with pytest.raises(InputError, match="is not the embedding"):
        load_model(folder, shard=Shard(read_config(folder), 1, 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_of_a_shard_is_what_the_process_holds(tmp_path: Path, shape: str) -> None:
    folder = write_folder(tmp_path, SHAPES[shape])
    config = read_config(folder)
    for rank in range(2):
        shard = Shard(config, rank, 2)
        model = load_model(folder, shard=shard)
        memory = estimate(shard.local, torch.float32, 64, prompt=5)
        assert memory.weights == held_bytes(model)
        cache = model.new_cache(64)
        assert memory.cache == sum(each.nbytes for each in (*cache.keys, *cache.values))
