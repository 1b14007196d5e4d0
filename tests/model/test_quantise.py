"""Quantisation: error bounds of weights and inputs, edge cases, and low-bit copies: a plan in low
bits computes with rounded weights, and copies nothing else.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from model.decoder import Decoder
from model.fast.cpu import rounded
from model.plan import FULL, LOW_BITS, LayerPlan
from model.quantise import GROUP, quantise, round_inputs
from tests.configs import FAMILIES
from tests.laws import plans, tiny_model

LEVELS = 15
LANES = 16  # rows of a block in step.c


def weights(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) ** 3


def groups(x: Tensor) -> Tensor:
    """Groups of a matrix: ``[rows, columns]`` -> ``[rows, groups, 32]``, padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


@given(st.integers(1, 5), st.integers(1, 80), st.integers(0, 99))
def test_a_groups_weighted_error_is_bounded_by_half_a_step_of_an_even_grid(
    rows: int, columns: int, seed: int
) -> None:
    """That of rounding to the nearest of evenly spaced values between its least and largest weight:
    half a step.
    """
    weight = weights(rows, columns, seed)
    importance = weights(1, columns, seed + 1)[0].square() + 0.01
    found = quantise(weight, 4, importance)
    error = groups((found.dequantised(torch.float32) - weight).square() * importance).sum(2)
    parts = [weight[:, first : first + GROUP] for first in range(0, columns, GROUP)]
    step = torch.stack([part.amax(1) - part.amin(1) for part in parts], 1) / LEVELS
    largest = torch.stack([part.abs().amax(1) for part in parts], 1)
    # bfloat16 changes scale and zero by up to 2⁻⁹ of their size.
    bound = (step / 2 + (largest + step * 16) / 256).square() * groups(importance[None]).sum(2)
    assert (error <= bound).all() and torch.equal(weight, weights(rows, columns, seed))
    assert found.codes.max() <= LEVELS and found.scale.dtype == torch.bfloat16


@given(st.integers(1, 5), st.integers(1, 80), st.integers(0, 99))
def test_eight_bits_are_off_by_half_a_step_of_their_row(rows: int, columns: int, seed: int) -> None:
    weight = weights(rows, columns, seed)
    found = quantise(weight, 8)
    error = (found.dequantised(torch.float32) - weight).abs()
    assert (error <= found.scale * (0.5 + 1e-4) + 1e-12).all()
    assert found.codes.abs().max() == 127 and found.scale.shape == (rows, 1)


def test_fitted_grids_beat_the_even_grid_where_the_product_matters() -> None:
    """With normal weights and inputs of unequal size the weighted error falls by at least a
    tenth.
    """
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(256, generator=torch.Generator().manual_seed(1)) ** 4 + 1e-3
    low, high = torch.aminmax(groups(weight), dim=2, keepdim=True)
    step = (high - low) / LEVELS
    even = (((groups(weight) - low) / step).round() * step + low).flatten(1)
    fitted, unweighted, even = (
        ((values - weight).square() * importance).sum()
        for values in (
            quantise(weight, 4, importance).dequantised(torch.float32),
            quantise(weight, 4).dequantised(torch.float32),
            even,
        )
    )
    assert fitted < 0.9 * even and fitted < 0.95 * unweighted


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


def unpacked(packed: Tensor, bits: int, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Codes ``[rows, columns]``, scales and zeros of a copy that ``products.h`` draws."""
    groups = -(-columns // GROUP)
    size = 512 if bits == 8 else 320  # bytes of a group
    found = packed[:, : groups * size].reshape(-1, groups, size)
    halves = found[..., : 64 * bits].reshape(-1, groups, bits // 4, 256)
    halves = torch.stack((halves & 15, halves >> 4), 3).view(-1, groups, bits // 4, 8, LANES, 4)
    codes = halves[:, :, 0].int() + 16 * halves[:, :, 1:].sum(2) - 128 * (bits == 8)
    codes = codes.permute(0, 3, 1, 2, 4).reshape(-1, groups * GROUP)[:rows, :columns]
    if bits == 8:
        scales = packed[:, groups * size :].reshape(-1).view(torch.float32)[:rows, None]
        return codes, scales, torch.zeros_like(scales)
    numbers = found[..., 256:].reshape(-1, groups, 4 * LANES).view(torch.bfloat16)
    pairs = numbers.view(-1, groups, LANES, 2).transpose(1, 2).reshape(-1, groups, 2)
    return codes, *pairs[:rows].unbind(2)


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler named cc")
@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows,columns", [(48, 64), (33, 100), (5, 31)])
def test_compiled_rounding_has_the_bits_of_the_readable_one(
    bits: int, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """Also of rows of zeros, and of groups whose weights are all equal."""
    weight = weights(rows, columns, 3)
    weight[1] = 0
    weight[2, :GROUP] = 0.25
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(1)) + 0.01
    expected = quantise(weight.to(dtype), bits, importance)
    copies = rounded(weight.to(dtype), bits, importance)
    found = unpacked(copies, bits, rows, columns)
    for each, readable in zip(found, expected, strict=True):
        assert torch.equal(each, readable.to(each.dtype))


TOKENS = torch.tensor([[0, 2, 1, 1, 0, 2]])


def on_rounded_weights(model: Decoder, plan: LayerPlan) -> Tensor:
    """Logits of a copy whose weights and inputs are rounded where the plan gives low bits."""
    other = copy.deepcopy(model)
    if other.lm_head is None:
        other.lm_head = nn.Linear(1, 1, bias=False)
        other.lm_head.weight = copy.deepcopy(other.embed_tokens.weight)
    parts = [(other.lm_head, plan.head)]
    for block, attention, mlp in zip(other.layers, plan.attention, plan.mlp, strict=True):
        parts += [(each, attention) for each in block.self_attn.children()]
        parts += [(each, mlp) for each in block.mlp.children()]
    for part, bits in parts:
        if bits in LOW_BITS and isinstance(part, nn.Linear):
            part.weight.data = quantise(part.weight, bits).dequantised(model.dtype)
            part.register_forward_pre_hook(lambda _, given: (round_inputs(given[0]),))
    return other(TOKENS, plan=plan.in_bits(FULL, head=FULL))


@settings(deadline=None, max_examples=30)
@given(plan=plans())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_in_bits_is_the_plan_on_rounded_weights(family: str, plan: LayerPlan) -> None:
    model = tiny_model(family)
    expected = on_rounded_weights(model, plan)
    torch.testing.assert_close(model(TOKENS, plan=plan), expected, rtol=1e-12, atol=1e-12)


def test_low_bit_copies_are_made_once_when_a_plan_asks_for_them() -> None:
    model = tiny_model("gemma2")
    made = model.planned.new_product = Mock(side_effect=model.planned.new_product)
    low = LayerPlan((4, 0, FULL), (FULL, 8, 0), head=8)
    for plan in LayerPlan.early_exit(3, 2), low, low:
        model.prepare(plan)
    bits = [call.args[1] for call in made.call_args_list]
    assert sorted(bits) == [4] * 4 + [8] * 4, "four of attention; MLP and head"


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        *(
            (partial(round_weights, weights(64, 64, 0), bits, None), f"not to {bits}")
            for round_weights in (quantise, rounded)
            for bits in (0, 3, FULL)
        ),
        *(
            (partial(replace, LayerPlan.full(3), **wrong), "a plan")
            for wrong in (
                {"attention": (3, 0, 0)},
                {"head": 0},
                {"mlp": (16, 16)},
                {"window": 0},
            )
        ),
    ],
)
def test_weights_and_plans_of_other_bits_and_a_plan_of_no_key_are_refused(
    refused: Callable[[], object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        refused()
