"""Shared parts of the tests of laws: tiny models, drafters and policies by name, and the fit of a
sample to its law.

Table models stand for real ones where a law is enumerated. Knows nothing of options and files.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from decoding.proof.loop_law import self_draft
from decoding.proof.table_model import DRAFT_PLAN, TableModel
from decoding.randomness import SeededRandomness
from decoding.text import Conditions, Text, TokenBytes
from model.cache import KVCache
from model.config import parse_config
from model.decoder import Decoder
from model.plan import FULL, LOW_BITS, LayerPlan
from tests.configs import small


def draft_model(model: TableModel, cache: KVCache, tokens: int = 0) -> Drafter:
    """Another model, with the draft's table and a separate cache, and ``tokens`` more or fewer."""
    table = F.pad(model.tables[DRAFT_PLAN].exp(), (0, tokens), value=0.3)
    draft = TableModel(table / table.sum(-1, keepdim=True))
    return ModelDrafter(draft, draft.new_cache(TableModel.max_positions))


def random_tables(seed: int, states: int, vocab: int) -> TableModel:
    """Unrelated target and draft tables."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(2, states, vocab, dtype=torch.float64, generator=generator) + 0.05
    return TableModel(*(rows / rows.sum(-1, keepdim=True)))


NewDrafter = Callable[[Any, KVCache], Drafter]
NO_MODEL: dict[str, NewDrafter] = {
    "lookup": lambda model, cache: PromptLookup(),
    "none": lambda model, cache: NoDraft(),
}
TABLE_DRAFTERS: dict[str, NewDrafter] = {
    "plan": self_draft,
    "model": draft_model,
    "model of fewer tokens": partial(draft_model, tokens=-1),
    "model of more tokens": partial(draft_model, tokens=1),
    **NO_MODEL,
}


EXACT = 1e-9  # largest difference of laws and logits that are equal up to rounding in float64
FALSE_ALARM = 1e-6  # p-value below which a chi-square test fails; the seeds are fixed


def chi_square_p_value(counts: Tensor, probs: Tensor) -> float:
    """Probability of a worse fit. The rarest tokens, all those expected fewer than five times,
    count as one.
    """
    wanted, order = (probs.double() * counts.sum()).sort()
    seen = counts[order].double()
    assert seen[wanted == 0].sum() == 0, "a token of probability zero was drawn"
    few = int(max((wanted < 5).sum(), 1 + (wanted.cumsum(0) < 5).sum()))
    seen, wanted = (torch.cat((each[:few].sum()[None], each[few:])) for each in (seen, wanted))
    freedom = len(seen) - 1
    assert freedom > 0, "one kind of token always fits: draw more samples, or from a flatter law"
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2
    ).item()


def tiny_model(
    family: str, *, vocab: int = 3, layers: int = 3, seed: int = 0, hidden: int = 8
) -> Decoder:
    """A random real module in float64, small enough to enumerate; Gemma-2's window is two
    tokens.
    """
    model = Decoder(parse_config(small(family, vocab_size=vocab, layers=layers, hidden=hidden)))
    model.double().initialise(std=0.7, generator=torch.Generator().manual_seed(seed))
    return model.requires_grad_(False).eval()


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Sharp attention, norms that are not neutral, biases that are not zero; the same numbers in
    every dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() == 2:
            is_table = "embed" in name or "lm_head" in name
            parameter.copy_((0.5 if is_table else 1.5 / parameter.shape[1] ** 0.5) * values)
        else:
            parameter.add_(0.3 * values)


def random_model(raw: dict[str, Any], dtype: torch.dtype = torch.float64) -> Decoder:
    """This project's model of a config.json, with random weights that all matter."""
    model = Decoder(parse_config(raw)).to(dtype).requires_grad_(False).eval()
    model.initialise(std=1.0)  # else biases differ between processes
    randomise(model, 0)
    return model


def text_of(
    prompt: list[int],
    conditions: Conditions | None = None,
    token_bytes: TokenBytes | None = None,
    *,
    vocab: int = 11,
    positions: int = 1000,
) -> Text:
    """A text for any model of this size."""
    sizes = SimpleNamespace(vocab_size=vocab, max_positions=positions, device=torch.device("cpu"))
    return Text(prompt, conditions or Conditions(1000), sizes, token_bytes)


def small_draft_model(model: Decoder, cache: KVCache, tokens: int = 0) -> Drafter:
    """Another real module, with a separate cache, and ``tokens`` more or fewer."""
    vocab = model.vocab_size + tokens
    draft = tiny_model("llama", vocab=vocab, layers=1, seed=99).to(model.device)
    return ModelDrafter(draft, draft.new_cache(model.max_positions))


def low_bits(model: Decoder, cache: KVCache) -> Drafter:
    """Self-draft under a plan with every number of bits, in the head too."""
    plan = LayerPlan.skipping(3, [2], []).in_bits(4)
    return ModelDrafter(
        model, cache, replace(plan, attention=(FULL, *plan.attention[1:]), mlp=(8, *plan.mlp[1:]))
    )


# Drafters of real modules, under the names of the table models' where they correspond.
REAL_DRAFTERS: dict[str, NewDrafter] = {
    "plan": lambda model, cache: ModelDrafter(model, cache, LayerPlan.skipping(3, [0, 2], [1])),
    "exit": lambda model, cache: ModelDrafter(model, cache, LayerPlan.early_exit(3, 1)),
    "lowbit": low_bits,
    "window": lambda model, cache: ModelDrafter(model, cache, replace(LayerPlan.full(3), window=1)),
    "model": small_draft_model,
    "model of fewer tokens": partial(small_draft_model, tokens=-1),
    "model of more tokens": partial(small_draft_model, tokens=1),
    **NO_MODEL,
}

REAL_POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: FixedLength(3),
    "adaptive": lambda: AdaptiveExit(0.3, 4),
    "gated": lambda: ConfidenceGate(FixedLength(3), 0.4),
}


def prefilled(model: Any, prompt: Sequence[int], capacity: int | None = None) -> KVCache:
    """A cache that holds a prompt without its last token."""
    cache = model.new_cache(capacity or model.max_positions)
    with torch.inference_mode():
        model.prefill(torch.tensor([prompt[:-1]], dtype=torch.int64), cache)
    return cache


def speculative(
    p: Tensor, q: Tensor, residual: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], int]:
    """One token of the target p by a draft from q, as a user would write it."""

    def run() -> int:
        drafted = torch.multinomial(q, 1)
        if torch.rand(1) < p[drafted] / q[drafted]:
            return drafted.item()
        return torch.multinomial(residual(p, q), 1).item()

    return run


def scripted(*uniforms: float) -> SeededRandomness:
    """SeededRandomness with uniform numbers given in advance."""
    randomness = SeededRandomness(0)
    left = iter(uniforms)
    randomness.uniform = lambda count: torch.tensor(
        [next(left) for _ in range(count)], dtype=torch.float64
    )
    return randomness


def plans(layers: int = 3, bits: Sequence[int] = (*LOW_BITS, FULL)) -> st.SearchStrategy[LayerPlan]:
    """Plans that skip any sublayers, give the others any of these bits, and see a window or all."""
    some = st.lists(st.sampled_from((0, *bits)), min_size=layers, max_size=layers).map(tuple)
    window = st.none() | st.integers(1, 80)
    return st.builds(LayerPlan, some, some, st.sampled_from(bits), window)


if find_spec("decoding.auto"):  # it can be deleted
    from tests.quick_auto import auto

    for fixed in (False, True):
        name = "auto of fixed lengths" if fixed else "auto"
        TABLE_DRAFTERS[name] = partial(auto, self_draft, by_confidence=not fixed)
        REAL_DRAFTERS[name] = partial(auto, low_bits, step=0.1, by_confidence=not fixed)
