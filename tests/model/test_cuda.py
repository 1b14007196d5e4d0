"""Tests on a real GPU: commands of the documents, steps, texts, memory, training. Skipped where
there is none.
"""

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import FixedLength
from decoding.randomness import KeyedRandomness, Place
from decoding.rounds import Round
from decoding.sampling import SamplingParams, distribution
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Rule
from model import LAUNCHERS, Decoder, LayerPlan, build, parse_config
from model.fast import accelerate
from model.fast.gpu import ROWS
from tests.configs import small
from tests.peak import held_bytes, peak_bytes
from training.recipe import recipe_loss
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
DRAFTERS: dict[str, Callable[[Decoder, Any], Drafter]] = {
    "none": lambda model, cache: NoDraft(VOCAB, model.device),
    "lookup": lambda model, cache: PromptLookup(VOCAB, model.device),
    **{name: partial(ModelDrafter, plan=plan) for name, plan in PLANS.items() if name != "full"},
}


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """Each test compiles its own shapes."""
    yield
    torch._dynamo.reset()


def model_of(
    family: str = "llama",
    size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device = CUDA,
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
    model.initialise(std=0.05, generator=torch.Generator().manual_seed(seed))
    return model.to(device, dtype).requires_grad_(False).eval()


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rounds_by(
    model: Decoder, drafter: str, params: SamplingParams, prompt: int = 40, coupling: str = "race"
) -> tuple[Text, Iterator[Round]]:
    """A text of 60 tokens after a prompt, and the rounds that write it."""
    start, cache, rule = ids(prompt), model.new_cache(prompt + 60), Coupling(coupling, 7)
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


def run(capsys: pytest.CaptureFixture[str], *asked: str) -> dict[str, Any]:
    """Output of a command of the documents."""
    assert generate.main([*asked, "--device", "cuda", "--max-new-tokens", "24", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


SEEDED = ("--seed", "5", "--temperature", "0.8")
SKY = "Why is the sky blue?"
COMMANDS = [
    ("Once upon a time there was a fox. " * 33, "tiny-llama", ("--draft", "auto", *SEEDED)),
    *((SKY, model, ()) for model in ("smollm2-135m-instruct", "tiny-llama", "tiny-gemma2")),
    *(
        (SKY, "tiny-llama", ("--draft", draft, *more))
        for draft in ("lookup", "exit", "lowbit")
        for more in ((), SEEDED)
    ),
]


@pytest.mark.parametrize(
    ("prompt", "model", "options"), COMMANDS, ids=lambda value: str(value)[:40]
)
def test_commands_of_the_documents_write_plain_decodings_text(
    prompt: str,
    model: str,
    options: tuple[str, ...],
    smollm2: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without --draft costs are measured, in inference mode, on the static caches that texts then
    use.
    """
    asked = (prompt, "--model", model, *options)
    assert run(capsys, *asked)["tokens"] == run(capsys, *asked, "--draft", "none")["tokens"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("family", "size"), SHAPES)
@torch.inference_mode()
def test_captured_steps_give_the_readable_logits_in_every_plan_and_count(
    family: str, size: int, plan: str
) -> None:
    static = accelerate(model_of(family, size))
    text = torch.tensor([ids(1500)], device="cuda")
    lanes = [(model, model.new_cache(1500)) for model in (static.model, static)]
    for start, count in product((3, 500, 1400), (1, 2, 5, ROWS, ROWS + 1)):
        for model, cache in lanes:
            cache.truncate(0)
            model.prefill(text[:, :start], cache)
        tokens = text[:, start : start + count]
        expected, found = (
            model(tokens, cache, start, PLANS[plan]).float() for model, cache in lanes
        )
        assert (found - expected).abs().max() <= 0.03 * expected.abs().max()
    assert static.trouble is None and static.why_rows_vary is None
    replays = [step.replay for steps in static.steps.values() for step in steps.values()]
    assert all(replays)


@pytest.mark.parametrize(("family", "size"), SHAPES)
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_other_rows(family: str, size: int) -> None:
    static, text = accelerate(model_of(family, size)), torch.tensor([ids(540)], device="cuda")
    logits = []
    for count in (1, 5, ROWS):
        cache = static.new_cache(560)
        static.prefill(text[:, :500], cache)
        steps = [static(text[:, at : at + count], cache, at) for at in range(500, 532, count)]
        logits.append(torch.cat(steps, 1)[:, :32])
    assert all(torch.equal(logits[0], other) for other in logits[1:])


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
@pytest.mark.parametrize(("family", "size"), SHAPES)
def test_greedy_and_raced_texts_are_plain_decodings(family: str, size: int, drafter: str) -> None:
    static = accelerate(model_of(family, size))
    for params in (SamplingParams(), SamplingParams(0.8, top_p=0.95)):
        assert text_by(static, drafter, params) == text_by(static, "none", params)
    assert static.trouble is None and static.why_rows_vary is None


def recorded(model: Any) -> bool:
    """Whether steps and sampling are graphs, all of them."""
    graphs = LAUNCHERS[model.device].graphs.values()
    return model.trouble is None and bool(graphs) and all(graphs)


@pytest.mark.parametrize("coupling", ["race", "ratio"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_draft_writes_by_both_rules_with_recorded_sampling(
    drafter: str, coupling: str
) -> None:
    static = accelerate(model_of())
    for params in (
        SamplingParams(),
        SamplingParams(0.8),
        SamplingParams(0.8, top_p=0.9),
        SamplingParams(0.8, min_p=0.05),
        SamplingParams(0.8, top_k=50, repetition_penalty=1.2),
    ):
        assert len(text_by(static, drafter, params, coupling=coupling)) == 60
    assert recorded(static)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_of_another_size_serves_after_the_first_was_dropped(family: str) -> None:
    """Graphs of the dropped one have died; the text with a draft is plain decoding's."""
    static = accelerate(model_of(family))
    for prompt in (40, 700, 40, 1500):
        plain, drafted = (
            text_by(static, drafter, SamplingParams(), prompt=prompt)
            for drafter in ("none", "exit")
        )
        assert plain == drafted
        gc.collect()
    assert recorded(static)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs: run it there")
def test_a_model_on_the_second_gpu_has_its_graphs_there() -> None:
    static = accelerate(model_of(device=torch.device("cuda", 1)))
    for params in (SamplingParams(), SamplingParams(0.8, top_p=0.95)):
        assert text_by(static, "exit", params) == text_by(static, "none", params)
    assert recorded(static) and torch.cuda.current_device() == 0


@torch.inference_mode()
def test_a_distribution_has_the_same_bits_alone_and_among_others() -> None:
    accelerate(model_of())
    logits = torch.randn(5, VOCAB, device=CUDA, dtype=torch.bfloat16)
    context = torch.tensor(ids(9), device=CUDA)
    for params in (SamplingParams(0.8), SamplingParams(0.8, top_p=0.9, min_p=0.01)):
        alone = [distribution(row[None], context, params) for row in logits]
        assert torch.equal(distribution(logits, context, params), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_greedy_texts_in_other_dtypes_are_plain_decodings(family: str, dtype: torch.dtype) -> None:
    static = accelerate(model_of(family, dtype=dtype))
    assert text_by(static, "exit", SamplingParams()) == text_by(static, "none", SamplingParams())
    assert static.trouble is None


@torch.inference_mode()
def test_racing_all_rows_at_once_draws_the_cpus_tokens() -> None:
    probs = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    probs[probs < 1e-3] = 0
    both = probs.cuda(), probs
    there, here = (KeyedRandomness(3).draw_each(each, Place(40, 1)) for each in both)
    assert there.tolist() == here.tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_round_waits_for_the_device_once(drafter: str) -> None:
    """To read the verdict; and torch counts the copy of a text's new tokens."""
    static, params = accelerate(model_of()), SamplingParams(0.8, top_k=50, top_p=0.9)
    text_by(static, drafter, params)  # compiles and captures
    waits, (_, rounds) = [], rounds_by(static, drafter, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *told, **more: waits.append(str(told[0])))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            count = sum(1 for _ in rounds)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert count and len(waits) <= count * (2 if drafter == "lookup" else 1) + 1


@torch.inference_mode()
def test_two_models_and_their_caches_do_not_disturb_each_other() -> None:
    models = [accelerate(model_of(seed=seed)) for seed in (0, 1)]
    lanes = [(model, model.new_cache(64)) for model in models for _ in range(2)]
    tokens = torch.tensor(ids(20), device="cuda").view(20, 1, 1)
    together = [
        [model(token, cache, at) for model, cache in lanes] for at, token in enumerate(tokens)
    ]
    for (model, _), found in zip(lanes, zip(*together, strict=True), strict=True):
        cache = model.new_cache(64)
        alone = [model(token, cache, at) for at, token in enumerate(tokens)]
        assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_memory_stays_within_the_estimate_captures_included(family: str) -> None:
    model = accelerate(model_of(family, 128))
    needed = estimate(
        model.config, model.dtype, 600, prompt=540, longest_draft=8, fast_on=model.device
    )
    assert held_bytes(model) <= needed.weights * 1.01 + (1 << 20)
    params = SamplingParams(0.8, top_k=50, top_p=0.9)
    took = peak_bytes(lambda: text_by(model, "exit", params, prompt=540), model.device)
    assert took <= needed.cache + needed.workspace


def test_a_training_step_runs_on_the_gpu_and_is_the_cpus() -> None:
    losses = []
    kept = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    for device in ("cpu", "cuda"):
        model = model_of(dtype=torch.float32).to(device).train().requires_grad_()
        tokens = torch.tensor([ids(33), ids(33, 1)], device=device)
        total = recipe_loss(model, tokens, kept, [0.2, 0.1, 0.1, 0.6], 0.5)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append((total.item(), norm.item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
