"""Chi-square tests over many samples: with full vocabularies the first tokens have the target's
exact law.

The seeds are fixed, so each test either always passes or always fails. A correct one fails for one
seed in a million.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import FixedLength
from decoding.randomness import SeededRandomness
from decoding.sampling import SamplingParams, distribution
from decoding.speculate import speculate
from decoding.text import Rules, Text
from model import Decoder, KVCache, LayerPlan
from tests.laws import FALSE_ALARM, chi_square_p_value
from weights.load import load_model
from weights.tokenizer import Tokenizer

PARAMS = SamplingParams(temperature=0.7, top_p=0.9)


class Recall:
    """Model with cached answers to one prompt, so that thousands of first rounds are cheap.

    Only first rounds may use it, since it leaves the KV cache at the prompt.
    """

    def __init__(self, model: Decoder) -> None:
        self.model, self.device = model, model.device
        self.vocab_size, self.max_positions = model.vocab_size, model.max_positions
        self.answers: dict[tuple[object, ...], Tensor] = {}

    def __call__(
        self, tokens: Tensor, cache: KVCache, start: int, plan: LayerPlan | None = None
    ) -> Tensor:
        key = (tuple(tokens.flatten().tolist()), start, plan)
        if key not in self.answers:
            length = cache.length
            self.answers[key] = self.model(tokens, cache, start, plan)
            cache.truncate(length)
        return self.answers[key]

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        self.model.prefill(tokens, cache, start)

    def new_cache(self, capacity: int) -> KVCache:
        return self.model.new_cache(capacity)


def test_the_chi_square_finds_another_law_and_passes_the_right_one() -> None:
    """At the sizes below: samples of p itself fit; those of p mixed with a tenth of another law do
    not.
    """
    probs = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.1, 0.04, 0.008, 0.002, 0.0])
    moved = 0.9 * probs + 0.1 * probs.flip(0).roll(-1)
    for law, fits in ((probs, True), (moved, False)):
        drawn = torch.multinomial(
            law, 1500, replacement=True, generator=torch.Generator().manual_seed(0)
        )
        assert (chi_square_p_value(torch.bincount(drawn, minlength=9), probs) > FALSE_ALARM) == fits
    with pytest.raises(AssertionError, match="probability zero"):
        chi_square_p_value(torch.tensor([5, 1]), torch.tensor([1.0, 0.0]))
    with pytest.raises(AssertionError, match="always fits"):
        chi_square_p_value(torch.tensor([5, 1]), torch.tensor([0.9, 0.1]))


def first_tokens(
    model: Decoder, prompt: list[int], make: Callable[[Recall, KVCache], Drafter], samples: int
) -> tuple[Tensor, Tensor, int]:
    """Counts of the first token over many samples, its exact law, and how many first drafts were
    rejected.
    """
    target = Recall(model)
    cache = target.new_cache(len(prompt) + 4)
    with torch.inference_mode():
        target.prefill(torch.tensor([prompt[:-1]]), cache)
        logits = model(torch.tensor([prompt[-1:]]), cache, len(prompt) - 1)[0]
        exact = distribution(logits, torch.tensor(prompt), PARAMS)[0]
    drafter, randomness = make(target, cache), SeededRandomness(0)
    counts, rejected = torch.zeros(model.vocab_size, dtype=torch.int64), 0
    for _ in range(samples):
        text = Text(prompt, Rules(2), target)
        rounds = speculate(target, cache, text, drafter, FixedLength(1), PARAMS, randomness)
        first = next(rounds)
        rounds.close()
        counts[first.emitted[0]] += 1
        rejected += first.accepted < len(first.drafted)
    return counts, exact, rejected


DRAFTERS: dict[str, Callable[[Recall, KVCache], Drafter]] = {
    "none": lambda target, cache: NoDraft(target.vocab_size),
    "skip": lambda target, cache: ModelDrafter(
        target, cache, LayerPlan.skipping(target.model.num_layers, attention=[1, 2], mlp=[1])
    ),
    "exit": lambda target, cache: ModelDrafter(
        target, cache, LayerPlan.early_exit(target.model.num_layers, target.model.num_layers - 1)
    ),
    "lookup": lambda target, cache: PromptLookup(target.vocab_size),
}


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_smollm2_writes_first_tokens_by_its_law(drafter: str, smollm2: Path) -> None:
    model, tokenizer = load_model(smollm2), Tokenizer(smollm2)
    prompt = tokenizer.encode(
        "The old man looked at the dog. The dog looked at the cat. The old man looked at the"
    )
    counts, exact, rejected = first_tokens(model, prompt, DRAFTERS[drafter], samples=250)
    assert chi_square_p_value(counts, exact) > FALSE_ALARM
    assert rejected > 0 or drafter == "none"
