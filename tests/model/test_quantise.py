"""Quantisation: error bounds of weights and inputs, and edge cases."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.plan import LOW_BITS
from model.quantise import GROUP, quantise, round_inputs
from tests.calls import ended

AFFINE = (4, 6)
LANES = 16  # rows of a block


def weights(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) ** 3


def groups(x: Tensor) -> Tensor:
    """Groups of a matrix: ``[rows, columns]`` -> ``[rows, groups, 32]``, padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


@given(st.integers(1, 5), st.integers(1, 80), st.sampled_from(AFFINE), st.integers(0, 99))
def test_a_groups_weighted_error_is_bounded_by_half_a_step_of_an_even_grid(
    rows: int, columns: int, bits: int, seed: int
) -> None:
    """That of rounding to the nearest of evenly spaced values between its least and largest weight:
    half a step.
    """
    weight, importance = (
        weights(rows, columns, seed),
        weights(1, columns, seed + 1)[0].square() + 0.01,
    )
    found = quantise(weight, bits, importance)
    error = groups((found.dequantised(torch.float32) - weight).square() * importance).sum(2)
    parts = [weight[:, first : first + GROUP] for first in range(0, columns, GROUP)]
    step = torch.stack([part.amax(1) - part.amin(1) for part in parts], 1) / (2**bits - 1)
    largest = torch.stack([part.abs().amax(1) for part in parts], 1)
    # bfloat16 changes scale and zero by up to 2⁻⁹ of their size.
    bound = (step / 2 + (largest + step * 2**bits) / 256).square() * groups(importance[None]).sum(2)
    assert (error <= bound).all() and torch.equal(weight, weights(rows, columns, seed))
    assert (
        found.codes.shape == weight.shape
        and found.codes.dtype == torch.uint8
        and found.codes.max() < 2**bits
    )
    assert found.scale.shape == (rows, -(-columns // GROUP)) and found.scale.dtype == torch.bfloat16


@given(st.integers(1, 5), st.integers(1, 80), st.integers(0, 99))
def test_eight_bits_are_off_by_half_a_step_of_their_row(rows: int, columns: int, seed: int) -> None:
    weight = weights(rows, columns, seed)
    found = quantise(weight, 8)
    assert (
        found.codes.abs().max() == 127
        and (found.zero == 0).all()
        and found.scale.shape == (rows, 1)
    )
    assert (
        (found.dequantised(torch.float32) - weight).abs() <= found.scale * (0.5 + 1e-4) + 1e-12
    ).all()


@pytest.mark.parametrize("bits", AFFINE)
def test_fitted_grids_beat_the_even_grid_where_the_product_matters(bits: int) -> None:
    """With normal weights and inputs of unequal size the weighted error falls by at least a
    tenth.
    """
    weight, importance = (
        torch.randn(64, 256, generator=torch.Generator().manual_seed(0)),
        torch.rand(256, generator=torch.Generator().manual_seed(1)) ** 4 + 1e-3,
    )
    low, high = (groups(weight).amin(2)[..., None], groups(weight).amax(2)[..., None])
    step = (high - low) / (2**bits - 1)
    even = (((groups(weight) - low) / step).round() * step + low).flatten(1)

    def error(values: Tensor) -> float:
        return ((values - weight).square() * importance).sum().item()

    fitted, unweighted = (
        quantise(weight, bits, each).dequantised(torch.float32) for each in (importance, None)
    )
    assert error(fitted) < 0.9 * error(even) and error(fitted) < 0.95 * error(unweighted)


@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_equal_weights_stay_as_they_are(bits: int, value: float) -> None:
    weight = torch.full((2, 40), value, dtype=torch.float64)
    torch.testing.assert_close(
        quantise(weight, bits).dequantised(weight.dtype), weight, rtol=1e-6, atol=0
    )


@given(st.integers(1, 70), st.integers(0, 99))
def test_inputs_are_rounded_with_a_scale_per_group(columns: int, seed: int) -> None:
    """To 255 values: the error is at most half a step of the largest input of a group."""
    x = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(seed)) ** 3
    error = (round_inputs(x) - x).abs()
    for first in range(0, columns, GROUP):
        largest = x[..., first : first + GROUP].abs().amax(-1, keepdim=True)
        assert (error[..., first : first + GROUP] <= largest / 254 * 1.001).all()
    assert torch.equal(round_inputs(torch.zeros(1, 40)), torch.zeros(1, 40))


def unpacked(copy: Tensor, bits: int, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Codes ``[rows, columns]``, scales and zeros of a copy in the layout drawn in ``dot``."""
    groups = -(-columns // GROUP)
    if bits == 8:
        codes = copy[:, : -4 * LANES].reshape(-1, groups, 8, LANES, 4)
        scales = copy[:, -4 * LANES :].reshape(-1).view(torch.float32)[:rows, None]
        zeros = torch.zeros_like(scales)
    else:
        found = copy.view(len(copy), groups, -1)
        low, high = found[..., :256] & 15, found[..., :256] >> 4
        codes = torch.stack((low, high), 2).view(-1, groups, 8, LANES, 4)
        numbers = found[..., 256:].reshape(-1, groups, 4 * LANES).view(torch.bfloat16)
        scales, zeros = (
            each.transpose(1, 2).reshape(-1, groups)[:rows] for each in numbers.chunk(2, 2)
        )
    codes = codes.permute(0, 3, 1, 2, 4).reshape(-1, groups * GROUP)[:rows, :columns]
    return (codes.int() - 128 * (bits == 8)).to(torch.int8), scales, zeros


@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows,columns", [(48, 64), (33, 100), (5, 31)])
def test_compiled_rounding_has_the_bits_of_the_readable_one(
    bits: int, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """Also of rows of zeros, of groups whose weights are all equal, and in several pieces."""
    pytest.importorskip("numba", reason="rounding is compiled by numba: pip install numba")
    from model.fast.cpu import rounding

    weight = weights(rows, columns, 3)
    weight[1] = 0
    weight[2, :GROUP] = 0.25
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(1)) + 0.01
    expected = quantise(weight.to(dtype), bits, importance)
    with patch.object(rounding, "PIECE", 1):
        count, copies = ended(rounding.pack(weight.to(dtype), bits, importance))
    assert count == -(-rows // LANES)
    codes, scale, zero = unpacked(copies, bits, rows, columns)
    assert torch.equal(codes, expected.codes.to(torch.int8))
    assert torch.equal(scale, expected.scale)
    assert torch.equal(zero, expected.zero)
