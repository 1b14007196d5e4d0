"""On a real GPU: what the pretended device and recorder promise. Skipped, saying so, where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import FixedLength
from decoding.randomness import KeyedRandomness, Place
from decoding.recorded import recordings_of
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import chance_of
from model import Decoder, LayerPlan, build, parse_config
from model.fast import accelerate
from model.fast.graphs import ROWS, GraphedDecoder
from model.fast.shared_keys import PART, SharedKeys
from tests.configs import small
from train import recipe_loss
from weights.memory import estimate, held_bytes, peak_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there is none here")

VOCAB, LAYERS = 512, 4
SHAPES = [("llama", 64), ("llama", 128), ("gemma2", 64), ("gemma2", 128)]
PLANS = {
    "full": LayerPlan.full(LAYERS),
    "skip": LayerPlan.skipping(LAYERS, [1], [2]),
    "exit": LayerPlan.early_exit(LAYERS, 2),
    "4 bits": LayerPlan.full(LAYERS).in_bits(4),
    "8 bits": LayerPlan.full(LAYERS).in_bits(8),
}
DRAFTERS: dict[str, Callable[[Decoder, Any], Drafter]] = {
    "none": lambda model, cache: NoDraft(VOCAB, model.device),
    "lookup": lambda model, cache: PromptLookup(VOCAB, model.device),
    **{name: partial(ModelDrafter, plan=plan) for name, plan in PLANS.items() if name != "full"},
}


def model_of(family: str = "llama", size: int = 64, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Decoder:
    """A random model on the GPU, with shapes that its kernels take."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": size, "intermediate_size": 1024}
    if family == "gemma2":
        sizes |= {"sliding_window": 300, "query_pre_attn_scalar": size}
    config = small(family, hidden=512, layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=2048, **sizes)
    model = build(parse_config(config))
    model.initialise(std=0.05, generator=torch.Generator().manual_seed(seed))
    return model.to("cuda", dtype).requires_grad_(False).eval()


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def text_by(
    model: Decoder,
    drafter: str,
    params: SamplingParams,
    coupling: str = "race",
    prompt: int = 40,
    seed: int = 7,
    *,
    record: bool = True,
) -> list[int]:
    """60 tokens after a prompt, with recorded sampling or without."""
    start, cache = ids(prompt), model.new_cache(prompt + 60)
    with torch.inference_mode():
        model.prefill(torch.tensor([start[:-1]], device="cuda"), cache)
    text = Text(start, Rules(60), model)
    chance = chance_of(coupling, seed, model.device)
    if record:
        params, chance = recordings_of(model).of(params, chance, 5)
    drafts = DRAFTERS[drafter](model, cache)
    assert list(speculate(model, cache, text, drafts, FixedLength(4 if drafter != "none" else 0), params, *chance))
    return text.generated


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("family", "size"), SHAPES)
@torch.inference_mode()
def test_recorded_steps_give_the_ordinary_logits_in_every_plan_count_and_span(
    family: str, size: int, plan: str
) -> None:
    ordinary, static = model_of(family, size), accelerate(model_of(family, size))
    text = torch.tensor([ids(3 * PART)], device="cuda")
    caches = static.model.new_cache(3 * PART), static.new_cache(3 * PART)
    for start in (3, PART - 9, PART + 5, 2 * PART + 1):
        for count in (1, 2, 5, ROWS, ROWS + 1):
            for model, cache in zip((static.model, static), caches, strict=True):
                cache.truncate(0)
                model.prefill(text[:, :start], cache)
            tokens = text[:, start : start + count]
            expected = static.model(tokens, caches[0], start, PLANS[plan]).float()
            found = static(tokens, caches[1], start, PLANS[plan]).float()
            assert (found - expected).abs().max() <= 0.03 * expected.abs().max()
    assert static.trouble is None and static.row_invariant
    assert all(step.replay is not None for arena in static.arenas for steps in arena.steps.values() for step in steps)
    plain = ordinary(text[:, :40]).float()  # and the prepared model is the readable one, up to rounding
    assert (static(text[:, :40], static.new_cache(40), 0).float() - plain).abs().max() <= 0.06 * plain.abs().max()


@pytest.mark.parametrize(("family", "size"), SHAPES)
@torch.inference_mode()
def test_a_rows_bits_depend_on_nothing_but_what_it_sees(family: str, size: int) -> None:
    static, start = accelerate(model_of(family, size)), PART - 20
    text, logits = torch.tensor([ids(PART + 40)], device="cuda"), []
    for capacity in (PART + 40, 4 * PART):
        for count in (1, 5, ROWS):
            cache = static.new_cache(capacity)
            static.prefill(text[:, :start], cache)
            steps = [static(text[:, at : at + count], cache, at) for at in range(start, start + 32, count)]
            logits.append(torch.cat(steps, 1)[:, :32])
    assert all(torch.equal(logits[0], other) for other in logits[1:])


@pytest.mark.parametrize("soft_cap", [None, 50.0])
@torch.inference_mode()
def test_a_longer_span_only_adds_empty_parts(soft_cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, ROWS, 64, generator=generator).to("cuda", torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 8 * PART, 64, generator=generator).to("cuda", torch.bfloat16)
    places, found = torch.arange(PART + 20, PART + 20 + ROWS, device="cuda"), []
    for parts in (2, 3, 8):
        span = parts * PART
        sees = SharedKeys.of(places, span, None, 4, q.dtype)
        found.append(sees.attend(q, k[:, :, :span], v[:, :, :span], scale=0.125, soft_cap=soft_cap))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
@pytest.mark.parametrize(("family", "size"), SHAPES)
def test_greedy_and_raced_texts_are_plain_decodings(family: str, size: int, drafter: str) -> None:
    static = accelerate(model_of(family, size))
    for params in (SamplingParams(), SamplingParams(0.8, top_p=0.95)):
        assert text_by(static, drafter, params) == text_by(static, "none", params)
    assert static.trouble is None and static.row_invariant


@pytest.mark.parametrize("coupling", ["ratio", "race"])
def test_the_same_seed_gives_the_same_text_twice_and_another_another(coupling: str) -> None:
    static, params = accelerate(model_of()), SamplingParams(1.0)
    first, again, other = (text_by(static, "exit", params, coupling, seed=seed) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("coupling", ["ratio", "race"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_recorded_sampling_writes_the_eager_text(drafter: str, coupling: str) -> None:
    """Also with a repetition penalty, where the distribution is not recorded."""
    static, filtered = accelerate(model_of()), SamplingParams(0.8, top_k=50, top_p=0.9, min_p=0.01)
    for params in (SamplingParams(), SamplingParams(0.7), filtered, SamplingParams(0.8, repetition_penalty=1.2)):
        recorded, eager = (text_by(static, drafter, params, coupling, record=record) for record in (True, False))
        assert recorded == eager
    assert static.trouble is None and recordings_of(static).trouble is None and recordings_of(static).kept


@torch.inference_mode()
def test_racing_all_rows_at_once_draws_the_cpus_tokens() -> None:
    probs = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    probs[probs < 1e-3] = 0
    randomness, place = KeyedRandomness(3), Place(40, 1)
    assert randomness.draw_each(probs.cuda(), place).tolist() == randomness.draw_each(probs, place).tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_round_waits_for_the_device_once(drafter: str) -> None:
    """Reading the verdict waits, and torch counts the copy of a text's new tokens: nothing else does."""
    static, params = accelerate(model_of()), SamplingParams(0.8, top_k=50, top_p=0.9)
    text_by(static, drafter, params)  # what is new is recorded and loaded now
    start, cache = ids(40), static.new_cache(100)
    with torch.inference_mode():
        static.prefill(torch.tensor([start[:-1]], device="cuda"), cache)
    text = Text(start, Rules(40), static)
    params, chance = recordings_of(static).of(params, chance_of("race", 7, static.device), 5)
    waits, rounds = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *told, **more: waits.append(str(told[0])))
        import warnings

        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            policy = FixedLength(4 if drafter != "none" else 0)
            for _ in speculate(static, cache, text, DRAFTERS[drafter](static, cache), policy, params, *chance):
                rounds += 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert rounds and len(waits) <= rounds * (2 if drafter == "lookup" else 1) + 1


def test_a_failure_while_recording_leaves_stream_allocator_and_text_right() -> None:
    sound, broken = accelerate(model_of()), accelerate(model_of())
    record = broken.recorder.record

    def fails(function: Callable[[], None]) -> Callable[[], None]:
        def reads() -> None:
            function()
            if torch.cuda.is_current_stream_capturing():
                broken.desk.logits[0, 0, 0].item()  # not permitted while a stream is captured

        return record(reads)

    broken.recorder.record = fails
    stream = torch.cuda.current_stream()
    assert text_by(broken, "exit", SamplingParams()) == text_by(sound, "exit", SamplingParams())
    assert broken.trouble and "not recorded" in broken.trouble and broken.static
    assert "not recorded" in recordings_of(broken).trouble
    assert torch.cuda.current_stream() == stream
    held = torch.cuda.memory_allocated()
    block = torch.ones(1 << 20, device="cuda")
    assert block.sum().item() == 1 << 20
    del block
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    another = accelerate(model_of())
    assert text_by(another, "exit", SamplingParams()) == text_by(sound, "exit", SamplingParams())
    assert another.trouble is None


@torch.inference_mode()
def test_two_models_and_their_caches_do_not_disturb_each_other() -> None:
    models = [accelerate(model_of(seed=seed)) for seed in (0, 1)]
    lanes = [(model, model.new_cache(64)) for model in models for _ in range(2)]
    text, together = torch.tensor([ids(20)], device="cuda"), [[] for _ in lanes]
    for at in range(20):
        for (model, cache), found in zip(lanes, together, strict=True):
            found.append(model(text[:, at : at + 1], cache, at))
    for (model, _), found in zip(lanes, together, strict=True):
        cache = model.new_cache(64)
        alone = [model(text[:, at : at + 1], cache, at) for at in range(20)]
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_memory_stays_within_the_estimate_recording_included(family: str) -> None:
    model = accelerate(model_of(family, 128))
    needed = estimate(model.config, model.dtype, 600, prompt=540, fast_on=model.device)
    assert held_bytes(model) <= needed.weights * 1.01 + (1 << 20)
    took = peak_bytes(
        lambda: text_by(model, "exit", SamplingParams(0.8, top_k=50, top_p=0.9), prompt=540), model.device
    )
    assert took <= needed.cache + needed.workspace + needed.recorded


def test_no_length_makes_attention_be_planned_anew() -> None:
    assert isinstance(accelerate(model_of()), GraphedDecoder)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_generate_writes_on_the_gpu_what_it_writes_there_again(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> dict[str, Any]:
        asked = ["Once", "--model", "tiny-llama", "--device", "cuda", "--max-new-tokens", "24", "--json", *more]
        assert generate.main(asked) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    plain, drafted = run("--draft", "none"), run("--draft", "exit", "--compare")
    assert plain["tokens"] == drafted["tokens"] and drafted["drafted"] > 0
    seeded = [run("--seed", "5", "--temperature", "0.8", "--draft", kind)["tokens"] for kind in ("none", "lookup")]
    assert seeded[0] == seeded[1]


def test_a_training_step_runs_on_the_gpu_and_is_the_cpus(tmp_path: Path) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        model = model_of(dtype=torch.float32).to(device).train().requires_grad_()
        tokens = torch.tensor([ids(33), ids(33, 1)], device=device)
        kept = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
        total, _ = recipe_loss(model, tokens, kept, [0.2, 0.1, 0.1, 0.6], 0.5)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append((total.item(), norm.item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
