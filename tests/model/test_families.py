"""All families: parity with transformers, in whole and with skipped sublayers, initial weights, and
gradients after inference.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import parse_config
from model.decoder import Decoder
from model.layers import RMSNorm, rotary_table
from model.plan import FULL, LayerPlan
from tests.configs import FAMILIES, small
from tests.laws import plans, random_model
from tests.oracle import (
    VOCAB,
    configs,
    in_chunks,
    lifted,
    oracle_logits,
    oracle_model,
    our_model,
    silenced,
)

all_families = pytest.mark.parametrize("family", FAMILIES)


@all_families
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    data=st.data(),
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    length=st.integers(1, 24),
    size=st.integers(2, 23),
)
def test_float64_logits_equal_transformers_in_one_pass_in_steps_and_in_chunks(
    family, data, seed, batch, length, size
):
    """Each row of a batch has the logits that it has alone; with every rotary embedding, past any
    window; and a skipped sublayer adds exactly nothing.
    """
    with lifted():
        oracle = oracle_model(data.draw(configs(family)), seed=seed)
        ours = our_model(oracle)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, (batch, length), generator=generator)
        full = LayerPlan.full(ours.num_layers)
        for plan in full, replace(data.draw(plans(ours.num_layers, [FULL])), window=None):
            with silenced(oracle, plan):
                expected = torch.cat([oracle_logits(oracle, row) for row in tokens[:, None]])
            for sizes in 1, size, length:
                found = in_chunks(ours, tokens, sizes, plan)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
            torch.testing.assert_close(ours(tokens, plan=plan), expected, rtol=0, atol=1e-9)


@all_families
def test_bfloat16_is_as_near_to_the_truth_as_transformers_is(family):
    raw = small(
        family,
        hidden=128,
        layers=4,
        vocab_size=200,
        head_dim=32,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=16,
        query_pre_attn_scalar=24,
        mlp_bias=family == "llama",
        pad_token_id=None,
    )
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(4):
        tokens = torch.randint(200, (1, 64), generator=torch.Generator().manual_seed(seed))
        oracle = oracle_model(raw, torch.bfloat16, seed)
        ours = in_chunks(our_model(oracle), tokens, [32, 31, 1])
        theirs = oracle_logits(oracle, tokens)
        with lifted():
            truth = oracle_logits(oracle.double(), tokens)
        errors += torch.stack([(each.double() - truth).abs().mean() for each in (ours, theirs)])
    assert 0 < errors[0] <= 1.2 * errors[1]


@all_families
def test_initial_weights_have_the_given_spread_and_neutral_norms(family):
    model = Decoder(
        parse_config(small(family, hidden=32, layers=2, head_dim=16, attention_bias=True))
    )
    model.initialise(std=0.1, generator=torch.Generator().manual_seed(0))
    for norm in (each for each in model.modules() if isinstance(each, RMSNorm)):
        x = torch.randn(3, len(norm.weight))
        root = x.pow(2).mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(norm(x), x / root, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert 0.08 < parameter.std() < 0.12, name
        elif name.endswith("bias"):
            assert not parameter.any(), name


@all_families
def test_gradients_flow_after_decoding_in_inference_mode(family):
    """Tensors cached in inference mode, such as rotary frequencies, must serve training."""
    model = random_model(small(family, vocab_size=VOCAB, rope_theta=77.0)).requires_grad_()
    rotary_table.cache_clear()
    with torch.inference_mode():
        expected = model(torch.tensor([[1, 2, 3]]))
    logits = model(torch.tensor([[1, 2, 3]]))
    logits.logsumexp(-1).sum().backward()
    torch.testing.assert_close(logits.detach(), expected)
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())
