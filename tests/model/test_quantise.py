"""Rounding to few bits: no weight is further from its code's value than half a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.quantise import GROUP, quantise, round_inputs


@given(st.integers(1, 5), st.integers(1, 80), st.sampled_from([4, 8]), st.integers(0, 99))
def test_no_weight_is_further_from_its_value_than_half_a_step(rows: int, columns: int, bits: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) ** 3
    rounded = quantise(weight, bits)
    step = rounded.scale.float().repeat_interleave(rounded.group, 1)[:, :columns]
    moved = (rounded.zero.abs() + 15 * rounded.scale).float() / 256 if bits == 4 else torch.zeros(1, 1)
    slack = moved.repeat_interleave(rounded.group, 1)[:, :columns]  # scale and zero are rounded to bfloat16
    assert ((rounded.dequantised(torch.float32) - weight).abs() <= step * (0.5 + 1e-4) + slack + 1e-12).all()
    assert rounded.codes.shape == weight.shape and rounded.codes.dtype == torch.int8
    assert rounded.scale.shape == (rows, -(-columns // GROUP) if bits == 4 else 1)


@given(st.integers(0, 99))
def test_four_bits_are_sixteen_values_a_group_and_eight_bits_255_a_row(seed: int) -> None:
    weight = torch.randn(3, 640, generator=torch.Generator().manual_seed(seed))
    four, eight = (quantise(weight, bits) for bits in (4, 8))
    assert (four.codes.min(), four.codes.max()) == (-8, 7)
    assert all(
        len(group.unique()) <= 16 for group in four.dequantised(torch.float32).unflatten(1, (-1, GROUP)).flatten(0, 1)
    )
    assert eight.codes.abs().max() == 127 and (eight.zero == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_weights_that_are_all_alike_stay_what_they_are(bits: int, value: float) -> None:
    weight = torch.full((2, 40), value, dtype=torch.float64)
    torch.testing.assert_close(quantise(weight, bits).dequantised(weight.dtype), weight, rtol=1e-6, atol=0)


def test_a_large_weight_coarsens_its_own_group_only() -> None:
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 40] = 100.0
    error = (quantise(weight, 4).dequantised(torch.float32) - weight).abs()[0]
    assert error[:GROUP].max() < 0.2 < error[GROUP:].max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_values_are_in_the_dtype_of_the_weights_which_are_left_alone(bits: int, dtype: torch.dtype) -> None:
    weight = torch.randn(4, 48, dtype=dtype, generator=torch.Generator().manual_seed(0))
    before = weight.clone()
    rounded = quantise(weight, bits)
    assert rounded.dequantised(dtype).dtype == dtype and torch.equal(weight, before)


@given(st.integers(1, 70), st.integers(0, 99))
def test_inputs_are_rounded_with_a_scale_per_group(columns: int, seed: int) -> None:
    """To 255 values each: none is further off than half a step of the largest of its 32."""
    x = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(seed)) ** 3
    error = (round_inputs(x) - x).abs()
    for first in range(0, columns, GROUP):
        largest = x[..., first : first + GROUP].abs().amax(-1, keepdim=True)
        assert (error[..., first : first + GROUP] <= largest / 254 * 1.001).all()
    assert torch.equal(round_inputs(torch.zeros(1, 40)), torch.zeros(1, 40))
