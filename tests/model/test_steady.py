"""In bf16 a position gets the same bits however many tokens its step takes, whatever follows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model import Decoder, KVCache, ModelConfig, build, parse_config
from model.cache import BLOCK
from model.fast import accelerate
from model.fast.check import ambiguous, differing_counts
from model.fast.flash import shares
from model.fast.parts import PackedLinear, can_pack
from model.fast.pieces import LONGEST_STEP, PART, attend_in_pieces, even_parts, pieces
from model.fast.steady import SteadyDecoder
from model.layers import place
from weights.load import load_model

WEIGHTS = Path(__file__).parents[2] / "weights"
BF16 = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.bfloat16), reason="needs oneDNN for bfloat16")
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "llama of single heads": {"model_type": "llama"},  # a step of one token has one row for each key head
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 2, "sliding_window": 100, "query_pre_attn_scalar": 32},
}


def random_model(name: str) -> Decoder:
    raw = {"vocab_size": 211, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32}
    raw |= {"num_attention_heads": 4, "max_position_embeddings": 1200}
    model = build(parse_config(raw | SIZES[name])).bfloat16()
    model.initialise(std=0.3, generator=torch.Generator().manual_seed(0))
    return model.requires_grad_(False).eval()


def shipped(name: str) -> Decoder:
    return load_model(WEIGHTS / name, torch.bfloat16)


def tokens_for(model: SteadyDecoder, count: int, seed: int = 0) -> Tensor:
    return torch.randint(model.vocab_size, (1, count), generator=torch.Generator().manual_seed(seed))


def entries(cache: KVCache, begin: int, end: int) -> list[Tensor]:
    return [tensor[:, :, begin:end].clone() for tensor in (*cache.keys, *cache.values)]


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@torch.inference_mode()
def rows_agree(model: SteadyDecoder, start: int, longest: int = LONGEST_STEP) -> bool:
    """Whether tokens at ``start`` get one by one the bits that they get in every longer step."""
    text, others = tokens_for(model, start + longest), tokens_for(model, start + longest, seed=1)
    cache = model.new_cache(start + longest)
    model.prefill(text[:, :start], cache)
    alone = torch.cat([model(text[:, at : at + 1], cache, at) for at in range(start, start + longest)], 1)
    written = entries(cache, start, start + longest)
    for count, kept in [(longest, 1), (longest, longest // 2), *((count, count) for count in range(2, longest + 1))]:
        step = torch.cat((text[:, start : start + kept], others[:, start + kept : start + count]), 1)
        cache.truncate(start)
        logits = model(step, cache, start)
        if not torch.equal(logits[:, :kept], alone[:, :kept]):
            return False
        if not all_equal(entries(cache, start, start + kept), [tensor[:, :, :kept] for tensor in written]):
            return False
    return True


def check_rows(model: SteadyDecoder, starts: list[int]) -> None:
    """The law where the machine has it; elsewhere one line says why not."""
    if model.row_invariant:
        assert [start for start in starts if not rows_agree(model, start)] == []
    else:
        assert model.why_rows_vary and "\n" not in model.why_rows_vary


@pytest.mark.parametrize("name", SIZES)
def test_rows_of_random_models_do_not_depend_on_how_many_there_are(name: str) -> None:
    """Across blocks of the cache, the window's edge, 1,024 tokens, and at the end of the context."""
    check_rows(accelerate(random_model(name)), [0, 1, 63, 64, 90, 127, 500, 1000, 1015, 1183])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
def test_rows_of_the_shipped_models_do_not_depend_on_how_many_there_are(name: str) -> None:
    check_rows(accelerate(shipped(name)), [0, 57, 500, 1007])


def test_rows_of_smollm2_do_not_depend_on_how_many_there_are(smollm2: Path) -> None:
    model = accelerate(load_model(smollm2, torch.bfloat16))
    if model.row_invariant:
        assert all(rows_agree(model, start, longest) for start, longest in [(55, LONGEST_STEP), (1018, 12)])


def halves(keys: int, config: ModelConfig) -> int:
    """``even_parts`` of a machine with many threads and of much shorter texts."""
    return 2 if keys >= 128 and config.attention_soft_cap is None else 1


@pytest.mark.parametrize("name", ["llama", "llama of single heads"])
def test_rows_do_not_depend_on_how_many_there_are_where_keys_are_taken_in_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.fast.pieces.even_parts", halves)
    check_rows(accelerate(random_model(name)), [100, 127, 500, 1000, 1015])


@pytest.mark.parametrize("start", [0, 120, 130, 500])
def test_keys_in_parts_give_the_attention_of_the_whole(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = random_model("llama").config
    q, k, v = torch.randn(3, 1, 4, 576, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(start))
    given = q[:, :, :9], k[:, :2], v[:, :2]
    whole = attend_in_pieces(*given, pieces(start, 9, None, config, q, 32), scale=0.2, soft_cap=None)
    monkeypatch.setattr("model.fast.pieces.even_parts", halves)
    parts = pieces(start, 9, None, config, q, 32)
    assert max(piece.parts for piece in parts) == (1 if start == 0 else 2)
    torch.testing.assert_close(attend_in_pieces(*given, parts, scale=0.2, soft_cap=None), whole, rtol=0, atol=1e-12)


def test_the_shares_of_parts_do_not_depend_on_the_number_of_rows() -> None:
    log_sums = torch.randn(2, 3, 51, generator=torch.Generator().manual_seed(0)) * 4
    every = shares(log_sums)
    torch.testing.assert_close(every, log_sums.softmax(0))
    for count in range(1, 51):
        assert torch.equal(shares(log_sums[:, :, :count]), every[:, :, :count])


@BF16
def test_the_check_refuses_shares_that_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.fast.check.shares", lambda log_sums: log_sums + log_sums.shape[1] % 2)
    model = accelerate(random_model("llama"))
    assert not model.row_invariant and model.why_rows_vary.startswith("what joins the parts of an attention")


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 64])
def test_parts_are_equal_long_and_no_more_than_threads_can_share(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = random_model("llama").config  # of two key heads
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for keys in range(BLOCK, 140 * BLOCK, BLOCK):
        parts = even_parts(keys, config)
        assert keys % parts == 0 and parts <= threads
        assert parts == 1 or (keys / parts >= PART and threads > config.num_kv_heads)
    assert even_parts(64 * BLOCK, config) == {1: 1, 2: 1, 3: 2, 16: 4, 64: 4}[threads]
    assert even_parts(64 * BLOCK, random_model("gemma2").config) == 1


@BF16
@pytest.mark.parametrize("name", SIZES)
@torch.inference_mode()
def test_bits_do_not_depend_on_the_caches_capacity(name: str) -> None:
    model = accelerate(random_model(name))
    text = tokens_for(model, 140)
    found = []
    for capacity in (140, 141, 192, 1000):
        cache = model.new_cache(capacity)
        model.prefill(text[:, :110], cache)
        steps = [
            model(text[:, 110:111], cache, 110),
            model(text[:, 111:128], cache, 111),
            model(text[:, 128:], cache, 128),
        ]
        found.append([*steps, *entries(cache, 0, 140)])
    assert all(all_equal(found[0], other) for other in found[1:])


@BF16
@pytest.mark.parametrize("name", SIZES)
@torch.inference_mode()
def test_a_long_verification_is_cut_and_a_prompt_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate(random_model(name))
    text, cache, seen = tokens_for(model, 140), model.new_cache(140), []
    run_blocks = model.model.run_blocks
    monkeypatch.setattr(model.model, "run_blocks", lambda x, *rest: (seen.append(x.shape[1]), run_blocks(x, *rest))[1])
    model.prefill(text[:, :100], cache)
    long = model(text[:, 100:], cache, 100)
    assert seen == [100, 17, 17, 6]
    written = entries(cache, 100, 140)
    cache.truncate(100)
    short = torch.cat([model(text[:, at : at + 1], cache, at) for at in range(100, 140)], 1)
    assert torch.equal(long, short) and all_equal(written, entries(cache, 100, 140))


@BF16
@pytest.mark.parametrize(
    "model", [lambda: shipped("tiny-llama"), lambda: random_model("llama")], ids=["shipped", "random"]
)
def test_with_exactly_the_keys_there_are_rows_depend_on_how_many_there_are(
    model: Callable[[], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law can fail: torch's kernel over unrounded spans, as the readable model calls it."""
    monkeypatch.setattr("model.fast.steady.place_in_pieces", lambda *given: place(*given[:-1]))
    monkeypatch.setattr("model.fast.steady.WholeRooms", lambda cache: cache)
    prepared = accelerate(model())
    assert not all(rows_agree(prepared, start) for start in (57, 100))


@BF16
@pytest.mark.parametrize("size", [(96, 32), (32, 48), (576, 1536), (256, 4096), (64, 32), (192, 96)], ids=str)
@torch.inference_mode()
def test_two_rows_repair_a_product_whose_lone_row_differs(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    product = PackedLinear([torch.randn(size, generator=generator).bfloat16()])
    if differing_counts(product, generator) in ([], [1]):
        product.doubles = True
        assert differing_counts(product, generator) == []
    x = torch.randn(1, 2, size[1], generator=generator).bfloat16()
    residual = torch.randn(1, 2, size[0], generator=generator).bfloat16()
    assert torch.equal(product(x[:, :1], residual[:, :1]), PackedLinear.multiply(product, x, residual)[:, :1])


def spoiled(multiply: Callable[..., Tensor], rows: int) -> Callable[..., Tensor]:
    """A product that comes out larger by one part in 2²⁰ for up to ``rows`` rows, before it is rounded."""

    def other(product: PackedLinear, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None or x.shape[1] > rows:
            return multiply(product, x, residual)
        return (multiply(product, x, residual).float() - residual.float() * 2**-20).bfloat16()

    return other


@BF16
def test_the_check_doubles_a_lone_row_and_refuses_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = PackedLinear.multiply
    monkeypatch.setattr(PackedLinear, "multiply", spoiled(multiply, rows=1))
    model = accelerate(random_model("llama"))
    assert model.row_invariant and model.layers[0].mlp.down_proj.doubles and model.lm_head.doubles
    monkeypatch.setattr(PackedLinear, "multiply", spoiled(multiply, rows=2))
    model = accelerate(random_model("llama"))
    assert not model.row_invariant and "product rounds 2 rows differently from more" in model.why_rows_vary


@BF16
def test_as_many_rows_attend_together_as_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 33 rows torch leaves one to itself, which takes another product."""
    monkeypatch.setitem(SIZES, "three heads", SIZES["llama"] | {"num_attention_heads": 3, "num_key_value_heads": 1})
    monkeypatch.setattr("model.fast.check.ROWS", (33, 6))
    model = accelerate(random_model("three heads"))
    assert model.rows == 6 and model.row_invariant and rows_agree(model, 40)
    monkeypatch.setattr("model.fast.check.ROWS", (33,))
    model = accelerate(random_model("three heads"))
    assert not model.row_invariant and model.why_rows_vary == "attention rounds several rows differently from one"


@BF16
def test_the_check_refuses_attention_that_depends_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(q: Tensor, *rest: Any, **named: Any) -> Tensor:
        return attend_in_pieces(q, *rest, **named) * (1 + 2**-7 * (q.shape[2] == 2))

    monkeypatch.setattr("model.fast.check.attend_in_pieces", other)
    model = accelerate(random_model("gemma2"))
    assert not model.row_invariant and model.why_rows_vary.startswith("attention rounds")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_dtypes_promise_nothing_and_say_so(dtype: torch.dtype) -> None:
    model = accelerate(random_model("llama").to(dtype))
    assert not model.row_invariant and str(dtype).removeprefix("torch.") in model.why_rows_vary


@BF16
def test_another_number_of_threads_than_was_checked_promises_nothing() -> None:
    threads = torch.get_num_threads()
    model = accelerate(random_model("llama"))
    try:
        torch.set_num_threads(threads + 1)
        assert not model.row_invariant and str(threads + 1) in model.why_rows_vary
    finally:
        torch.set_num_threads(threads)


def test_numbers_that_a_function_rounds_in_two_ways_are_found() -> None:
    def moody(x: Tensor) -> Tensor:
        return x.where(x != 3, 4.0) if x.is_contiguous() else x.clone()

    assert ambiguous(moody).tolist() == [3.0] and len(ambiguous(torch.neg)) == 0


@pytest.mark.parametrize("name", SIZES)
@torch.inference_mode()
def test_a_rejected_token_whose_numbers_break_leaves_no_trace(name: str) -> None:
    """Its NaN stays in the block that later steps read and mask; 0 times NaN would be NaN."""
    raw = random_model(name)
    raw.embed_tokens.weight[7] = float("nan")
    raw.lm_head = torch.nn.Linear(96, 211, bias=False).bfloat16().requires_grad_(False)
    model = accelerate(raw)
    text = tokens_for(model, 30) % 7  # never the broken token
    caches = model.new_cache(60), model.new_cache(60)
    for cache in caches:
        model.prefill(text[:, :20], cache)
    draft = torch.cat((text[:, 20:21], torch.full((1, 5), 7)), 1)
    assert model(draft, caches[0], 20).isnan().any()
    for cache in caches:
        cache.truncate(20)
    for at in range(20, 30):
        found, expected = (model(text[:, at : at + 1], cache, at) for cache in caches)
        assert expected.isfinite().all() and torch.equal(found, expected)
