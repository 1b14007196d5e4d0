"""Tensor parallelism: logits and texts of a decoder split over two and three processes are those of
one.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.chooser import Drafting
from app.ranks import decide_as_rank_0
from app.writer import Writer
from decoding.break_even import BreakEven
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Rule
from model import Decoder, LayerPlan, Shard, parse_config
from tests.configs import FAMILIES, small
from tests.laws import EXACT, REAL_DRAFTERS, random_model
from tests.ranks import Ranks, joined, split_model
from tests.refusal import refusal


def config(family: str, size: int, **changes: Any) -> dict[str, Any]:
    """Config with biases, whose heads divide over ``size`` processes; over three, MLP and
    vocabulary do not.
    """
    shape = {
        "num_attention_heads": 2 * size,
        "num_key_value_heads": size,
        "hidden": 12,
        "intermediate_size": 10,
        "vocab_size": 4,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": family == "llama",
    }
    return small(family, **shape | changes)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    with joined(request.param, tmp_path_factory.mktemp("meeting") / "place") as ranks:
        yield ranks


SHAPES: dict[str, dict[str, Any]] = {
    "two query heads per key head": {},
    "one key head": {"num_key_value_heads": 1},
    "a vocabulary that divides": {"vocab_size": 12},
    "tied": {"tie_word_embeddings": True},
}


@torch.inference_mode()
def logits_of(model: Decoder) -> Tensor:
    """Logits of a prompt read in two parts, of steps after it under every kind of plan, and after a
    rollback.
    """
    tokens = torch.tensor([[3, 1, 0, 1, 2, 2, 0, 2, 3, 2]])
    cache = model.new_cache(16)
    model.prefill(tokens[:, :4], cache)
    parts = [model(tokens[:, 4:7], cache, 4)]
    for plan in (None, LayerPlan.early_exit(3, 1), LayerPlan.skipping(3, [1], [0, 2])):
        cache.truncate(6)
        parts += [
            model(tokens[:, 6:9], cache, 6, plan),
            model(tokens[:, 9:], cache, cache.length, plan),
        ]
    return torch.cat([*parts, model(tokens)], 1)


def split_logits(config: dict[str, Any]) -> Tensor:
    return logits_of(split_model(config))


FEW = "two query heads per key head"
CASES = [(family, FEW) for family in FAMILIES]
CASES += [(family, shape) for family in ("llama", "gemma2") for shape in SHAPES if shape != FEW]


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_logits_on_every_rank_are_those_of_one_process(
    ranks: Ranks, family: str, shape: str
) -> None:
    shaped = config(family, ranks.size, **SHAPES[shape])
    first, *others = ranks.run(split_logits, shaped)
    torch.testing.assert_close(first, logits_of(random_model(shaped)), rtol=0, atol=EXACT)
    assert all(torch.equal(other, first) for other in others)


fixed = partial(FixedLength, 3)


def gated() -> Policy:
    return ConfidenceGate(AdaptiveExit(0.6, 4), 0.4)


def break_even() -> Policy:
    """With different slopes on every rank."""
    slope = 0.2 + dist.get_rank()
    return BreakEven({"model": slope, "known": slope}, 3)


Asked = tuple[str, Callable[[], Policy], str, float]


def text_by(writer: Writer, asked: Asked, seed: int) -> list[int]:
    """A text of 8 tokens: by a drafter and a policy, under a rule, at a temperature."""
    drafter, policy, coupling, temperature = asked
    writer.begin([1, 0, 2, 1, 2])
    drafting = Drafting(drafter, lambda cache: REAL_DRAFTERS[drafter](writer.model, cache), policy)
    rules, rule = SamplingParams(temperature), Coupling(coupling, seed)
    return writer.write(writer.new_text(Rules(8)), drafting, rules, rule).tokens


def text_on_rank(config: dict[str, Any], asked: Asked) -> list[int]:
    """The text, on ranks with different seeds, logits and costs."""
    rank, model = dist.get_rank(), split_model(config)
    noise = torch.randn(
        model.vocab_size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )
    model.register_forward_hook(lambda module, inputs, logits: logits + 10 * rank * noise)
    return text_by(Writer(model, 64, decide=decide_as_rank_0), asked, 7 + rank)


@pytest.mark.parametrize("drafter", REAL_DRAFTERS)
def test_every_rank_writes_the_text_of_rank_0_which_is_that_of_one_process(
    ranks: Ranks, drafter: str
) -> None:
    shaped = config(("llama", "gemma2")[ranks.size - 2], ranks.size)
    policy = break_even if drafter == "best of" else gated
    several: list[Asked] = [(drafter, fixed, "ratio", 0.0), (drafter, policy, "race", 1.0)]
    # shards are rounded separately, so their drafts differ
    if drafter not in ("lowbit", "best of"):
        several.append((drafter, policy, "ratio", 1.0))
    for asked in several:
        expected = text_by(Writer(random_model(shaped), 64), asked, 7)
        assert ranks.run(text_on_rank, shaped, asked) == [expected] * ranks.size


@pytest.mark.parametrize(
    ("heads", "shared", "size", "fit"), [(4, 1, 3, "1, 2, 4"), (12, 3, 2, "1, 3, 6, 12")]
)
def test_heads_that_do_not_divide_are_refused_with_numbers_that_do(
    heads: int, shared: int, size: int, fit: str
) -> None:
    config = parse_config(small(num_attention_heads=heads, num_key_value_heads=shared))
    said = refusal(Shard, config, 0, size)
    assert said.endswith(f"do not divide over {size} processes: start one of [{fit}]")
