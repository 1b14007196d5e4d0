"""Layers: initial weights, and gradients after inference."""

import pytest
import torch

from model import build, parse_config
from model.layers import RMSNorm, rotary_table
from tests.configs import FAMILIES, small
from tests.oracle import VOCAB, random_model

all_families = pytest.mark.parametrize("family", FAMILIES)


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
    raw = small(family, vocab_size=VOCAB, rope_theta=77.0)
    model = random_model(raw).requires_grad_()
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
