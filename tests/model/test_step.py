"""Compiled step: the bits of a row do not depend on other rows, and its numbers are those of the
readable blocks.
"""

import copy
import ctypes
import math
import platform
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.config import FAMILIES
from model.decoder import Decoder
from model.fast import accelerate, cpu, library
from model.plan import LOW_BITS, LayerPlan
from tests import laws
from tests.calls import recorded
from tests.configs import LLAMA3_ROPE, small
from tests.laws import plans
from tests.refusal import refusal

VOCAB = 37
DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (*range(1, 18), 64, 65)

GEMMA = {
    "family": "gemma2",
    "hidden": 72,
    "head_dim": 24,
    "sliding_window": 9,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden": 72, "head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 2},
    "single heads, linear rope": {
        "hidden": 64,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "biased, untied, llama3 rope": {
        "hidden": 40,
        "head_dim": 64,
        "intermediate_size": 33,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 64},
    },
    "gemma2": GEMMA,
    "mistral": {"family": "mistral", "hidden": 72, "head_dim": 24, "sliding_window": 9},
    "ministral": {"family": "ministral", "hidden": 40, "head_dim": 20, "sliding_window": 9},
    "qwen2": {
        "family": "qwen2",
        "hidden": 72,
        "head_dim": 20,
        "sliding_window": 9,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "qwen3": {"family": "qwen3", "hidden": 40, "head_dim": 64, "attention_bias": True},
    "gemma3": {**GEMMA, "family": "gemma3_text", "attention_bias": True},
    "gemma2 without caps": {
        **GEMMA,
        "hidden": 32,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}
assert {each.get("family", "llama") for each in CONFIGS.values()} == {*FAMILIES}


def random_model(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Decoder:
    """A readable model of three layers."""
    settings = {"vocab_size": VOCAB, "max_position_embeddings": 1024, **CONFIGS[name], **changes}
    return laws.random_model(small(settings.pop("family", "llama"), **settings), dtype)


def tokens_for(count: int, batch: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, count), generator=torch.Generator().manual_seed(count))


def one_by_one(
    model: Decoder, tokens: Tensor, start: int, cache: Any, plan: LayerPlan | None = None
) -> Tensor:
    """Logits of calls of one token each."""
    return torch.cat(
        [model(tokens[:, at : at + 1], cache, start + at, plan) for at in range(tokens.shape[1])], 1
    )


def entries(cache: Any) -> list[Tensor]:
    return [tensor[:, :, : cache.length].clone() for tensor in (*cache.keys, *cache.values)]


def all_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "bits"), [*((dtype, None) for dtype in DTYPES), *product(DTYPES[1:], LOW_BITS)]
)
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_the_bits_of_a_row_do_not_depend_on_the_others(
    name: str, dtype: torch.dtype, bits: int | None
) -> None:
    """Logits and cache entries, alone and in steps of 2 to 17, 64 and 65 rows, across windows; in
    low bits too, beside a skipped sublayer, and across the window of a plan.
    """
    model, text = accelerate(random_model(name, dtype)), tokens_for(30 + COUNTS[-1])
    plan = bits and replace(LayerPlan.skipping(3, [1], []).in_bits(bits, bits), window=32)
    caches = model.new_cache(128), model.new_cache(128)
    for cache in caches:
        model.prefill(text[:, :30], cache)
    alone, expected = one_by_one(model, text[:, 30:], 30, caches[0], plan), entries(caches[0])
    for count in COUNTS:
        caches[1].truncate(30)
        found = model(text[:, 30 : 30 + count], caches[1], 30, plan)
        assert torch.equal(found, alone[:, :count])
        assert all_equal(entries(caches[1]), [each[:, :, : 30 + count] for each in expected])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
@torch.inference_mode()
def test_the_bits_of_a_row_do_not_depend_on_threads_capacity_or_other_texts(name: str) -> None:
    model, texts = accelerate(random_model(name)), tokens_for(40, batch=70)
    before, found = torch.get_num_threads(), []
    for threads, capacity in ((1, 40), (2, 41), (before, 300)):
        torch.set_num_threads(threads)
        found.append(model(texts[3:4], model.new_cache(capacity), 0))
    cache = model.new_cache(40, batch=70)
    found.append(torch.cat([model(texts[:, :5], cache, 0), model(texts[:, 5:], cache, 5)], 1)[3:4])
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
@torch.inference_mode()
def test_the_bits_of_a_row_do_not_depend_on_calls_that_share_its_step(name: str) -> None:
    """Calls of texts with separate caches, of any capacity and length, in more rows than a step
    takes.
    """
    model = accelerate(random_model(name))
    calls, alone = [], []
    for number in range(40):
        start, count = 1 + 3 * number % 17, 1 + number % 4
        text = tokens_for(start + count)
        for each in (calls, alone):
            cache = model.new_cache(start + count + number % 5)
            model.prefill(text[:, :start], cache)
            each.append((text[:, start:], cache, start))
    expected = [model(*call) for call in alone]
    found = model.together(calls)
    assert sum(call[0].numel() for call in calls) > 64 and all_equal(found, expected)
    for call, other in zip(calls, alone, strict=True):
        assert all_equal(entries(call[1]), entries(other[1]))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(list(CONFIGS)),
    plan=plans(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    prompt=st.sampled_from([0, 1, 30, 510]),
)
@torch.inference_mode()
def test_float32_logits_are_the_readable_blocks(
    name: str, plan: LayerPlan, lengths: list[int], prompt: int
) -> None:
    """Under any plan, including low bits with rounded inputs, after prompts of any length, of which
    the longest makes some steps attend to two chunks.
    """
    readable = random_model(name, torch.float32)
    models = readable, accelerate(copy.deepcopy(readable))
    caches = [model.new_cache(prompt + 40) for model in models]
    text = tokens_for(prompt + sum(lengths))
    for model, cache in zip(models, caches, strict=True):
        model.prefill(text[:, :prompt], cache)
    # An input halfway between two codes may take either.
    tolerance = 0.1 if plan.has_low_bits else 1e-4
    for start, end in pairwise(accumulate(lengths, initial=prompt)):
        expected, found = (
            model(text[:, start:end], cache, start, plan)
            for model, cache in zip(models, caches, strict=True)
        )
        assert found.dtype == torch.float32 and caches[0].lengths == caches[1].lengths
        assert (found - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_narrow_logits_are_no_farther_from_float32_than_the_readable_blocks(name: str) -> None:
    narrow, text = random_model(name), tokens_for(60)
    exact, readable = copy.deepcopy(narrow).float()(text), narrow(text).float()
    found = accelerate(narrow)(text, narrow.new_cache(60), 0)
    assert (found - exact).abs().mean() < (readable - exact).abs().mean()


@torch.inference_mode()
def test_a_prompt_is_read_by_torch_and_in_float32_where_the_processor_does_not_multiply_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its attention is the step's."""
    found = []
    functions = recorded(monkeypatch, cpu, "call", lambda name, *_: name)
    for has_pairs, dtype in ((1, torch.bfloat16), (0, torch.float32)):
        monkeypatch.setattr(library.library(), "has_pairs", lambda has=has_pairs: has)
        model = accelerate(random_model("qwen2"))
        cache = model.new_cache(60)
        with monkeypatch.context() as patch:
            dtypes = recorded(patch, F, "linear", lambda x, *_: x.dtype)
            model.prefill(tokens_for(60), cache)
        assert {*dtypes} == {dtype} and {*functions} == {"attend"}
        found.append(torch.stack(entries(cache)).float())
    assert (found[0] - found[1]).abs().mean() < 0.01 * found[0].abs().mean()


@pytest.mark.parametrize("split", [1, 7, 40, 99])
@torch.inference_mode()
def test_the_chunks_of_a_prompt_end_at_multiples_of_their_size_however_it_is_split(
    split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.decoder.PREFILL_CHUNK", 40)
    model, text = random_model("llama"), tokens_for(100)
    ends = recorded(monkeypatch, model, "hidden", lambda x, _, start: start + x.shape[1])
    cache = model.new_cache(100)
    model.prefill(text[:, :split], cache)
    model.prefill(text[:, split:], cache, split)
    assert {40, 80, 100} <= {*ends} <= {40, 80, 100, split} and cache.length == 100


@pytest.mark.parametrize(
    ("ids", "batch", "other", "said"),
    [
        ([[1, VOCAB]], 1, {}, "a token id is no whole number in 0..36"),
        ([[-1]], 1, {}, "a token id is no whole number in 0..36"),
        ([[1.5]], 1, {}, "a token id is no whole number in 0..36"),
        ([[1], [2]], 1, {}, "a cache for 1 texts .* does not fit 2 texts"),
        ([[1]], 2, {}, "a cache for 2 texts .* does not fit 1 texts"),
        (
            [[1]],
            1,
            {"dtype": torch.float32},
            "in torch.float32 does not fit .* in torch.bfloat16: take one",
        ),
        ([[1]], 1, {"layers": 2}, "of 2 layers .* does not fit .* of 3 layers"),
        ([[1]], 1, {"layers": 4}, "of 4 layers .* does not fit .* of 3 layers"),
        ([[1]], 1, {"num_key_value_heads": 1}, "with 1 key heads .* does not fit .* 2 key heads"),
        ([[1]], 1, {"head_dim": 24}, "of size 24, .* does not fit .* of size 20,"),
        ([[1, 2, 3, 4, 5]], 1, {}, "position 4 is outside the cache's 4 positions"),
    ],
)
def test_calls_that_do_not_fit_are_refused_before_any_cache_is_claimed(
    ids: list[list[float]], batch: int, other: dict[str, Any], said: str
) -> None:
    model = accelerate(random_model("llama"))
    caches = model.new_cache(4), random_model("llama", **other).new_cache(4, batch)
    with pytest.raises((IndexError, ValueError), match=said):
        model.together([(tokens_for(2), caches[0], 0), (torch.tensor(ids), caches[1], 0)])
    assert [cache.length for cache in caches] == [0, 0]


@torch.inference_mode()
def test_tokens_may_be_of_few_bytes_or_none() -> None:
    model, text = accelerate(random_model("llama")), tokens_for(5)
    expected = model(text, model.new_cache(5), 0)
    with torch.device("meta"):  # whatever torch's defaults
        assert torch.equal(model(text.int(), model.new_cache(5), 0), expected)
    assert model(text[:, :0], model.new_cache(5), 0).shape == (1, 0, VOCAB)
    assert model.together([]) == []


@torch.inference_mode()
def test_a_step_reads_the_weights_where_training_changes_them() -> None:
    """And its copies read their own."""
    model = accelerate(random_model("gemma2"))
    first = model(tokens_for(3), model.new_cache(3), 0)
    twin = copy.deepcopy(model)
    for weight in [each for each in model.parameters() if each.ndim == 2]:
        before = model(tokens_for(3), model.new_cache(3), 0)
        weight[0] *= 2
        assert not torch.equal(model(tokens_for(3), model.new_cache(3), 0), before)
    assert torch.equal(twin(tokens_for(3), twin.new_cache(3), 0), first)
    twin.model.float()
    with pytest.raises(ValueError, match="accelerate it again"):
        twin(tokens_for(3), twin.new_cache(3), 0)


def test_gradients_pass_through_the_attention_of_a_prompt() -> None:
    model = accelerate(random_model("llama").requires_grad_())
    model(tokens_for(5)).float().logsumexp(-1).sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [None, *LOW_BITS])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
@torch.inference_mode()
def test_non_finite_numbers_reach_the_logits_and_no_other_row(
    name: str, bits: int | None, dtype: torch.dtype, broken: float
) -> None:
    readable = random_model(name, dtype, tie_word_embeddings=False)
    readable.embed_tokens.weight[5] = broken
    model, text = accelerate(readable), torch.tensor([[1, 2, 5, 3]])
    plan = bits and LayerPlan.full(3).in_bits(bits)
    cache = model.new_cache(8)
    logits = model(text, cache, 0, plan)
    assert logits[0, :2].isfinite().all() and not logits[0, 2:].isfinite().any()
    cache.truncate(2)
    alone = one_by_one(model, torch.tensor([[1, 2, 1]]), 0, model.new_cache(8), plan)
    assert torch.equal(model(text[:, :1], cache, 2, plan), alone[:, 2:])


@pytest.mark.parametrize("bits", LOW_BITS)
@torch.inference_mode()
def test_a_step_keeps_the_copies_that_it_reads_whatever_replaces_them(bits: int) -> None:
    """Importance that is measured later, other plans and other copies change nothing under it."""
    model, text = accelerate(random_model("llama")), tokens_for(20)
    plan = LayerPlan.full(3).in_bits(bits, bits)
    expected = model(text, model.new_cache(20), 0, plan)
    parts = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    model.importance.update((part, torch.rand(part.in_features)) for part in parts)
    model.prepare(LayerPlan.full(3).in_bits(bits))
    model.copies = {key: torch.zeros_like(each) for key, each in model.copies.items()}
    torch.full((1 << 22,), 255, dtype=torch.uint8)  # where freed memory is used again
    assert torch.equal(model(text, model.new_cache(20), 0, plan), expected)


def compiled_program(source: Path, folder: Path, *flags: str, by: str = "cc") -> Path:
    """A program of one C file, by the flags of the step."""
    made = folder / f"program{len(list(folder.iterdir()))}"
    kept = [flag for flag in library.FLAGS if flag != "-shared"]
    subprocess.run([by, *kept, *flags, str(source), "-o", str(made)], check=True)
    return made


def printed(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    ).stdout


BITS = Path(__file__).with_name("bits.c")
needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler named cc")
is_x86 = platform.machine() in ("x86_64", "AMD64")


def other_processors() -> Iterator[list[str]]:
    """Options of processors whose instructions this one has, without pairs of bfloat16 numbers. One
    has only a part of AVX-512.
    """
    has = Path("/proc/cpuinfo").read_text() if is_x86 and sys.platform == "linux" else ""
    for march, feature in (
        ("haswell", "avx2"),
        ("haswell -mavx512f", "avx512f"),
        ("alderlake", "avx_vnni"),
        ("skylake-avx512", "avx512bw"),
        ("cascadelake", "avx512_vnni"),
    ):
        if feature in has.split():
            yield f"-march={march}".split()


@needs_cc
def test_all_processors_give_the_same_bits(tmp_path: Path) -> None:
    """But those that multiply pairs of bfloat16 numbers: each has its own."""
    found = {printed(compiled_program(BITS, tmp_path, *march)) for march in other_processors()}
    assert len(found) <= 1 and all(len(set(each.split())) > 800 for each in found)


@pytest.mark.prove
@pytest.mark.skipif(
    not (is_x86 and shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    reason="needs gcc-aarch64-linux-gnu and qemu-user",
)
@pytest.mark.parametrize("march", ["armv8-a", "armv8.2-a+dotprod"])
def test_arm_gives_the_same_bits(march: str, tmp_path: Path) -> None:
    arm = compiled_program(BITS, tmp_path, f"-march={march}", "-static", by="aarch64-linux-gnu-gcc")
    here = compiled_program(BITS, tmp_path, "-march=haswell")
    assert printed("qemu-aarch64", arm) == printed(here)


@needs_cc
@pytest.mark.prove
def test_a_step_reads_and_writes_no_memory_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    checks = "-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover"
    for march in other_processors():
        assert printed(compiled_program(BITS, tmp_path, *march, *checks))


NUMBERS = """
#include "%s"
#define APPLY(name, of_x)                                    \\
    void name(const float *x_in, float *out, long count) {   \\
        for (long i = 0; i < count; i++) {                   \\
            float x = x_in[i];                               \\
            out[i] = of_x;                                   \\
        }                                                    \\
    }
APPLY(narrowed, to_bf16(broadcast(x))[0])
APPLY(powers, exponential(x))
APPLY(tangents, hyperbolic_tangent(x))
"""


def applied(name: str, x: np.ndarray, folder: Path) -> np.ndarray:
    """A function of ``NUMBERS`` of each number."""
    source = folder / "numbers.c"
    source.write_text(NUMBERS % library.STEP.with_name("numbers.h"))
    made = compiled_program(source, folder, *library.machine_flags(), "-shared")
    out = np.empty_like(x)
    getattr(ctypes.CDLL(str(made)), name)(x.ctypes, out.ctypes, ctypes.c_long(len(x)))
    return out


@needs_cc
def test_narrow_numbers_are_rounded_as_torch_rounds_them(tmp_path: Path) -> None:
    """For every exponent, ties, subnormal numbers, infinity and NaN."""
    x = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    x[:50_000] &= np.uint32(0xFFFF8000)  # ties
    x = np.float32([*x.view(np.float32), 0, -0.0, np.inf, -np.inf, np.nan, 3.4e38])
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(applied("narrowed", x, tmp_path), expected)


@needs_cc
def test_exponential_and_tangent_have_the_precision_of_float32(tmp_path: Path) -> None:
    x = np.float32([*np.linspace(-86, 86, 100_001), 0, np.nan, 200, -200, np.inf, -np.inf])
    power = applied("powers", x, tmp_path)
    np.testing.assert_allclose(power[:-5], np.exp(x[:-5].astype(np.float64)), rtol=2e-7)
    tangent = applied("tangents", x, tmp_path)
    np.testing.assert_allclose(tangent, np.tanh(x.astype(np.float64)), atol=3e-7)
    assert np.isnan(power[-5]) and power[-4] == power[-2] < np.inf and 0 < power[-3] == power[-1]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing compiled."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "library", library.functools.cache(library.library.__wrapped__))
    return tmp_path / "cache" / "step"


def loaded() -> ctypes.CDLL:
    """The step as the next process loads it."""
    library.library.cache_clear()
    return library.library()


@needs_cc
def test_the_step_is_compiled_once_for_its_source_and_processor(
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And again where what is kept is damaged."""
    lines = []
    for march in ("native", "native", "native -O1"):
        monkeypatch.setenv("SPECDEC_MARCH", march)
        loaded()
        lines.append(len(caplog.messages))
    first, second = kept.iterdir()
    assert lines == [1, 1, 2]
    other = tmp_path / "step"  # a process loads each name once
    other.mkdir()
    for each in (first, second):
        (other / each.name).write_bytes(b"half")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    assert loaded().step and len(caplog.messages) == 3


@needs_cc
def test_a_folder_that_cannot_be_used_costs_only_time(kept: Path) -> None:
    kept.parent.touch()
    assert library.library().step and not kept.exists()


@needs_cc
def test_a_step_is_loaded_from_where_programs_may_run(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be the cache folder alone."""
    load = ctypes.CDLL

    def load_kept(name: str) -> ctypes.CDLL:
        if not name.startswith(str(kept)):
            raise OSError("failed to map segment")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", load_kept)
    assert library.library().step
    monkeypatch.setenv("SPECDEC_CACHE", __file__)
    assert re.search("set TMPDIR .*: failed to map segment", refusal(loaded))


@pytest.mark.parametrize(
    ("compiler", "said"),
    [(None, "pip install ziglang"), ([sys.executable], "cannot compile step.c: Unknown option")],
)
def test_where_no_compiler_works_the_readable_blocks_run_and_a_line_says_why(
    compiler: list[str] | None,
    said: str,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cpu, "library", library.library)
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    if compiler:
        monkeypatch.setattr(library, "compiler", lambda: compiler)
    for number, dtype in enumerate(DTYPES, 1):
        model = random_model("llama", dtype)
        assert accelerate(model) is model and model.abilities.why_rows_vary and not kept.exists()
        assert len(caplog.messages) == 2 * number and said in caplog.messages[-1]
        model.prefill(tokens_for(5), model.new_cache(5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_in_other_dtypes_the_readable_blocks_run(dtype: torch.dtype) -> None:
    model = random_model("llama", dtype)
    assert accelerate(model) is model and isinstance(accelerate(model.float()), cpu.FastDecoder)


def test_structures_and_functions_are_those_that_the_step_declares_and_no_others() -> None:
    assert [*dict(library.structure("Text")._fields_)] == ["entries", "rows", "start", "head_bytes"]
    with pytest.raises(AttributeError):
        library.structure("Text")(row=1)
    with pytest.raises(ctypes.ArgumentError):  # two in the wrong order
        library.library().attend(cpu.CText(), cpu.CAttention(), 0, 0, 0)


@pytest.mark.parametrize(
    "declaration",
    [
        *("long sizes[MANY]", "unsigned long size", "float (*function)(float)", "float *x[3]"),
        *("long const *x", "double x"),
    ],
)
def test_a_declaration_that_cannot_be_read_in_full_is_refused(declaration: str) -> None:
    with pytest.raises(ValueError):
        library.declared(declaration)


def test_only_the_weights_of_the_newest_plans_are_kept() -> None:
    model = accelerate(random_model("llama"))
    oldest = weakref.ref(model.weights(LayerPlan.full(3), 1))
    for window in range(cpu.PLANS):
        assert oldest()
        model.weights(replace(LayerPlan.full(3), window=window + 1), 1)
    assert oldest() is None
