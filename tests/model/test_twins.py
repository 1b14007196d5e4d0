"""Low-bit twins: the model with rounded weights, wherever a plan asks for it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from model import Decoder, LayerPlan, build, parse_config
from model.fast import accelerate
from model.fast.low_bits import LowBitLinear
from model.plan import FULL
from model.quantise import quantise
from tests.configs import small
from tests.laws import plans, tiny_model

FAMILIES = ["llama", "gemma2"]
TOKENS = torch.tensor([[0, 2, 1, 1, 0, 2]])


@torch.inference_mode()
def by_hand(model: Decoder, plan: LayerPlan, dtype: torch.dtype) -> torch.Tensor:
    """The logits, computed in ``dtype``, of a model whose weights were replaced where the plan wants them rounded."""
    other = build(model.config).to(model.dtype)
    other.load_state_dict(model.state_dict())
    for block, attention, mlp in zip(other.layers, plan.attention, plan.mlp, strict=True):
        for sublayer, bits in ((block.self_attn, attention), (block.mlp, mlp)):
            for product in sublayer.children() if bits not in (0, FULL) else ():
                product.weight.data = quantise(product.weight, bits).dequantised()
    head = other.embed_tokens.weight if other.lm_head is None else other.lm_head.weight
    head = head if plan.head == FULL else quantise(head, plan.head).dequantised()
    skipping = LayerPlan.skipping(3, plan.skipped_attention, plan.skipped_mlp)
    other = other.to(dtype)
    logits = other.norm(other.hidden(TOKENS, plan=skipping)) @ head.to(dtype).T
    cap = model.config.final_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


@settings(deadline=None, max_examples=30)
@given(plan=plans())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_in_bits_is_the_plan_on_rounded_weights(family: str, plan: LayerPlan) -> None:
    model = tiny_model(family)
    expected = by_hand(model, plan, torch.float64)
    torch.testing.assert_close(model(TOKENS, plan=plan), expected, rtol=1e-12, atol=1e-12)


def test_twins_are_made_when_a_plan_asks_for_them_and_share_norms() -> None:
    model = tiny_model("gemma2")
    model(TOKENS, plan=LayerPlan.early_exit(3, 2))
    assert not model.twins.blocks and not model.twins.heads
    plan = LayerPlan((4, 0, FULL), (FULL, 8, 0), head=8)
    model.twins.prepare(plan)
    assert set(model.twins.sublayers) == {(0, "self_attn", 4), (1, "mlp", 8)} and set(model.twins.heads) == {8}
    twin = model.twins.block(0, 4, FULL)
    assert twin.input_layernorm is model.layers[0].input_layernorm and twin.mlp is model.layers[0].mlp
    assert model.twins.block(2, FULL, 0) is model.layers[2]
    assert len(list(model.parameters())) == len(list(build(model.config).parameters()))


def random_model(family: str, **changed: object) -> Decoder:
    """In bf16, with sizes that the kernels take unless they are ``changed``."""
    raw = small(family, vocab_size=64, layers=3, hidden=64)
    raw |= {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, **changed}
    model = build(parse_config(raw)).bfloat16()
    model.initialise(std=0.1, generator=torch.Generator().manual_seed(0))
    return model.requires_grad_(False)


def kernels() -> bool:
    return isinstance(accelerate(random_model("llama")).twins.head(4), LowBitLinear)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bits", "head"), [(4, 8), (8, 8), (4, 4)])
@torch.inference_mode()
def test_the_kernels_give_what_the_rounded_weights_give_but_for_rounding(family: str, bits: int, head: int) -> None:
    if not kernels():
        pytest.skip("this machine has no low-bit kernels")
    plan = LayerPlan.skipping(3, [1], []).in_bits(bits, head)
    exact, fast = by_hand(random_model(family), plan, torch.float32), accelerate(random_model(family))
    found = fast(TOKENS, fast.new_cache(16), 0, plan)
    assert isinstance(fast.twins.block(0, bits, bits).mlp.down_proj, LowBitLinear)
    assert (found - exact).norm() < 0.05 * exact.norm() and fast.twins.trouble is None
    plain = fast(TOKENS, fast.new_cache(16), 0)
    assert torch.equal(plain, accelerate(random_model(family))(TOKENS, fast.new_cache(16), 0)), (
        "the target is as before"
    )


@pytest.mark.parametrize(
    ("changed", "dtype", "complaint"),
    [
        (
            {"intermediate_size": 72},
            torch.bfloat16,
            "drafts in 4 bits are no faster here: the kernels do not take a 64×72",
        ),
        ({}, torch.float32, "drafts in 4 bits are no faster here: there are kernels for bfloat16 only"),
    ],
)
@torch.inference_mode()
def test_what_the_kernels_do_not_take_is_computed_all_the_same_and_said(
    changed: dict[str, object], dtype: torch.dtype, complaint: str
) -> None:
    plan = LayerPlan.full(3).in_bits(4)
    fast = accelerate(random_model("llama", **changed).to(dtype))
    expected = by_hand(random_model("llama", **changed).to(dtype), plan, torch.float32)
    assert (fast(TOKENS, fast.new_cache(16), 0, plan) - expected).norm() < 0.03 * expected.norm()
    assert fast.twins.trouble is not None and fast.twins.trouble.startswith(complaint)


@torch.inference_mode()
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels():
        pytest.skip("this machine has no low-bit kernels")
    right = LowBitLinear.__call__
    monkeypatch.setattr(LowBitLinear, "__call__", lambda self, *inputs: 1.1 * right(self, *inputs))
    fast = accelerate(random_model("llama"))
    assert not isinstance(fast.twins.head(4), LowBitLinear) and "do not compute what they should" in fast.twins.trouble


@pytest.mark.parametrize("wrong", [{"attention": (3, 0, 0)}, {"head": 0}, {"mlp": (16, 16)}])
def test_a_plan_of_other_bits_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a plan"):
        replace(LayerPlan.full(3), **wrong)
