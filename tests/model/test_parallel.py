"""A decoder split over two and three processes computes, and writes, what it does in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from decoding.proof.judge import Setup, run_loop
from decoding.proof.plain_law import Request, plain_law
from decoding.randomness import KeyedRandomness, SeededRandomness
from decoding.sampling import SamplingParams
from model import Decoder, InputError, LayerPlan, parse_config
from model.diagnose import explain_nonfinite
from model.parallel import Share
from tests.configs import small
from tests.laws import REAL_DRAFTERS, deviation
from tests.ranks import Leader, leading

EXACT = 1e-9
FAMILIES = ["llama", "gemma2"]
DRAFTERS = {name: make for name, make in REAL_DRAFTERS.items() if name not in ("lowbit", "best of")}


def config(family: str, size: int, **changes: Any) -> dict[str, Any]:
    """A model whose heads divide over so many processes, with biases. Its MLP and vocabulary do not over three."""
    shape = {"num_attention_heads": 2 * size, "num_key_value_heads": size, "hidden": 12, "vocab_size": 4}
    biases = {"attention_bias": True} | ({"mlp_bias": True} if family == "llama" else {})
    return small(family, **{**shape, "intermediate_size": 10, "tie_word_embeddings": False, **biases, **changes})


@pytest.fixture(scope="module", params=[2, 3])
def leader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leader]:
    with leading(request.param, tmp_path_factory.mktemp("meeting") / "place") as leader:
        yield leader


@pytest.fixture(params=FAMILIES)
def models(request: pytest.FixtureRequest, leader: Leader) -> Iterator[tuple[Decoder, Decoder]]:
    """Whole and split."""
    with leader.shared(config(request.param, leader.size)) as models:
        yield models


SHAPES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one key head for all": {"num_key_value_heads": 1},
    "a vocabulary that divides": {"vocab_size": 12},
    "tied, and divides": {"vocab_size": 12, "tie_word_embeddings": True},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_logits_and_cache_are_those_of_one_process(leader: Leader, family: str, shape: str) -> None:
    """Of a prompt read in two parts, of steps after it under every kind of plan, and after a rollback."""
    tokens = torch.tensor([[3, 1, 0, 1, 2, 2, 0, 2, 3, 2]])
    plans = [None, LayerPlan.early_exit(3, 1), LayerPlan.skipping(3, [1], [0, 2])]
    with leader.shared(config(family, leader.size, **SHAPES[shape])) as models:
        logits = []
        for model in models:
            cache = model.new_cache(16)
            model.prefill(tokens[:, :4], cache)
            parts = [model(tokens[:, 4:7], cache, 4)]
            for plan in plans:
                cache.truncate(6)
                parts += [model(tokens[:, 6:9], cache, 6, plan), model(tokens[:, 9:], cache, cache.length, plan)]
            parts.append(model(tokens))
            logits.append(torch.cat(parts, 1))
            assert logits[-1].shape[-1] == model.vocab_size
        torch.testing.assert_close(*logits, rtol=0, atol=EXACT)


def fixed() -> Policy:
    return FixedLength(3)


def gated() -> Policy:
    return ConfidenceGate(AdaptiveExit(0.3, 4), 0.2)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_and_seeded_texts_are_those_of_one_process_token_for_token(
    models: tuple[Decoder, Decoder], drafter: str
) -> None:
    greedy, drawn = (
        Request(prompt=(1, 0, 2, 1, 2), params=SamplingParams(temperature), max_new_tokens=8) for temperature in (0, 1)
    )
    for asked, policy, coupling, randomness in (
        (greedy, fixed, "ratio", SeededRandomness),
        (drawn, gated, "ratio", SeededRandomness),
        (drawn, fixed, "race", KeyedRandomness),
    ):
        setup = Setup(DRAFTERS[drafter], policy)
        one, several = (run_loop(model, asked, setup, randomness(7), coupling=coupling) for model in models)
        assert one == several


@pytest.mark.parametrize(
    ("drafter", "request_"),
    [
        ("plan", Request(max_new_tokens=2)),
        ("exit", Request(params=SamplingParams(0.8, top_p=0.7), max_new_tokens=2, eos_ids=frozenset({1}))),
        ("lookup", Request(prompt=(0, 1, 0), max_new_tokens=2, banned=("ab",))),
    ],
    ids=["plan", "exit, top-p and end of text", "lookup and a ban"],
)
def test_the_law_of_a_split_model_is_plain_samplings(leader: Leader, drafter: str, request_: Request) -> None:
    """Enumerated, as in the exact-law suite; the law is computed from the whole model."""
    if leader.size > 2:
        pytest.skip("a law is the same walk over two processes as over three")
    with leader.shared(config("gemma2", leader.size, vocab_size=3)) as (whole, split):
        setup = Setup(REAL_DRAFTERS[drafter])
        expected = plain_law(Rows(whole), request_)
        assert deviation(lambda randomness: run_loop(split, request_, setup, randomness), expected) < EXACT


class Rows:
    """A module as the law asks for it: each row from a fresh run over the whole history, without a cache."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.vocab_size = model, model.vocab_size

    @torch.inference_mode()
    def row(self, history: Any) -> torch.Tensor:
        return self.model(torch.tensor([history]))[0, -1]


def test_the_caches_of_followers_are_let_go_when_their_number_is_given_again(models: tuple[Decoder, Any]) -> None:
    split = models[1]
    first, second = split.new_cache(4), split.new_cache(4)
    assert [split.slots[cache] for cache in (first, second)] == [0, 1]
    del first
    assert split.slots[split.new_cache(4)] == 0


def test_where_numbers_break_is_found_in_a_split_model(models: tuple[Decoder, Any]) -> None:
    """The text runs again on all processes alike."""
    for model in models:
        norm = model.layers[1].mlp.gate_proj.weight
        kept = norm.clone()
        norm.fill_(float("inf"))
        error = explain_nonfinite(model, model.new_cache(8), torch.tensor([1, 2, 3, 1]))
        assert "in the MLP of layer 1:" in str(error)
        norm.copy_(kept)


def test_ctrl_c_takes_effect_between_passes_so_that_the_others_can_be_let_go(models: tuple[Decoder, Any]) -> None:
    split = models[1]
    cache = split.new_cache(8)
    split.interrupt()
    with pytest.raises(KeyboardInterrupt), torch.inference_mode():
        split(torch.tensor([[1, 2]]), cache, 0)
    with torch.inference_mode():  # they still follow
        assert split(torch.tensor([[1, 2]]), cache, 0).isfinite().all()


def test_low_bits_are_refused_before_anyone_computes(models: tuple[Decoder, Any]) -> None:
    split, plan = models[1], LayerPlan.full(3).in_bits(4)
    for ask in (lambda: split.twins.prepare(plan), lambda: split(torch.tensor([[1]]), split.new_cache(2), 0, plan)):
        with pytest.raises(InputError, match="does not draft in low bits"):
            ask()


@pytest.mark.parametrize(
    ("heads", "shared", "size", "fit"),
    [(4, 1, 3, "1 or 2 or 4"), (9, 3, 2, "1 or 3 or 9"), (12, 3, 2, "1 or 3 or 6 or 12"), (2, 1, 3, "1 or 2")],
)
def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do(
    heads: int, shared: int, size: int, fit: str
) -> None:
    config = parse_config(small(num_attention_heads=heads, num_key_value_heads=shared))
    said = f"{heads} query heads and {shared} key/value heads do not divide over {size} processes: start {fit}$"
    with pytest.raises(InputError, match=said):
        Share(config, 0, size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3, 6])
def test_shares_make_the_whole_and_each_number_has_one_holder_but_shared_key_heads(family: str, size: int) -> None:
    whole = parse_config(
        config(family, 3, vocab_size=12, num_attention_heads=6, num_key_value_heads=3 if size == 3 else 1)
    )
    for name, length in (
        ("layers.0.self_attn.q_proj.weight", 24),
        ("layers.0.self_attn.o_proj.weight", 24),
        ("layers.0.mlp.gate_proj.bias", 10),
        ("layers.0.mlp.down_proj.weight", 10),
        ("embed_tokens.weight", 12),
        ("lm_head.weight", 12),
    ):
        held = [index for rank in range(size) for index in Share(whole, rank, size).cut(name)[1]]
        assert held == list(range(length)), name
    keys = {
        index for rank in range(size) for index in Share(whole, rank, size).cut("layers.0.self_attn.k_proj.bias")[1]
    }
    assert keys == set(range(4 * whole.num_kv_heads))
    assert Share(whole, 1, size).cut("layers.0.self_attn.o_proj.bias") is None
