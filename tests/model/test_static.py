"""Static steps of a GPU, run here without capturing: they compute what the readable blocks do, and
any failure costs speed alone.
"""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.cache import static_capacity
from model.fast import gpu
from model.plan import FULL, LayerPlan
from model.steps import Steps
from tests.configs import FAMILIES, small
from tests.laws import plans, random_model, tiny_model

VOCAB = 19
TOKENS = (3 - torch.arange(1605))[None] % VOCAB  # unlike those of a check


def static(family: str = "llama") -> gpu.StaticDecoder:
    return gpu.StaticDecoder(tiny_model(family, vocab=VOCAB), captures=False)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    steps=st.lists(
        st.tuples(plans(), st.sampled_from([1, 2, 5, gpu.ROWS, gpu.ROWS + 1])),
        min_size=1,
        max_size=3,
    ),
    start=st.integers(1, 9),
)
@torch.inference_mode()
def test_static_steps_give_the_readable_logits_at_any_position_and_plan(
    family: str, steps: list[tuple[LayerPlan, int]], start: int
) -> None:
    """With rejected entries behind the length, and two caches of one model written in turn."""
    model = static(family)
    lanes = [(each, each.new_cache(64)) for each in (model.model, model, model)]
    for each, cache in lanes:
        each.prefill(TOKENS[:, :start], cache)
    for plan, count in steps:
        for tokens, under in (TOKENS[:, start : start + count], plan), (TOKENS[:, :1], None):
            expected, *found = (each(tokens, cache, start, under) for each, cache in lanes)
            for logits in found:
                assert_same(logits, expected)
            assert lanes[0][1].lengths == lanes[1][1].lengths == lanes[2][1].lengths
            for _, cache in lanes:
                cache.truncate(start + (under is None))
        start += 1
    assert model.trouble is None and model.abilities.why_rows_vary is None


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_one_compiled_block_serves_all_layers_and_caches_that_grow(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph without a break, with the readable block's logits."""
    torch._dynamo.reset()
    backend = Mock(side_effect=torch._dynamo.lookup_backend("aot_eager"))
    code = torch.compile(
        gpu.run_block, fullgraph=True, dynamic=False, backend=lambda *given: backend(*given)
    )
    monkeypatch.setattr(gpu, "compiled", lambda function: code)
    model = static(family)
    model.run = gpu.run_compiled
    cache = model.new_cache(3000)
    for start in (0, 5, 1600):
        model.prefill(TOKENS[:, cache.length : start], cache, cache.length)
        expected = model.model(TOKENS[:, : start + 5])[:, -5:]
        assert_same(model(TOKENS[:, start : start + 5], cache, start), expected)
    assert model.trouble is None and backend.call_count == 1


@torch.inference_mode()
def test_a_static_cache_is_used_again_with_its_steps_and_without_its_entries() -> None:
    model = static()
    cache = model.new_cache(20)
    model(TOKENS[:, :2], cache, 0)
    steps = cache.static.steps
    assert model.new_cache(20).static.steps is not steps, "it serves one text at a time"
    del cache
    found = [model.new_cache(30) for _ in range(2)]
    again = next(each for each in found if each.static.steps is steps)
    assert len(steps) == 1 and again.capacity == 30 and again.length == 0
    assert not any(each.any() for each in (*again.keys, *again.values))


@pytest.mark.parametrize("room", [40, 3000], ids=["in a short text", "in a long one"])
@torch.inference_mode()
def test_a_cache_that_found_no_memory_to_grow_is_used_again(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors of one length, though some had grown before."""
    model = static()
    cache = model.new_cache(3000)
    pad = Mock(side_effect=[F.pad(cache.keys[0], (0, 0, 0, 1024)), torch.OutOfMemoryError])
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(F, "pad", pad)
        model.prefill(TOKENS, cache)
    del cache
    assert len(model.free) == 1
    again = model.new_cache(room)
    start = min(room, TOKENS.shape[1]) - 5
    model.prefill(TOKENS[:, :start], again)
    found = model(TOKENS[:, start : start + 5], again, start)
    assert_same(found, model.model(TOKENS[:, : start + 5])[:, -5:])
    assert pad.call_count == 2 and model.trouble is None


def test_caches_have_at_most_eight_sizes_and_a_whole_context_is_not_doubled() -> None:
    sizes = {
        positions: static_capacity(positions) for positions in (*range(1, 131_072, 997), 131_072)
    }
    assert all(size >= positions + gpu.ROWS for positions, size in sizes.items())
    assert len({*sizes.values()}) <= 8 and max(sizes.values()) < 1.01 * 131_072


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@torch.inference_mode()
def test_products_of_the_same_inputs_are_one_in_four_bits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel replaced by torch's product of the rounded weights, and inputs that are not
    rounded. Sublayers in eight bits, which have no kernel, stand beside these.
    """
    pack = Mock(side_effect=lambda weight: [weight.dequantised(torch.float64)])
    for name, value in {
        "fast.four_bits.gpu_bits": lambda device, dtype: (4,),
        "fast.triton_product.pack": pack,
        "fast.triton_product.multiply": torch.nn.functional.linear,
        "low_bits.round_inputs": lambda x: x,
    }.items():
        monkeypatch.setattr(f"model.{name}", value)
    raw = small(family, hidden=32, vocab_size=24, head_dim=16)
    model = gpu.StaticDecoder(random_model(raw), captures=False)
    found = model(TOKENS[:, :3], model.new_cache(20), 0, LayerPlan((4, 8, 4), (8, 4, FULL), head=4))
    assert model.trouble is None and pack.call_count == 2 * 2 + 2 + 1
    plan = LayerPlan((4, FULL, 4), (FULL, 4, FULL), head=4)
    assert_same(found, random_model(raw)(TOKENS[:, :3], plan=plan))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (RuntimeError("no\n  Triton"), "RuntimeError: no Triton"),
        (AssertionError(), "AssertionError"),
        (
            lambda *given, block=gpu.run_block: -block(*given),
            "RuntimeError: a static step's logits are",
        ),
        (torch.OutOfMemoryError("no memory"), "OutOfMemoryError: no memory"),
    ],
    ids=["compiler", "assertion", "wrong numbers", "of a step in use"],
)
@torch.inference_mode()
def test_after_any_failure_steps_are_the_readable_blocks_and_a_line_says_so(
    broken: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a text, whose entries stay."""
    model = static()
    cache = model.new_cache(20)
    model.prefill(TOKENS[:, :4], cache)
    failing = Mock(side_effect=broken)
    if isinstance(broken, torch.OutOfMemoryError):
        model.make_step(cache)
        cache.static.steps[LayerPlan.full(3)].run = failing
    monkeypatch.setattr(gpu, "run_block", failing)
    model.run = failing
    found = torch.cat([model(TOKENS[:, at : at + 5], cache, at) for at in (4, 9)], 1)
    assert_same(found, model.model(TOKENS[:, :14])[:, 4:])
    assert failing.called and cache.lengths == [14] * 3
    assert model.trouble.startswith("steps run without CUDA graphs: " + said)
    assert model.abilities.why_rows_vary == Steps.abilities.why_rows_vary
    assert "\n" not in model.trouble and not hasattr(model.new_cache(5), "static")


@torch.inference_mode()
def test_a_block_that_does_not_compile_is_captured_uncompiled_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "compiled", Mock(side_effect=RuntimeError("no\n C compiler")))
    monkeypatch.setattr(gpu, "recorder", lambda: lambda compute: compute)
    model = gpu.StaticDecoder(tiny_model("llama", vocab=VOCAB))
    assert_same(model(TOKENS[:, :9], model.new_cache(20), 0), model.model(TOKENS[:, :9]))
    assert model.trouble is None
    assert caplog.messages == ["[steps are captured uncompiled: RuntimeError: no C compiler]"]


@torch.inference_mode()
def test_steps_whose_rows_depend_on_each_other_are_reported() -> None:
    model = static()
    model.run = lambda block, x, angles, mask, entries, *runs: gpu.run_block(
        block,
        x + 1e-9 * entries.index[0] * torch.arange(x.shape[2]),
        *(angles, mask, entries, *runs),
    )
    model(TOKENS[:, :3], model.new_cache(20), 0)
    assert model.trouble is None and "alone" in model.abilities.why_rows_vary
