"""The shard of a model folder that one of several processes reads and holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.parallel import Cut, Shard
from tests.folders import GEMMA2, LLAMA, write_folder
from tests.peak import held_bytes
from tests.ranks import part_of
from weights.load import StoredTensor, load_model
from weights.memory import estimate

SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma2": GEMMA2,
    "biases and a tied head": {
        **LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "attention_bias": True},
    "gemma3_text": {**GEMMA2, "model_type": "gemma3_text"},
    "one key head": {**GEMMA2, "num_key_value_heads": 1, "vocab_size": 263},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_process_reads_its_shard_as_estimated_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    folder = write_folder(tmp_path, SHAPES[shape], dtype=torch.bfloat16)
    whole, read_one = load_model(folder), StoredTensor.read
    for rank in range(2):
        shard, read = Shard(whole.config, rank, 2), {}

        def counted(tensor: StoredTensor, cut: Cut, read: dict[str, Tensor] = read) -> Tensor:
            return read.setdefault(tensor.name, read_one(tensor, cut))

        with monkeypatch.context() as patch:
            patch.setattr(StoredTensor, "read", counted)
            model = load_model(folder, shard=shard)
        mine = dict(model.named_parameters())
        assert mine.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            kept = part_of(parameter, shard.cut(name))
            stored = name if name.startswith("lm_head") else f"model.{name}"
            assert torch.equal(mine[name], kept) and read[stored].numel() == kept.numel(), name
        memory, cache = estimate(shard.local, torch.bfloat16, 64, prompt=5), model.new_cache(64)
        assert memory.weights == held_bytes(model)
        assert memory.cache == sum(each.nbytes for each in (*cache.keys, *cache.values))
