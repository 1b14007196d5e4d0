"""Compiled step: the bits of a row do not depend on other rows, and its numbers are those of the
readable blocks.
"""

import copy
import errno
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model import Decoder, LayerPlan
from model.fast import accelerate
from tests import laws
from tests.calls import ended
from tests.configs import LLAMA3_ROPE, small
from tests.laws import plans

numba = pytest.importorskip(
    "numba", reason="the compiled step needs numba: pip install -r requirements.txt"
)

from numba.np.ufunc import parallel  # noqa: E402

from model.fast.cpu import dot, elements, kernels  # noqa: E402
from model.fast.cpu.decoder import FastDecoder  # noqa: E402
from model.fast.cpu.rounding import pack  # noqa: E402
from model.fast.cpu.step import step as compiled_step  # noqa: E402
from model.quantise import quantise, round_inputs  # noqa: E402

VOCAB = 37
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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


def random_model(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Decoder:
    """A readable model of three layers."""
    settings = {"vocab_size": VOCAB, "max_position_embeddings": 512, **CONFIGS[name], **changes}
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
    ("dtype", "bits"), [*((dtype, None) for dtype in DTYPES), *product(DTYPES[1:2], dot.LOW_BITS)]
)
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_the_bits_of_a_row_do_not_depend_on_the_others(
    name: str, dtype: torch.dtype, bits: int | None
) -> None:
    """Logits and cache entries, alone and in steps of 2 to 17, 64 and 65 rows, across windows; in
    low bits too, beside a skipped sublayer.
    """
    model, text = accelerate(random_model(name, dtype)), tokens_for(30 + COUNTS[-1])
    plan = bits and LayerPlan.skipping(3, [1], []).in_bits(bits, bits)
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
    assert not parallel._is_initialized, "steps have threads of their own, without Numba's beside"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
@torch.inference_mode()
def test_the_bits_of_a_row_do_not_depend_on_calls_that_share_its_step(name: str) -> None:
    """Calls of texts with separate caches, of any capacity and length, in more rows than a step
    takes.
    """
    model = accelerate(random_model(name))
    calls, expected, alone = [], [], []
    for number in range(40):
        start, count = 1 + 3 * number % 17, 1 + number % 4
        text = tokens_for(start + count)
        caches = [model.new_cache(start + count + number % 5) for _ in range(2)]
        for cache in caches:
            model.prefill(text[:, :start], cache)
        calls.append((text[:, start:], caches[0], start))
        expected.append(model(text[:, start:], caches[1], start))
        alone.append(entries(caches[1]))
    found = model.together(calls)
    assert sum(call[0].numel() for call in calls) > 64 and all_equal(found, expected)
    assert all(all_equal(entries(call[1]), each) for call, each in zip(calls, alone, strict=True))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(list(CONFIGS)),
    plan=plans(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    prompt=st.integers(0, 30),
)
@torch.inference_mode()
def test_float32_logits_are_the_readable_blocks(
    name: str, plan: LayerPlan, lengths: list[int], prompt: int
) -> None:
    """Under any plan, including low bits with rounded inputs, after any prompt."""
    readable = random_model(name, torch.float32)
    models = readable, accelerate(copy.deepcopy(readable))
    caches = [model.new_cache(80) for model in models]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_narrow_logits_are_no_farther_from_float32_than_the_readable_blocks(
    name: str, dtype: torch.dtype
) -> None:
    narrow, text = random_model(name, dtype), tokens_for(60)
    exact, readable = copy.deepcopy(narrow).float()(text), narrow(text).float()
    found = accelerate(narrow)(text, narrow.new_cache(60), 0)
    assert (found - exact).abs().mean() < (readable - exact).abs().mean()


@torch.inference_mode()
def test_a_prompt_is_read_by_torch_and_long_calls_are_cut_into_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, text = accelerate(random_model("llama")), tokens_for(200)
    cache, step = model.new_cache(200), Mock(wraps=compiled_step)
    monkeypatch.setattr("model.fast.cpu.decoder.step", step)
    model.prefill(text[:, :100], cache)
    assert not step.called and cache.length == 100
    model(text[:, 100:], cache, 100)
    assert [len(call.args[1].tokens) for call in step.call_args_list] == [64, 36]
    assert cache.length == 200


@pytest.mark.parametrize("split", [1, 7, 40, 99])
@torch.inference_mode()
def test_the_chunks_of_a_prompt_end_at_multiples_of_their_size_however_it_is_split(
    split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.decoder.PREFILL_CHUNK", 40)
    model, text = random_model("llama"), tokens_for(100)
    model.hidden, cache = Mock(wraps=model.hidden), model.new_cache(100)
    model.prefill(text[:, :split], cache)
    model.prefill(text[:, split:], cache, split)
    calls = [call.args for call in model.hidden.call_args_list]
    ends = {start + tokens.shape[1] for tokens, _, start in calls}
    assert {40, 80, 100} <= ends <= {40, 80, 100, split} and cache.length == 100


@torch.inference_mode()
def test_the_weights_are_not_copied() -> None:
    """Training and saving use the same tensors."""
    readable = random_model("gemma2")
    before = [parameter.data_ptr() for parameter in readable.parameters()]
    fast = accelerate(readable)
    fast(tokens_for(3), fast.new_cache(8), 0)
    assert [parameter.data_ptr() for parameter in fast.model.parameters()] == before
    assert not fast.low_bits


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
@torch.inference_mode()
def test_non_finite_numbers_reach_the_logits_and_no_other_row(name: str, broken: float) -> None:
    for dtype in DTYPES:
        readable = random_model(name, dtype, tie_word_embeddings=False)
        readable.embed_tokens.weight[5] = broken
        model, text = accelerate(readable), torch.tensor([[1, 2, 5, 3]])
        for plan in (None, LayerPlan.full(3).in_bits(4), LayerPlan.full(3).in_bits(8)):
            cache = model.new_cache(8)
            logits = model(text, cache, 0, plan)
            assert logits[0, :2].isfinite().all() and not logits[0, 2:].isfinite().any()
            cache.truncate(2)
            alone = one_by_one(model, torch.tensor([[1, 2, 1]]), 0, model.new_cache(8), plan)
            assert torch.equal(model(text[:, :1], cache, 2, plan), alone[:, 2:])


def dots(kind: int, x_kind: int) -> Callable[..., np.ndarray]:
    """Function for dot products of a block of weights, given by address, with rows of inputs."""

    @numba.njit
    def multiply(w, stride, x, columns, count):
        out = np.zeros((len(x), count), np.float32)
        dot.dot(
            kind,
            x_kind,
            w,
            stride,
            x.ctypes.data,
            x.strides[0],
            len(x),
            columns,
            out.ctypes.data,
            out.strides[0],
            count,
        )
        return out * np.float32(1)  # keeps "out" until it is written

    return multiply


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


@pytest.fixture(params=[True, False], ids=["special instructions", "none"])
def special(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's special instructions, and without."""
    for name in ("HAS_VDPBF16PS", "HAS_VPDPBUSD"):
        monkeypatch.setattr(dot, name, getattr(dot, name) and request.param)


@pytest.mark.parametrize(
    ("kind", "x_kind", "dtype"),
    [
        (dot.BF16, dot.BF16, torch.bfloat16),
        (dot.F16, dot.F32, torch.float16),
        (dot.F32, dot.F32, torch.float32),
    ],
)
def test_every_form_of_a_dot_product_gives_the_same_bits_in_any_tile(
    special: None, kind: int, x_kind: int, dtype: torch.dtype
) -> None:
    multiply = dots(kind, x_kind)
    for columns in (5, 64, 200):
        x, rows = random_matrix(17, columns), random_matrix(dot.BLOCK_ROWS, columns).to(dtype)
        x = x.bfloat16() if x_kind == dot.BF16 else x
        inputs = x.view(torch.int16).numpy() if x_kind == dot.BF16 else x.numpy()
        block = rows.data_ptr(), rows.stride(0) * rows.itemsize
        found = multiply(*block, inputs, columns, len(rows))
        np.testing.assert_allclose(found, x.double() @ rows.double().T, atol=1e-4)
        for row, count in product(range(17), range(1, len(rows) + 1)):
            some = multiply(*block, inputs[row : row + 1 + row % 3], columns, count)
            assert np.array_equal(some, found[row : row + 1 + row % 3, :count])


@numba.njit
def rounded_inputs(x: np.ndarray) -> np.ndarray:
    found = np.zeros((len(x), 4 * x.shape[1] + 128), np.uint8)
    for row in range(len(x)):
        elements.round_to_int8(x[row], found[row].ctypes.data)
    return found


@pytest.mark.parametrize(("bits", "kind"), dot.LOW_BITS.items())
def test_low_bits_are_multiplied_by_rounded_inputs(special: None, bits: int, kind: int) -> None:
    multiply = dots(kind, dot.INT8)
    for columns in (5, 64, 200):
        for count in (1, 13, 16):
            x, weight = random_matrix(7, columns), random_matrix(count, columns)
            rounded, width = quantise(weight, bits), -(-columns // 32) * 32
            _, operand = ended(pack(weight, bits, None))
            inputs = rounded_inputs(x.numpy())
            low = multiply(operand.data_ptr(), 0, inputs, width, count)
            exact = round_inputs(x).double() @ rounded.dequantised(torch.float32).double().T
            np.testing.assert_allclose(low, exact, atol=0.02 * exact.abs().max().item())
            alone = [multiply(operand.data_ptr(), 0, each[None], width, count) for each in inputs]
            assert np.array_equal(np.concatenate(alone), low)


@np.errstate(invalid="ignore")
def of_each(function: Callable[[float], float], x: np.ndarray) -> np.ndarray:
    """A compiled function of each number."""
    return numba.vectorize(lambda number: function(number))(x)


def converted(convert: Callable[..., None], kind: int, row: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with the numbers of ``row``, by an instruction of ``dot``."""

    @numba.njit
    def run(row, out):
        convert(kind, row.ctypes.data, len(row), out.ctypes.data)
        return row[0] + out[0]  # keeps both until they are read

    run(row, out)


@pytest.mark.parametrize(("kind", "dtype"), [(dot.BF16, torch.bfloat16), (dot.F16, torch.float16)])
def test_narrow_numbers_are_rounded_as_torch_rounds_them(kind: int, dtype: torch.dtype) -> None:
    """For every exponent, ties, subnormal numbers, infinity and NaN."""
    x = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    x[:100_000] &= np.uint32(0xFFFFF000)  # ties of float16
    x[:50_000] &= np.uint32(0xFFFF8000)  # and of bfloat16
    extremes = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65519, 65520, 6e-8, 2.9e-8])
    x = np.concatenate([x.view(np.float32), extremes])
    found = torch.empty(len(x), dtype=dtype)
    converted(dot.narrow_row, kind, x, found.view(torch.int16).numpy())
    right = torch.from_numpy(x).to(dtype)
    is_nan = right.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan].view(torch.int16), right[~is_nan].view(torch.int16))


def test_float16_numbers_are_widened_exactly() -> None:
    halves, wide = np.arange(2**16, dtype=np.uint16), np.empty(2**16, np.float32)
    converted(dot.widen_row, dot.F16, halves, wide)
    assert np.array_equal(wide, halves.view(np.float16).astype(np.float32), equal_nan=True)


def test_exponential_and_tangent_have_the_precision_of_float32() -> None:
    x = np.float32([*np.linspace(-86, 86, 100_001), 0, np.nan, 200, -200, np.inf, -np.inf])
    power, tangent = of_each(elements.exponential, x), of_each(elements.hyperbolic_tangent, x)
    assert power.dtype == tangent.dtype == np.float32
    np.testing.assert_allclose(power[:-5], np.exp(x[:-5].astype(np.float64)), rtol=2e-7)
    np.testing.assert_allclose(tangent, np.tanh(x.astype(np.float64)), atol=3e-7)
    assert np.isnan(power[-5]) and power[-4] == power[-2] < np.inf and 0 < power[-3] == power[-1]


def test_kernels_are_kept_by_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited dot product or constant is compiled again, though no file of a step is changed."""
    sources = [Path(shutil.copy(source, tmp_path)) for source in kernels.SOURCES]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    folder = kernels.kernel_folder(sources)
    assert folder.is_dir() and folder.parent == tmp_path / "kept"
    assert kernels.kernel_folder(sources) == folder
    for edited in ("dot.py", "quantise.py"):
        before = kernels.kernel_folder(sources)
        (tmp_path / edited).write_text("# edited")
        assert kernels.kernel_folder(sources) != before


def declared(number: int) -> Callable[[int], int]:
    """A function whose compiled code is kept."""

    @numba.njit(cache=True)
    def plus(x: int) -> int:
        return x + number

    return plus


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [b"", b"half", b"\0" * 99], ids=["empty", "half", "zeros"])
def test_damaged_kept_code_is_compiled_again(
    suffix: str, damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert declared(1)(1) == 2
    (file,) = tmp_path.glob(f"*.{suffix}")
    file.write_bytes(file.read_bytes()[:99] if damage == b"half" else damage)
    assert declared(1)(1) == 2
    again = declared(1)
    assert again(1) == 2 and again.stats.cache_hits, "it is whole again"


def test_a_full_disk_and_a_folder_that_cannot_be_used_cost_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left in the temporary folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "file").touch()
    with monkeypatch.context() as environment:  # which Numba reads again when it changes
        environment.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
        unusable = kernels.kernel_folder()
    for folder in (unusable, tmp_path):
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
        assert declared(2)(1) == 3
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(os, "replace", Mock(side_effect=full))
    assert {path.name for path in tmp_path.rglob("*")} == {"temporary", "file"}


def test_where_numba_is_missing_or_cannot_run_the_readable_blocks_run_and_a_line_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, said = random_model("llama"), []
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    wrong = Mock(side_effect=ValueError("Number of threads specified\nmust be > 0."))
    monkeypatch.setattr(sys, "meta_path", [Mock(find_spec=wrong), *sys.meta_path])
    for module in ({"numba": numba}, {"numba": None}, {}):
        monkeypatch.delitem(sys.modules, "numba", raising=False)
        sys.modules.update(module)
        assert accelerate(model) is model
        said += capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "NUMBA_DISABLE_JIT" in said[0] and "must be > 0" in said[2]
    assert "without numba: import of numba" in said[1]
    assert model.why_rows_vary and "\n" not in model.why_rows_vary


def test_a_processor_that_cannot_convert_float16_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.fast.cpu.decoder.CONVERTS_FLOAT16", False)
    assert accelerate(random_model("llama", torch.float16)).kind == dot.F32


def test_in_float64_the_readable_blocks_run() -> None:
    model = random_model("llama", torch.float64)
    assert accelerate(model) is model and isinstance(accelerate(model.float()), FastDecoder)


def few_logits() -> list[float]:
    model = accelerate(random_model("llama"))
    with torch.inference_mode():
        return model(tokens_for(9), model.new_cache(16), 0).flatten().tolist()


def test_a_step_reads_no_memory_that_it_has_freed() -> None:
    """glibc overwrites freed memory in a process with MALLOC_PERTURB_."""
    code = "from tests.model.test_step import few_logits; print(few_logits())"
    overwriting = os.environ | {"MALLOC_PERTURB_": "165"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=overwriting, capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"{few_logits()}\n"
