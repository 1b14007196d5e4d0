"""A plan with a window sees the newest tokens and the first few, and nothing else."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from model.fast import accelerate
from model.layers import attend_causally
from model.plan import SINKS, LayerPlan
from tests.laws import tiny_model

SIZE = 17  # positions, the last ten of which are queries


def seen(query: int, window: int | None, newest: int | None) -> list[int]:
    """The keys of a query, key by key."""
    return [
        key
        for key in range(query + 1)
        if query - key < (window or math.inf)
        and (query - key < (newest or math.inf) or key < SINKS)
    ]


@pytest.mark.parametrize("rows", [1, 3, 128])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 9, 16])
@pytest.mark.parametrize("newest", [1, 4, 8, 14, 16, 17, 40])
def test_attention_is_that_to_the_keys_that_a_window_leaves(
    newest: int,
    window: int | None,
    soft_cap: float | None,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.layers.QUERIES", rows)
    generator = torch.Generator().manual_seed(newest)
    q = torch.randn(1, 4, 10, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, SIZE, 8, generator=generator, dtype=torch.float64)
    found = attend_causally(q, k, v, window, scale=0.5, soft_cap=soft_cap, newest=newest)
    for row in range(10):
        keys = seen(SIZE - 10 + row, window, newest)
        for head in range(4):
            scores = 0.5 * k[0, head // 2, keys] @ q[0, head, row]
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            expected = scores.softmax(0) @ v[0, head // 2, keys]
            torch.testing.assert_close(found[0, head, row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 300, 700, None])
@torch.inference_mode()
def test_the_compiled_step_reads_the_same_keys_of_a_long_text(window: int | None) -> None:
    """As the readable blocks, over several of its chunks of keys; alone and in one step."""
    readable = tiny_model("llama", vocab=11).float()
    fast = accelerate(copy.deepcopy(readable))
    text = torch.randint(11, (1, 1150), generator=torch.Generator().manual_seed(2))
    plan = replace(LayerPlan.full(3), window=window)
    found = []
    for model, rows in ((readable, 5), (fast, 5), (fast, 1)):
        cache = model.new_cache(1150)
        model.prefill(text[:, :1145], cache)
        steps = [model(text[:, at : at + rows], cache, at, plan) for at in range(1145, 1150, rows)]
        found.append(torch.cat(steps, 1))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)
    assert torch.equal(found[2], found[1])
