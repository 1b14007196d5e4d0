"""The production loop as the tests of the search run it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoding.drafters import ModelDrafter
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Verify, verify_by_ratio
from model import Decoder, LayerPlan

BUDGET = 11


def run(
    model: Decoder,
    prompt: Sequence[int],
    plan: LayerPlan,
    policy: Policy,
    params: SamplingParams,
    randomness: Randomness,
    budget: int = BUDGET,
    eos_ids: frozenset[int] = frozenset(),
    verify: Verify = verify_by_ratio,
) -> list[Round]:
    """The rounds of the production loop."""
    cache = model.new_cache(len(prompt) + budget)
    with torch.inference_mode():
        model.prefill(torch.tensor([prompt[:-1]], dtype=torch.int64), cache)
    drafter = ModelDrafter(model, cache, plan)
    text = Text(prompt, Rules(budget, eos_ids), model)
    return list(speculate(model, cache, text, drafter, policy, params, randomness, verify))
