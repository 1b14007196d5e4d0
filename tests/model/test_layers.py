"""Layers: attention against its formula, masks, rotary frequencies, norms, initial weights,
gradients.
"""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model import Decoder, build, parse_config
from model.config import Rope
from model.fast.cpu.flash import attend_by_flash
from model.layers import RMSNorm, attend_causally, inverse_frequencies, normalise, rotary_table
from tests.configs import FAMILIES, small
from tests.oracle import VOCAB, randomise

all_families = pytest.mark.parametrize("family", FAMILIES)


def random_model(family: str, **changes: object) -> Decoder:
    model = build(parse_config(small(family, vocab_size=VOCAB, **changes)))
    randomise(model, 0)
    return model


def attention_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Softmax of the masked scores of all queries and keys, times the values."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = scale * q @ k.mT
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    i, j = torch.arange(start, k.shape[2])[:, None], torch.arange(k.shape[2])
    hidden = (j > i) | (j <= i - (window or math.inf))
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    start=st.integers(0, 9),
    count=st.integers(1, 5),
    rows=st.integers(1, 5),
    window=st.none() | st.integers(1, 12),
    soft_cap=st.none() | st.floats(0.1, 50),
    scale=st.floats(0.05, 2),
    seed=st.integers(0, 2**31),
)
def test_attention_is_its_formula_for_any_start_and_number_of_tokens(
    batch, kv_heads, groups, start, count, rows, window, soft_cap, scale, seed
):
    """In chunks of any size, and by the CPU's kernel."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, heads, length, 4, dtype=torch.float64, generator=generator)
        for heads, length in (
            (kv_heads * groups, count),
            (kv_heads, start + count),
            (kv_heads, start + count),
        )
    )
    expected = attention_formula(q, k, v, start, scale, window, soft_cap)
    with patch("model.layers.QUERIES", rows):
        for function in (attend_causally, attend_by_flash):
            out = function(q, k, v, window, scale=scale, soft_cap=soft_cap)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_llama3_frequencies_are_kept_stretched_or_blended_by_their_wavelength():
    """Those of wavelengths up to original / high stay; beyond original / low they are divided by
    the factor.
    """
    ropes = Rope(500000.0, "default", 8192), Rope(500000.0, "llama3", 8192, 8.0, 1.0, 4.0)
    plain, stretched = (
        inverse_frequencies(rope, 128, torch.float64, torch.device("cpu")) for rope in ropes
    )
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.sum() > 10 and long.sum() > 10 and (~short & ~long).sum() > 2
    assert torch.equal(stretched[short], plain[short])
    torch.testing.assert_close(stretched[long], plain[long] / 8, rtol=1e-14, atol=0)
    between = (stretched / plain)[~short & ~long]
    assert ((between < 1) & (between > 1 / 8)).all() and (between.diff() < 0).all()


def test_norms_compute_in_float32_for_narrower_dtypes_and_in_float64_for_float64():
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).double() * 30
    for dtype, wide, tolerance in (
        (torch.bfloat16, torch.float32, 1e-6),
        (torch.float64, torch.float64, 1e-15),
    ):
        rounded = x.to(dtype)
        exact = rounded.double() / (rounded.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        normed = normalise(rounded, 1e-6)
        assert normed.dtype == wide
        torch.testing.assert_close(normed.double(), exact, rtol=0, atol=tolerance * 10)


@all_families
def test_initial_weights_have_the_given_spread_and_neutral_norms(family):
    model = build(
        parse_config(small(family, hidden=32, layers=2, head_dim=16, attention_bias=True))
    )
    model.initialise(std=0.1, generator=torch.Generator().manual_seed(0))
    for module in model.modules():
        if isinstance(module, RMSNorm):
            x = torch.randn(3, len(module.weight))
            torch.testing.assert_close(
                module(x), x / x.pow(2).mean(-1, keepdim=True).sqrt(), rtol=1e-5, atol=1e-5
            )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert 0.08 < parameter.std() < 0.12, name
        elif name.endswith("bias"):
            assert not parameter.any(), name


@all_families
def test_gradients_flow_after_decoding_in_inference_mode(family):
    """Tensors cached in inference mode, such as rotary frequencies, must serve training."""
    model = random_model(family, rope_theta=77.0)
    tokens = torch.tensor([[1, 2, 3]])
    rotary_table.cache_clear()
    with torch.inference_mode():
        expected = model(tokens)
    logits = model(tokens)
    logits.logsumexp(-1).sum().backward()
    torch.testing.assert_close(logits.detach(), expected)
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )
