"""Laws of the loop beyond its distribution: the contract of drafters, budgets, records, dead ends,
numbers that are not finite.
"""

import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from decoding import speculate as loop
from decoding import verify as rules
from decoding.drafters import CheckedDrafter, Draft, Drafter, ModelDrafter, NoDraft
from decoding.policies import ConfidenceGate, FixedLength, Policy
from decoding.proof import loop_law, plain_law, table_model
from decoding.randomness import Place, SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams, one_hot
from decoding.text import Conditions, Text
from decoding.verify import Rule
from model.cache import KVCache
from model.decoder import Decoder
from tests.laws import prefilled, scripted, tiny_model
from tests.refusal import refusal

VOCAB, PROMPT = 11, [3, 1, 4, 1, 5]


def write(
    model: Decoder,
    drafter: object,
    policy: Policy,
    *,
    params: SamplingParams = SamplingParams(),
    conditions: Conditions | None = None,
    cache: KVCache | None = None,
) -> list[Round]:
    text = Text(PROMPT, conditions or Conditions(20), model)
    cache = cache or prefilled(model, PROMPT)
    return list(
        loop.speculate(
            *(model, cache, text, drafter, policy, params),
            SeededRandomness(0),
            rules.verify_by_ratio,
        )
    )


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for round in rounds for token in round.emitted]


def breaking(draft: object) -> Mock:
    """A drafter that returns this object as its draft."""
    return Mock(propose=lambda *_: draft)


IDS, UNIFORM = torch.tensor([1, 2]), torch.full((2, VOCAB), 1 / VOCAB)


@pytest.mark.parametrize(
    ("drafter", "broken"),
    [
        (breaking(None), "must return a Draft of tensors, found None"),
        (breaking(Draft([1, 2], UNIFORM)), "must return a Draft of tensors"),
        (
            breaking(Draft(IDS.float(), UNIFORM)),
            r"int64 on cpu with k at most 4, found \[2\] torch.float32",
        ),
        (breaking(Draft(IDS[None], UNIFORM)), r"`tokens` must be \[k\] int64 .* found \[1, 2\]"),
        (breaking(Draft(IDS.repeat(3), UNIFORM.repeat(3, 1))), r"k at most 4, found \[6\]"),
        (
            breaking(Draft(IDS, UNIFORM[:, 1:])),
            r"`probs` must be \[2, 11\] floats on cpu, found \[2, 10\]",
        ),
        (
            breaking(Draft(IDS, UNIFORM.bool())),
            r"floats on cpu, found \[2, 11\] torch.bool",
        ),
        (breaking(Draft(IDS, UNIFORM.to("meta"))), "torch.float32 on meta"),
        (breaking(Draft(torch.tensor([1, VOCAB]), UNIFORM)), r"below 11, found \[1, 11\]"),
        (breaking(Draft(torch.tensor([-1, 1]), UNIFORM)), r"from 0 and below 11, found \[-1, 1\]"),
        (breaking(Draft(IDS, UNIFORM * torch.nan)), r"must sum to 1, found \[nan, nan\]"),
        (breaking(Draft(IDS, UNIFORM.log())), "must sum to 1"),
        (
            breaking(Draft(IDS, 1.5 * torch.eye(VOCAB)[IDS] - 0.5 * torch.eye(VOCAB)[[0, 0]])),
            "must not be negative, found -0.5",
        ),
        (Mock(spec=["propose"]), "it must have the methods `propose` and `rollback`"),
        (Mock(propose=3), "it must have the methods `propose` and `rollback`"),
    ],
)
def test_a_drafter_that_breaks_its_contract_ends_in_one_line_with_its_class(
    drafter: Drafter, broken: str
) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    said = refusal(lambda: write(model, CheckedDrafter(drafter, model), FixedLength(4)))
    assert re.search(f"drafter {type(drafter).__name__} .*{broken}", said)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)], ids=str)
def test_a_perfect_draft_is_accepted_whole_and_brings_a_bonus_token_up_to_the_budget(
    params: SamplingParams,
) -> None:
    """Of 18 tokens; none that cannot be used is drafted."""
    model = tiny_model("llama", vocab=VOCAB)
    cache = prefilled(model, PROMPT)
    rounds = write(
        model,
        ModelDrafter(model, cache),
        FixedLength(4),
        params=params,
        conditions=Conditions(18),
        cache=cache,
    )
    counts = [(len(r.drafted), r.accepted, len(r.emitted), r.finish) for r in rounds]
    assert counts == [(4, 4, 5, None)] * 3 + [(2, 2, 3, "length")]


def test_the_targets_confidence_is_its_raw_probability_of_its_own_token() -> None:
    model, params = tiny_model("llama", vocab=VOCAB), SamplingParams(0.7, top_k=3)
    rounds = write(model, NoDraft(), ConfidenceGate(FixedLength(0), 0.5), params=params)
    raw = model(torch.tensor([PROMPT + tokens_of(rounds)]))[0].softmax(-1)
    expected = [raw[round.position - 1, round.emitted[-1]].item() for round in rounds]
    assert [round.target_confidence for round in rounds] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("is_dead_end", "said"),
    [(True, "no token at position 7 of the text"), (False, "stop being finite")],
)
@pytest.mark.parametrize("rule", [Rule("ratio", 0), Rule("race", 0)], ids=str)
def test_tokens_accepted_before_the_trouble_are_kept_and_recorded(
    is_dead_end: bool, said: str, rule: Rule
) -> None:
    """And the error names the place behind them."""
    model = tiny_model("llama", vocab=VOCAB)
    plain = tokens_of(write(model, NoDraft(), FixedLength(0)))
    last = len(PROMPT) + 2

    def overflow(module: object, given: tuple[Any, ...], logits: Tensor) -> None:
        logits[0, max(0, last - 1 - given[2]) :] = torch.nan

    def foresee(text: Text, limit: int, *_: object) -> Draft:
        tokens = torch.tensor(plain[len(text.generated) :][:limit])
        return Draft(tokens, one_hot(tokens, VOCAB))

    constraints = [lambda tokens: torch.full((VOCAB,), len(tokens) < last)] * is_dead_end
    cache = prefilled(model, PROMPT)
    if not is_dead_end:
        model.register_forward_hook(overflow)
    text = Text(PROMPT, Conditions(20, constraints=constraints), model)
    how = FixedLength(4), SamplingParams(), rule.randomness(), rule.verify
    drafter = CheckedDrafter(Mock(propose=foresee), model)
    rounds = loop.speculate(model, cache, text, drafter, *how)
    first = next(rounds)
    assert (first.drafted, first.accepted, first.emitted) == (plain[:4], 2, plain[:2])
    ended = Round(5, [1, 2, 3, 4], 3, [1, 2], [], "eos")
    verdicts = [[verdict for _, verdict in round.verdicts()] for round in (first, ended)]
    assert verdicts == [
        ["accepted"] * 2 + [then, "discarded"] for then in ("rejected", "discarded")
    ]
    assert said in refusal(next, rounds)
    assert text.generated == plain[:2]


def test_an_all_zero_residual_draws_from_the_target() -> None:
    """Where p = q up to rounding, the residual is all zeros; the draw is then from p, not from
    NaN.
    """
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.5, 0.5 + 1e-7, 0.0]])
    assert by_ratio(p, q, 1, 0.99999999, 0.9) == (0, 1)


def by_ratio(p: Tensor, q: Tensor, drafted: int, *uniforms: float) -> tuple[int, int]:
    """Accepted tokens, and the token that follows, at these random numbers."""
    drawn = rules.verify_by_ratio(p, q, torch.tensor([drafted]), scripted(*uniforms), Place(0))
    return tuple(each.item() for each in drawn)


def test_a_draft_in_float64_is_not_rounded_to_a_float32_target() -> None:
    """Rounded to float32, this q would be .1, and u = 1 - 1e-10 would accept."""
    p = torch.tensor([[0.1, 0.9], [0.5, 0.5]])
    q = torch.tensor([[p[0, 0].item() + 1e-10, 0.9]], dtype=torch.float64)
    assert by_ratio(p, q, 0, 1 - 1e-10, 0.0)[0] == 0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_logits_after_a_rejected_token_may_be_non_finite(broken: float) -> None:
    """Plain decoding never comes to a text that contains it, so an overflow there is no error."""
    target = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    always_two = torch.tensor([[0.0, 0.0, 1.0]] * 3, dtype=torch.float64)
    model = table_model.TableModel(target, always_two)
    model.tables[None][2] = torch.tensor([0.0, 0.0, broken])  # the row after a rejected 2
    rounds: list[Round] = []
    request = plain_law.Request(max_new_tokens=6)
    loop_law.run_loop(model, request, loop_law.Setup(), SeededRandomness(0), on_round=rounds.append)
    assert tokens_of(rounds) == [1] * 6
    assert (rounds[0].drafted, rounds[0].accepted) == ([2, 2], 0)
