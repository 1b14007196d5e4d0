"""Static steps of a GPU, run here without capturing, and the graph of their one block."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import FailOnRecompileLimitHit

from model import LayerPlan, Steps, Twins
from model.fast import gpu, static_capacity
from model.fast.gpu import ROWS, StaticDecoder
from tests.configs import FAMILIES
from tests.laws import plans, tiny_model

VOCAB = 19
FULL = LayerPlan.full(3)


def static(family: str = "llama") -> StaticDecoder:
    return StaticDecoder(tiny_model(family, vocab=VOCAB), compiled=False)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    steps=st.lists(
        st.tuples(plans(), st.sampled_from([1, 2, 5, ROWS, ROWS + 1])), min_size=1, max_size=3
    ),
    prompt=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_static_steps_give_the_readable_logits_at_any_position_and_plan(
    family: str, steps: list[tuple[LayerPlan, int]], prompt: int, seed: int
) -> None:
    """With rejected entries behind the length, and two caches of one model written in turn."""
    model = static(family)
    generator = torch.Generator().manual_seed(seed)
    models = model.model, model, model
    caches = [each.new_cache(64) for each in models]
    text = torch.randint(VOCAB, (1, prompt), generator=generator)
    for each, cache in zip(models, caches, strict=True):
        each.prefill(text, cache)
    for plan, count in steps:
        for tokens, under in (
            (torch.randint(VOCAB, (1, count), generator=generator), plan),
            (text[:, :1], None),
        ):
            expected, *found = (
                each(tokens, cache, prompt, under)
                for each, cache in zip(models, caches, strict=True)
            )
            for logits in found:
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
            assert caches[0].lengths == caches[1].lengths == caches[2].lengths
            if under is plan:
                for cache in caches:
                    cache.truncate(prompt)
        prompt += 1
    assert model.trouble is None and model.why_rows_vary is None


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_one_compiled_block_serves_all_layers(family: str) -> None:
    """In one graph without a break, with the readable block's logits; no layer compiles it
    again.
    """
    torch._dynamo.reset()
    backend = Mock(side_effect=torch._dynamo.lookup_backend("aot_eager"))
    model, tokens = static(family), torch.tensor([[1, 2, 3, 4, 5]])
    model.run = torch.compile(
        gpu.run_block, fullgraph=True, dynamic=False, backend=lambda *given: backend(*given)
    )
    cache = model.new_cache(32)
    for start in (0, 5):
        expected = model.model(tokens, copy.deepcopy(cache), start)
        torch.testing.assert_close(model(tokens, cache, start), expected, rtol=0, atol=1e-8)
    assert model.trouble is None and backend.call_count == 1
    torch._dynamo.reset()


def test_a_static_cache_is_used_again_with_its_steps_and_without_its_entries() -> None:
    model, tokens = static(), torch.tensor([[1, 2]])
    with torch.inference_mode():
        cache = model.new_cache(20)
        model(tokens, cache, 0)
        first = model.used[cache]
        other = model.new_cache(20)
        assert model.used[other] is not first, "a static cache serves one text at a time"
        del cache
        again = model.new_cache(30)
        assert model.used[again] is first and len(model.steps[first]) == 1
        assert again.lengths == [0] * model.num_layers
        assert not any(each.any() for each in (*again.keys, *again.values))
        assert (again.capacity, first.capacity) == (30, static_capacity(30))
        assert model.new_cache(8, batch=3).keys[0].shape[:1] == (3,)


def test_caches_have_at_most_eight_sizes_and_a_whole_context_is_not_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, sizes = static(), set()
    make = model.model.new_cache
    monkeypatch.setattr(model.model, "new_cache", lambda size: sizes.add(size) or make(1))
    for capacity in (*range(1, 131_072, 997), 131_072):
        model.new_cache(capacity)
        model.steps.clear()
        assert max(sizes) >= capacity + ROWS
    assert len(sizes) <= 8 and max(sizes) < 1.01 * 131_072


def record(compute: Callable[[], object]) -> Callable[[], None]:
    """Replay of a computation that, like a CUDA graph's, is run once before."""
    compute()
    return compute


@pytest.mark.parametrize("way", ["not captured", "captured", "failing"])
@torch.inference_mode()
def test_a_step_made_while_a_text_is_written_leaves_its_entries(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up and the check of a new step write into the cache, padded rows too, and it is
    restored, also where they fail.
    """
    model, tokens = static(), 5 * torch.arange(60)[None] % VOCAB
    monkeypatch.setattr(gpu, "recorder_of", lambda device: record)
    model.captures = way == "captured"
    run = model.run

    def failing(*given: Any) -> None:
        run(*given)
        raise RuntimeError("no memory")

    model.run = failing if way == "failing" else run
    cache = model.new_cache(80)
    model.prefill(tokens, cache)
    before = [each.clone() for each in (*cache.keys, *cache.values)]
    steps = [model.step_of(cache, plan) for plan in (LayerPlan.early_exit(3, 1), FULL)]
    assert all(steps) == (way != "failing")
    assert all(map(torch.equal, before, (*cache.keys, *cache.values)))


def test_low_bits_take_one_row_and_use_the_checkpoints_weights_without_a_kernel() -> None:
    model, plan, tokens = static(), FULL.in_bits(4), torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        cache = model.new_cache(20)
        assert (model.step_of(cache, plan).rows, model.step_of(cache, FULL).rows) == (1, ROWS)
        low, full = model(tokens, cache, 0, plan), model(tokens, cache, 0)
    torch.testing.assert_close(low, full, rtol=0, atol=1e-10)
    assert model.fast_bits == ()


class Halved(torch.nn.Module):
    """A product with weights of its own, as a kernel's are."""

    def __init__(self, product: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("halved", product.weight / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.halved.T


@torch.inference_mode()
def test_a_layer_in_bits_with_a_kernel_stands_beside_one_in_bits_without() -> None:
    model, tokens = static(), torch.tensor([[1, 2, 3]])
    product = lambda linear, bits: linear if bits == 8 else Halved(linear)  # noqa: E731
    model.model.twins = Twins(model.model, product)
    plan = LayerPlan((4, 8, 4), (8, 4, 4))
    found = model(tokens, model.new_cache(20), 0, plan)
    assert model.trouble is None
    expected = model.model(tokens, model.model.new_cache(20), 0, plan)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (RuntimeError("no\n  Triton"), "RuntimeError: no Triton"),
        (AssertionError(), "AssertionError"),
        (FailOnRecompileLimitHit("too many"), "FailOnRecompileLimitHit: too many"),
        (None, "RuntimeError: a static step's logits are"),
    ],
    ids=["compiler", "assertion", "recompiles", "wrong numbers"],
)
def test_after_any_failure_steps_are_the_readable_blocks_and_a_line_says_so(
    broken: Exception | None, said: str
) -> None:
    model, tokens = static(), torch.tensor([[1, 2, 3]])
    run = model.run
    model.run = Mock(side_effect=broken or (lambda *given: -run(*given)))
    with torch.inference_mode():
        cache = model.new_cache(20)
        found, expected = model(tokens, cache, 0), model.model(tokens, model.model.new_cache(20), 0)
    assert torch.equal(found, expected) and cache.lengths == [3] * 3
    assert model.trouble.startswith("steps run without CUDA graphs: " + said)
    assert model.why_rows_vary == Steps.why_rows_vary
    assert "\n" not in model.trouble and not model.used.get(model.new_cache(5))


def test_steps_whose_rows_depend_on_each_other_are_reported() -> None:
    model = static()
    run = model.run

    def mixes(block, weights, x, angles, mask, entries, *runs):
        mixed = x + 1e-9 * entries.index[0] * torch.arange(x.shape[2])
        return run(block, weights, mixed, angles, mask, entries, *runs)

    model.run = mixes
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]), model.new_cache(20), 0)
    assert model.trouble is None and "alone" in model.why_rows_vary


def test_a_step_that_fails_in_the_middle_of_a_text_costs_speed_and_not_the_text() -> None:
    """As where a driver or an allocator fails."""
    model, tokens = static(), torch.arange(9)[None] % VOCAB
    with torch.inference_mode():
        cache = model.new_cache(20)
        found = [model(tokens[:, :4], cache, 0)]
        model.step_of(cache).run = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
        found += [model(tokens[:, at : at + 1], cache, at) for at in range(4, 9)]
        expected = model.model(tokens, model.model.new_cache(20), 0)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-10)
    assert "CUDA out of memory" in model.trouble and cache.lengths == [9] * 3
