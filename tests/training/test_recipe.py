"""The training recipe against values computed by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import parse_config
from model.decoder import Decoder
from model.families import build
from model.plan import LayerPlan
from tests.folders import GEMMA2, LLAMA
from train import learning_rate
from training.recipe import (
    CURRICULA,
    dropout_rates,
    exit_weights,
    growth_from_scratch,
    layer_outputs,
    recipe_loss,
)

SHAPE = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24}


def test_layer_dropout_grows_over_depth_and_from_scratch_over_time() -> None:
    # L = 4: exp(l ln2 / 3) - 1 for l = 0..3
    by_hand = [0.0, 0.25992104989, 0.58740105197, 1.0]
    assert dropout_rates(4, 0.2) == pytest.approx([0.2 * d for d in by_hand])
    # t = 2 of T = 5: exp(2 ln2 / 4) - 1 = sqrt 2 - 1
    growth = [growth_from_scratch(step, 5) for step in (0, 2, 4)]
    assert growth == pytest.approx([0, 0.41421356237, 1])
    assert dropout_rates(4, 0.2, growth[1])[3] == pytest.approx(0.2 * 0.41421356237)


def test_exit_weights_are_the_papers_sums_made_to_sum_to_one() -> None:
    # L = 4, e_scale = 1/2: below the last 0, 1/2, 3/2; the last 3 + 1/2·(0+1+2) = 9/2; together
    # 13/2
    on = np.ones(3, dtype=bool)
    assert exit_weights(on, scale=0.5) == pytest.approx([0, 1 / 13, 3 / 13, 9 / 13])


# rotational: every third exit, shifted by one each step; gradual: layer l of L = 8 is on from step
# (8 - l)·12/16 of T = 12, that is 6, 5.25, 4.5, ...
@pytest.mark.parametrize(
    ("curriculum", "on"),
    [
        ("rotational", [[0, 3, 6], [1, 4], [2, 5], [0, 3, 6]]),
        ("gradual", [[], [], [6], [4, 5, 6], [3, 4, 5, 6], [2, 3, 4, 5, 6], [*range(7)]]),
    ],
)
def test_a_curriculum_turns_exits_on(curriculum: str, on: list[list[int]]) -> None:
    found = [CURRICULA[curriculum](8, step, 12, 3) for step in range(len(on))]
    assert [np.flatnonzero(each).tolist() for each in found] == on


def tiny(raw: dict[str, Any] = LLAMA) -> tuple[Decoder, Tensor]:
    model = build(parse_config({**raw, **SHAPE, "head_dim": 8})).double()
    model.initialise(0.2, torch.Generator().manual_seed(1))
    return model, torch.randint(0, 200, (4, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("raw", [LLAMA, GEMMA2], ids=["llama", "gemma2"])
def test_a_layers_output_is_what_an_early_exit_speaks_from(raw: dict[str, Any]) -> None:
    model, tokens = tiny(raw)
    for layer, hidden in enumerate(layer_outputs(model, tokens)):
        torch.testing.assert_close(
            model.logits(hidden), model(tokens, plan=LayerPlan.early_exit(3, layer + 1))
        )


def test_a_dropped_layer_is_dropped_whole_for_its_sample_alone() -> None:
    model, tokens = tiny()
    kept = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    *_, hidden = layer_outputs(model, tokens, kept)
    without = {True: LayerPlan.skipping(3, [2], [2]), False: LayerPlan.skipping(3, [1, 2], [1, 2])}
    for row in range(4):
        alone = model.hidden(tokens[row : row + 1], plan=without[bool(kept[1, row])])
        torch.testing.assert_close(hidden[row : row + 1], alone)


@pytest.mark.parametrize("share", [0.0, 0.75])
def test_an_exits_target_is_the_text_mixed_with_a_share_of_the_last_layers_probabilities(
    share: float,
) -> None:
    """The loss is the weighted sum of the exits' losses; its gradients are those of a loss computed
    by hand.
    """
    model, tokens = tiny()
    model.requires_grad_()
    total = recipe_loss(model, tokens, None, [0.25, 0.0, 0.75], taught=share)
    first, _, last = (
        model.logits(hidden).float() for hidden in layer_outputs(model, tokens[:, :-1])
    )
    text = torch.nn.functional.one_hot(tokens[:, 1:], model.vocab_size)
    # no gradient teaches the teacher
    target = (1 - share) * text + share * torch.softmax(last, -1).detach()
    pairs = (target, first), (text, last)
    early, late = (-(each * torch.log_softmax(logits, -1)).sum(-1).mean() for each, logits in pairs)
    by_hand = 0.25 * early + 0.75 * late
    assert total.item() == pytest.approx(by_hand.item(), rel=1e-6)
    found, expected = (torch.autograd.grad(each, model.parameters()) for each in (total, by_hand))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_learning_rate_warms_up_in_a_line_and_falls_along_a_cosine_to_a_tenth() -> None:
    rates = [learning_rate(step, 110, 10) for step in (0, 4, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.55, 0.1])
