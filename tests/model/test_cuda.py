"""Tests on a real GPU: texts, steps, memory. Skipped where there is none.

One case of each kind runs by default, and the others under ``-m prove``.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from app.session import load
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import FixedLength
from decoding.rounds import Round
from decoding.rows import NOT_COMPILED
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import RULES, Rule
from model.config import parse_config
from model.decoder import Decoder
from model.families import build
from model.fast import accelerate
from model.fast.gpu import ROWS
from model.plan import LayerPlan
from tests.configs import small
from tests.peak import held_bytes, peak_bytes
from weights.memory import estimate

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: run it on a machine with an NVIDIA GPU",
)

VOCAB, LAYERS = 512, 4
CUDA = torch.device("cuda", 0)
SHAPES = [
    *(("llama", 64), ("llama", 128), ("gemma2", 64), ("gemma2", 128)),
    *(("mistral", 64), ("qwen2", 64), ("qwen3", 128), ("gemma3_text", 128)),
]
PLANS = {
    "full": LayerPlan.full(LAYERS),
    "skip": LayerPlan.skipping(LAYERS, [1], [2]),
    "exit": LayerPlan.early_exit(LAYERS, 2),
    "4 bits": LayerPlan.full(LAYERS).in_bits(4),
    "8 bits": LayerPlan.full(LAYERS).in_bits(8),
}


def each(*cases: Any) -> list[Any]:
    """Cases of a test, of which the first one runs by default."""
    return [
        pytest.param(*case, marks=[pytest.mark.prove] * (at > 0)) for at, case in enumerate(cases)
    ]


DRAFTERS: dict[str, Callable[[Decoder, Any], Drafter]] = {
    "none": lambda model, cache: NoDraft(),
    "lookup": lambda model, cache: PromptLookup(),
    **{name: partial(ModelDrafter, plan=plan) for name, plan in PLANS.items() if name != "full"},
}


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """Each test compiles its own shapes."""
    yield
    torch._dynamo.reset()
    torch.cuda.set_sync_debug_mode("default")


def model_of(
    family: str = "llama",
    size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Decoder:
    """Random model on the GPU, with shapes that its kernels take."""
    config = small(
        family,
        hidden=512,
        layers=LAYERS,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=size,
        intermediate_size=1024,
        sliding_window=300,
        query_pre_attn_scalar=size,
    )
    model = build(parse_config(config))
    model.initialise(std=0.05, generator=torch.Generator().manual_seed(0))
    return model.to(CUDA, dtype).requires_grad_(False).eval()


def ids(count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def rounds_by(
    model: Decoder, drafter: str, params: SamplingParams, prompt: int = 40, coupling: str = "race"
) -> tuple[Text, Iterator[Round]]:
    """A text of 60 tokens after a prompt, and the rounds that write it."""
    start, cache, rule = ids(prompt), model.new_cache(prompt + 60), Rule(coupling, 7)
    with torch.inference_mode():
        model.prefill(torch.tensor([start[:-1]], device=model.device), cache)
    text, policy = Text(start, Rules(60), model), FixedLength(4 if drafter != "none" else 0)
    drawn = rule.randomness(model.device), rule.verify
    return text, speculate(
        model, cache, text, DRAFTERS[drafter](model, cache), policy, params, *drawn
    )


def text_by(*given: Any, **named: Any) -> list[int]:
    """The tokens of ``rounds_by``."""
    text, rounds = rounds_by(*given, **named)
    assert list(rounds)
    return text.generated


def recorded(model: Any) -> bool:
    """Whether all steps are graphs, and all sampling is compiled."""
    replays = [step.replay for steps in model.steps.values() for step in steps.values()]
    return model.trouble is None and not NOT_COMPILED and all(replays)


@pytest.mark.parametrize(
    ("draft", "name"),
    each(*product(["auto", "lookup", "exit", "lowbit"], ["smollm2-135m-instruct", "tiny-gemma2"])),
)
def test_a_session_writes_plain_decodings_text(name: str, draft: str, smollm2: Path) -> None:
    session = load(name, device="cuda", max_new_tokens=24, seed=5)
    for prompt, temperature in product(["Why is the sky blue?", "I saw a fox. " * 30], [0, 0.8]):
        plain = session.write(prompt, draft="none", temperature=temperature)
        drafted = session.write(prompt, draft=draft, temperature=temperature)
        assert drafted.tokens == plain.tokens and drafted.trouble is None


@pytest.mark.parametrize(("family", "size"), each(*SHAPES))
@torch.inference_mode()
def test_captured_steps_give_the_readable_logits_and_a_row_its_bits_beside_any_others(
    family: str, size: int
) -> None:
    """In every plan, at any position."""
    static = accelerate(model_of(family, size))
    text = torch.tensor([ids(1500)], device="cuda")
    caches = [each.new_cache(1500) for each in (static.model, static, static)]
    for start, plan in product((3, 500, 1400), PLANS.values()):
        for cache in caches:
            cache.truncate(0)
            static.prefill(text[:, :start], cache)
        parts = text[:, start : start + ROWS + 1].split(5, 1)
        expected = static.model(torch.cat(parts, 1), caches[0], start, plan)
        found = static(torch.cat(parts, 1), caches[1], start, plan)
        again = [static(part, caches[2], start + 5 * at, plan) for at, part in enumerate(parts)]
        assert torch.equal(found, torch.cat(again, 1))
        assert (found - expected).float().abs().max() <= 0.03 * expected.float().abs().max()
    assert recorded(static) and static.abilities.why_rows_vary is None


@pytest.mark.parametrize(
    ("family", "size", "dtype"),
    each(
        *((*shape, torch.bfloat16) for shape in SHAPES),
        *((*shape, dtype) for shape in SHAPES[2:5] for dtype in (torch.float16, torch.float32)),
    ),
)
def test_greedy_and_raced_texts_are_plain_decodings(
    family: str, size: int, dtype: torch.dtype
) -> None:
    """With every draft, and with a cache of another size after the first was dropped, whose graphs
    have died.
    """
    static = accelerate(model_of(family, size, dtype))
    for prompt, params in (40, SamplingParams()), (700, SamplingParams(0.8, top_p=0.95)):
        plain, *drafted = (text_by(static, drafter, params, prompt) for drafter in DRAFTERS)
        assert drafted == [plain] * len(drafted)
        gc.collect()
    assert recorded(static)


@pytest.mark.parametrize(
    ("drafter", "coupling"), each(("4 bits", "race"), *product(DRAFTERS, RULES))
)
def test_a_round_waits_for_the_device_once_under_every_rule(drafter: str, coupling: str) -> None:
    """To read the verdict; and torch counts the copy of a text's new tokens."""
    static, params = accelerate(model_of()), SamplingParams(0.8, top_k=50, top_p=0.9)
    text_by(static, drafter, params, coupling=coupling)  # compiles and captures
    _, rounds = rounds_by(static, drafter, params, coupling=coupling)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        count = len(list(rounds))
    assert count and len(told) <= count * (2 if drafter == "lookup" else 1) + 1
    assert recorded(static)


@pytest.mark.parametrize("family", each(("llama",), ("gemma2",), ("gemma3_text",)))
def test_memory_stays_within_the_estimate_captures_included(family: str) -> None:
    model = accelerate(model_of(family, 128))
    needed = estimate(
        model.config, model.dtype, 600, prompt=540, longest_draft=8, fast_on=model.device
    )
    assert held_bytes(model) <= needed.weights * 1.01 + (1 << 20)
    params = SamplingParams(0.8, top_k=50, top_p=0.9)
    took = peak_bytes(lambda: text_by(model, "exit", params, prompt=540), model.device)
    assert took <= needed.cache + needed.workspace + needed.buffers  # those of libraries
