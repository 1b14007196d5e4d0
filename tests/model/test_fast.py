"""Long prompts: cache entries and memory of readable and of prepared models."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from model import Decoder, layers
from model.fast import accelerate
from tests.configs import FAMILIES, small
from tests.laws import tiny_model
from tests.oracle import random_model


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    length=st.integers(18, 63),
    chunk=st.sampled_from([18, 25, 40, 63]),
    rows=st.sampled_from([3, 16, 128]),
)
@torch.inference_mode()
def test_a_long_prompt_leaves_the_entries_of_one_pass_however_it_is_divided(
    family: str, length: int, chunk: int, rows: int
) -> None:
    """In chunks of any size, with attention in chunks of any size, prepared or not."""
    readable = tiny_model(family, vocab=19).float()
    fast = accelerate(copy.deepcopy(readable))
    text = torch.randint(19, (2, length), generator=torch.Generator().manual_seed(length))
    expected = readable.new_cache(64, 2)
    readable(text, expected)
    with patch("model.decoder.PREFILL_CHUNK", chunk), patch("model.layers.QUERIES", rows):
        for model in (readable, fast):
            cache = model.new_cache(64, 2)
            model.prefill(text, cache)
            for found, right in zip(
                [*cache.keys, *cache.values], [*expected.keys, *expected.values], strict=True
            ):
                torch.testing.assert_close(found, right, rtol=0, atol=2e-5)


class Largest(TorchDispatchMode):
    """Size of the largest tensor that an operator makes, in numbers."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        made = function(*given, **(named or {}))
        sizes = [
            each.numel()
            for each in (made if isinstance(made, tuple) else (made,))
            if isinstance(each, torch.Tensor)
        ]
        self.numbers = max([self.numbers, *sizes])
        return made


@pytest.mark.parametrize("prepare", [lambda model: model, accelerate], ids=["readable", "prepared"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_prompt_makes_no_tensor_of_all_its_scores(
    family: str, prepare: Callable[[Decoder], Decoder]
) -> None:
    """Neither a mask nor scores of all queries and keys: only those of a chunk."""
    count = 1024
    raw = small(family, max_position_embeddings=count, vocab_size=19)
    model = prepare(random_model(raw, torch.float32))
    cache = model.new_cache(count)
    with Largest() as largest:
        model.prefill(torch.zeros(1, count, dtype=torch.int64), cache)
    assert largest.numbers <= 2 * layers.QUERIES * count  # two query heads share a key head
