"""Low-bit twins: a plan in low bits computes with rounded weights, and copies nothing else."""

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from model import FULL, Decoder, LayerPlan, build
from model.quantise import RoundedLinear, Twins, quantise, round_inputs
from tests.configs import FAMILIES
from tests.laws import plans, tiny_model

TOKENS = torch.tensor([[0, 2, 1, 1, 0, 2]])


@torch.inference_mode()
def by_hand(model: Decoder, plan: LayerPlan) -> torch.Tensor:
    """Logits of a model with rounded weights and inputs in the sublayers to which the plan gives
    low bits.
    """
    other = build(model.config).to(model.dtype)
    other.load_state_dict(model.state_dict())
    for block, attention, mlp in zip(other.layers, plan.attention, plan.mlp, strict=True):
        for sublayer, bits in ((block.self_attn, attention), (block.mlp, mlp)):
            for product in sublayer.children() if bits not in (0, FULL) else ():
                if not isinstance(product, nn.Linear):
                    continue
                product.weight.data = quantise(product.weight, bits).dequantised(model.dtype)
                product.register_forward_pre_hook(lambda _, given: (round_inputs(given[0]),))
    head = other.embed_tokens.weight if other.lm_head is None else other.lm_head.weight
    head = head if plan.head == FULL else quantise(head, plan.head).dequantised(model.dtype)
    skipping = LayerPlan.skipping(3, plan.skipped_attention, plan.skipped_mlp)
    hidden = other.norm(other.hidden(TOKENS, plan=skipping))
    logits = (hidden if plan.head == FULL else round_inputs(hidden)) @ head.T
    cap = model.config.final_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


@settings(deadline=None, max_examples=30)
@given(plan=plans())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_in_bits_is_the_plan_on_rounded_weights(family: str, plan: LayerPlan) -> None:
    model = tiny_model(family)
    expected = by_hand(model, plan)
    torch.testing.assert_close(model(TOKENS, plan=plan), expected, rtol=1e-12, atol=1e-12)


def test_twins_are_made_when_a_plan_asks_for_them_and_share_norms() -> None:
    model = tiny_model("gemma2")
    new_product = Mock(side_effect=partial(RoundedLinear, model))
    model.twins = Twins(model, new_product)
    model(TOKENS, plan=LayerPlan.early_exit(3, 2))
    assert not new_product.called
    plan = LayerPlan((4, 0, FULL), (FULL, 8, 0), head=8)
    for _ in range(2):
        model.prepare(plan)
    products = [call.args[1] for call in new_product.call_args_list]
    assert sorted(products) == [4] * 4 + [8] * 4, "four of attention; MLP and head"
    twin = model.twins.block(0, 4, FULL)
    assert (
        twin.input_layernorm is model.layers[0].input_layernorm and twin.mlp is model.layers[0].mlp
    )
    assert model.twins.block(2, FULL, 0) is model.layers[2]
    assert len(list(model.parameters())) == len(list(build(model.config).parameters()))


@pytest.mark.parametrize("wrong", [{"attention": (3, 0, 0)}, {"head": 0}, {"mlp": (16, 16)}])
def test_a_plan_of_other_bits_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a plan"):
        replace(LayerPlan.full(3), **wrong)
