"""Tensor parallelism: logits of a decoder split over two and three processes are those of one, with
the same bits on every rank.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import parse_config
from model.decoder import Decoder
from model.fast import accelerate
from model.parallel import Shard, split
from model.plan import LayerPlan
from tests.configs import FAMILIES, small
from tests.laws import EXACT, random_model
from tests.ranks import on_ranks, split_model
from tests.refusal import refusal


def config(family: str, size: int, **changes: Any) -> dict[str, Any]:
    """Config with biases, whose heads divide over ``size`` processes; over three, MLP and
    vocabulary do not.
    """
    return small(
        family,
        **{
            "num_attention_heads": 2 * size,
            "num_key_value_heads": size,
            "hidden": 12,
            "intermediate_size": 10,
            "vocab_size": 4,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": family == "llama",
            **changes,
        },
    )


@torch.inference_mode()
def logits_of(model: Decoder) -> Tensor:
    """Logits of a prompt read in two parts, of steps after it under every kind of plan, and after a
    rollback.
    """
    tokens = torch.tensor([[3, 1, 0, 1, 2, 2, 0, 2, 3, 2]])
    cache = model.new_cache(16)
    model.prefill(tokens[:, :4], cache)
    parts = [model(tokens[:, 4:7], cache, 4)]
    for plan in (None, LayerPlan.early_exit(3, 1), LayerPlan.skipping(3, [1], [0, 2])):
        cache.truncate(6)
        parts += [
            model(tokens[:, 6:9], cache, 6, plan),
            model(tokens[:, 9:], cache, cache.length, plan),
        ]
    return torch.cat([*parts, model(tokens)], 1)


def split_logits(configs: list[dict[str, Any]]) -> list[Tensor]:
    return [logits_of(split_model(config)) for config in configs]


# two query heads per key head; one key head; a vocabulary that divides; a tied head
CHANGES = {"num_key_value_heads": 1}, {"vocab_size": 12}, {"tie_word_embeddings": True}
CASES = [(family, {}) for family in FAMILIES] + [*product(("llama", "gemma2"), CHANGES)]


@pytest.mark.parametrize("size", [2, 3])
def test_logits_on_every_rank_are_those_of_one_process(size: int) -> None:
    configs = [config(family, size, **changes) for family, changes in CASES]
    ranks = on_ranks(size, split_logits, configs)
    for case, raw, first, *others in zip(CASES, configs, *ranks, strict=True):
        whole = logits_of(random_model(raw))
        torch.testing.assert_close(first, whole, rtol=0, atol=EXACT, msg=str(case))
        assert all(torch.equal(other, first) for other in others), case


@pytest.mark.parametrize(
    ("heads", "shared", "size", "fit"), [(4, 1, 3, "1, 2, 4"), (12, 3, 2, "1, 3, 6, 12")]
)
def test_heads_that_do_not_divide_are_refused_with_numbers_that_do(
    heads: int, shared: int, size: int, fit: str
) -> None:
    config = parse_config(small(num_attention_heads=heads, num_key_value_heads=shared))
    assert refusal(Shard, config, 0, size).endswith(
        f"do not divide over {size} processes: start one of [{fit}]"
    )


def test_only_key_heads_are_shared() -> None:
    """Also where the MLP has as many parts."""
    shard = Shard(parse_config(config("llama", 2, intermediate_size=2)), 2, 4)
    assert shard.cut("k_proj.weight") == (0, range(4, 8))
    assert "2 parts of this model do not divide over 4" in refusal(shard.cut, "up_proj.weight")


def test_a_split_model_has_no_faster_steps() -> None:
    """They would not sum with the other ranks. Its weights may be new ones, as in training."""
    shard = Shard(parse_config(config("llama", 2)), 1, 2)
    with pytest.raises(ValueError, match="split over processes has no faster steps"):
        accelerate(split(Decoder(shard.local), shard))
