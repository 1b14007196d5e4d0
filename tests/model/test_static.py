"""Static steps of a GPU and functions of rows as graphs, run here without capturing: they compute
what the readable functions do, and any failure costs speed alone.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from model.cache import static_capacity
from model.config import parse_config
from model.decoder import Steps
from model.families import build
from model.fast import gpu
from model.fast.gpu import ROWS, StaticDecoder
from model.plan import LayerPlan
from model.quantise import Quantised, Twins
from tests.configs import FAMILIES, small
from tests.laws import plans, tiny_model

VOCAB = 19
READABLE = gpu.run_block
FULL = LayerPlan.full(3)
TOKENS = torch.arange(60)[None] % VOCAB
LONG = torch.arange(1605)[None] % VOCAB


def static(family: str = "llama") -> StaticDecoder:
    return StaticDecoder(tiny_model(family, vocab=VOCAB), captures=False)


def record(compute: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a computation that, like a CUDA graph's, is run once before."""
    compute()
    return compute


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Before each test."""
    torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    steps=st.lists(
        st.tuples(plans(), st.sampled_from([1, 2, 5, ROWS, ROWS + 1])), min_size=1, max_size=3
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
    backend = Mock(side_effect=torch._dynamo.lookup_backend("aot_eager"))
    code = torch.compile(
        gpu.run_block, fullgraph=True, dynamic=False, backend=lambda *given: backend(*given)
    )
    monkeypatch.setattr(gpu, "compiled", lambda function: code)
    model = static(family)
    model.run = gpu.run_compiled
    cache = model.new_cache(3000)
    for start in (0, 5, 1600):
        model.prefill(LONG[:, cache.length : start], cache, cache.length)
        expected = model.model(LONG[:, : start + 5])[:, -5:]
        assert_same(model(LONG[:, start : start + 5], cache, start), expected)
    assert model.trouble is None and backend.call_count == 1


@torch.inference_mode()
def test_a_static_cache_is_used_again_with_its_steps_and_without_its_entries() -> None:
    model = static()
    cache = model.new_cache(20)
    model(TOKENS[:, :2], cache, 0)
    first = model.used[cache]
    assert model.used[model.new_cache(20)] is not first, "it serves one text at a time"
    del cache
    again = model.new_cache(30)
    assert model.used[again] is first and len(model.steps[first]) == 1
    assert again.length == 0 and not any(each.any() for each in (*again.keys, *again.values))
    assert (again.capacity, first.capacity) == (30, static_capacity(1))


def test_caches_have_at_most_eight_sizes_and_a_whole_context_is_not_doubled() -> None:
    wanted = [*range(1, 131_072, 997), 131_072]
    sizes = [*map(static_capacity, wanted)]
    assert all(size >= positions + ROWS for size, positions in zip(sizes, wanted, strict=True))
    assert len({*sizes}) <= 8 and max(sizes) < 1.01 * 131_072


@pytest.mark.parametrize("way", ["not captured", "captured", "failing"])
@torch.inference_mode()
def test_a_step_made_while_a_text_is_written_leaves_its_entries(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up and the check of a new step write into the cache, padded rows too, and it is
    restored, also where they fail.
    """
    model = static()
    monkeypatch.setattr(gpu, "recorder", lambda: record)
    model.captures = way == "captured"
    if way == "failing":
        failing = Mock(side_effect=RuntimeError)
        monkeypatch.setattr(gpu, "run_block", failing)
        model.run = failing
    cache = model.new_cache(80)
    model.prefill(TOKENS, cache)
    before = [each.clone() for each in (*cache.keys, *cache.values)]
    steps = [model.step_of(cache, plan) for plan in (LayerPlan.early_exit(3, 1), FULL)]
    assert all(steps) == (way != "failing")
    assert all(map(torch.equal, before, (*cache.keys, *cache.values)))


@torch.inference_mode()
def test_low_bits_take_one_row_and_use_the_checkpoints_weights_without_a_kernel() -> None:
    """A layer in bits with a kernel may stand beside one in bits without."""
    model = static()
    cache, plan = model.new_cache(20), FULL.in_bits(4)
    assert (model.step_of(cache, plan).rows, model.step_of(cache, FULL).rows) == (1, ROWS)
    assert_same(model(TOKENS[:, :3], cache, 0, plan), model(TOKENS[:, :3], cache, 0))
    assert model.abilities.low_bits == ()
    model = static()
    kernel = lambda product, bits: product if bits == 8 else nn.Sequential(product, nn.Tanh())  # noqa: E731
    model.model.twins = Twins(model.model, kernel)
    plan = LayerPlan((4, 8, 4), (8, 4, 4))
    found = model(TOKENS[:, :3], model.new_cache(20), 0, plan)
    assert model.trouble is None
    assert_same(found, model.model(TOKENS[:, :3], plan=plan))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@torch.inference_mode()
def test_products_of_the_same_inputs_are_one_in_four_bits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel replaced by torch's product of the rounded weights."""
    config = parse_config(small(family, hidden=32, vocab_size=24, head_dim=16))
    readable = build(config).double().requires_grad_(False)
    readable.initialise(std=0.5, generator=torch.Generator().manual_seed(0))
    made: list[Tensor] = []

    def product_of(weight: Quantised, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        made.append(weight.codes)
        return partial(F.linear, weight=weight.dequantised(torch.float64), bias=bias)

    monkeypatch.setattr(gpu, "gpu_bits", lambda device, dtype: (4,))
    monkeypatch.setattr("model.fast.four_bits.TritonLinear", product_of)
    model = StaticDecoder(copy.deepcopy(readable), captures=False)
    found = model(TOKENS[:, :3], model.new_cache(20), 0, FULL.in_bits(4, head=4))
    assert model.trouble is None and len(made) == 4 * model.num_layers + 1
    readable.twins = Twins(
        readable,
        lambda each, bits: product_of(readable.rounded(each, bits), getattr(each, "bias", None)),
    )
    assert_same(found, readable(TOKENS[:, :3], plan=FULL.in_bits(4, head=4)))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (RuntimeError("no\n  Triton"), "RuntimeError: no Triton"),
        (AssertionError(), "AssertionError"),
        (FailOnRecompileLimitHit("too many"), "FailOnRecompileLimitHit: too many"),
        (lambda *given: -READABLE(*given), "RuntimeError: a static step's logits are"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
    ],
    ids=["compiler", "assertion", "recompiles", "wrong numbers", "in the middle of a text"],
)
@torch.inference_mode()
def test_after_any_failure_steps_are_the_readable_blocks_and_a_line_says_so(
    broken: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = static()
    cache = model.new_cache(20)
    failing = Mock(side_effect=broken)
    start = 4 * isinstance(broken, torch.OutOfMemoryError)  # of a driver or an allocator
    if start:
        model(TOKENS[:, :start], cache, 0)
        model.step_of(cache).run = failing
    monkeypatch.setattr(gpu, "run_block", failing)
    model.run = failing
    found = model(TOKENS[:, start:9], cache, start)
    assert_same(found, model.model(TOKENS[:, :9])[:, start:])
    assert failing.called and cache.lengths == [9] * 3
    assert model.trouble.startswith("steps run without CUDA graphs: " + said)
    assert model.abilities.why_rows_vary == Steps.abilities.why_rows_vary
    assert "\n" not in model.trouble and not model.used.get(model.new_cache(5))


@torch.inference_mode()
def test_a_block_that_does_not_compile_is_captured_uncompiled_and_a_line_says_so(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "compiled", Mock(side_effect=RuntimeError("no\n C compiler")))
    monkeypatch.setattr(gpu, "recorder", lambda: record)
    model = StaticDecoder(tiny_model("llama", vocab=VOCAB))
    assert_same(model(TOKENS[:, :9], model.new_cache(20), 0), model.model(TOKENS[:, :9]))
    assert model.trouble is None
    said = capsys.readouterr().err
    assert said == "[steps are captured uncompiled: RuntimeError: no C compiler]\n"


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
