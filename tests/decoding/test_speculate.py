"""Laws of the loop beyond its distribution: greedy equality, budgets, caches, seeds, records, dead
ends.
"""

import re

import pytest
import torch
from torch import Tensor

from decoding import speculate as loop
from decoding import verify as rules
from decoding.drafters import CheckedDrafter, Draft, Drafter, ModelDrafter, NoDraft
from decoding.policies import ConfidenceGate, FixedLength, Policy
from decoding.proof.loop_law import Setup, run_loop
from decoding.proof.plain_law import Request
from decoding.proof.table_model import TableModel
from decoding.randomness import Place, SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams, one_hot
from decoding.text import Conditions, Text
from decoding.verify import Rule
from model.cache import KVCache
from model.decoder import Decoder
from tests.laws import Scripted, prefilled, tiny_model
from tests.refusal import refusal

VOCAB, PROMPT = 11, [3, 1, 4, 1, 5]


def write(
    model: Decoder,
    cache: KVCache,
    drafter: object,
    policy: Policy,
    *,
    params: SamplingParams = SamplingParams(),
    conditions: Conditions | None = None,
) -> list[Round]:
    text = Text(PROMPT, conditions or Conditions(20), model)
    return list(loop.speculate(model, cache, text, drafter, policy, params, SeededRandomness(0)))


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for round in rounds for token in round.emitted]


@torch.inference_mode()
def plainly_greedy(model: Decoder) -> list[int]:
    """Greedy decoding without a cache and without the loop."""
    tokens = list(PROMPT)
    for _ in range(20):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


class Breaking:
    """Drafter that returns a given object as its draft."""

    def __init__(self, draft: object) -> None:
        self.draft = draft

    def propose(self, *_: object) -> object:
        return self.draft

    def rollback(self, length: int) -> None:
        pass


class NoRollback:
    propose = Breaking.propose


IDS, UNIFORM = torch.tensor([1, 2]), torch.full((2, VOCAB), 1 / VOCAB)


@pytest.mark.parametrize(
    ("drafter", "broken"),
    [
        (Breaking(None), "must return a Draft of tensors, found None"),
        (Breaking(Draft([1, 2], UNIFORM)), "must return a Draft of tensors"),
        (
            Breaking(Draft(IDS.float(), UNIFORM)),
            r"int64 on cpu with k at most 4, found \[2\] torch.float32",
        ),
        (Breaking(Draft(IDS[None], UNIFORM)), r"`tokens` must be \[k\] int64 .* found \[1, 2\]"),
        (Breaking(Draft(IDS.repeat(3), UNIFORM.repeat(3, 1))), r"k at most 4, found \[6\]"),
        (
            Breaking(Draft(IDS, UNIFORM[:, 1:])),
            r"`probs` must be \[2, 11\] floats on cpu, found \[2, 10\]",
        ),
        (
            Breaking(Draft(IDS, UNIFORM.bool())),
            r"floats on cpu, found \[2, 11\] torch.bool",
        ),
        (Breaking(Draft(IDS, UNIFORM.to("meta"))), "torch.float32 on meta"),
        (Breaking(Draft(torch.tensor([1, VOCAB]), UNIFORM)), r"below 11, found \[1, 11\]"),
        (Breaking(Draft(torch.tensor([-1, 1]), UNIFORM)), r"from 0 and below 11, found \[-1, 1\]"),
        (Breaking(Draft(IDS, UNIFORM * torch.nan)), r"must sum to 1, found \[nan, nan\]"),
        (Breaking(Draft(IDS, UNIFORM.log())), "must sum to 1"),
        (NoRollback(), "it has no method `rollback`"),
    ],
)
def test_a_drafter_that_breaks_its_contract_ends_in_one_line_with_its_class(
    drafter: Drafter, broken: str
) -> None:
    model = tiny_model("llama", vocab=VOCAB)

    def run() -> None:
        checked = CheckedDrafter(drafter, model)
        write(model, prefilled(model, PROMPT), checked, FixedLength(4))

    said = refusal(run)
    assert re.search(f"drafter {type(drafter).__name__} .*{broken}", said)


def test_a_perfect_draft_is_accepted_whole_and_brings_a_bonus_token_up_to_the_budget() -> None:
    """Of 18 tokens; none that cannot be used is drafted."""
    model = tiny_model("llama", vocab=VOCAB)
    for params in (SamplingParams(), SamplingParams(1.0)):
        cache = prefilled(model, PROMPT)
        how = {"params": params, "conditions": Conditions(18)}
        rounds = write(model, cache, ModelDrafter(model, cache), FixedLength(4), **how)
        counts = [(len(r.drafted), r.accepted, len(r.emitted), r.finish) for r in rounds]
        assert counts == [(4, 4, 5, None)] * 3 + [(2, 2, 3, "length")]


def test_the_targets_confidence_is_its_raw_probability_of_its_own_token() -> None:
    model, params = tiny_model("llama", vocab=VOCAB), SamplingParams(0.7, top_k=3)
    rounds = write(
        model,
        prefilled(model, PROMPT),
        NoDraft(),
        ConfidenceGate(FixedLength(0), 0.5),
        params=params,
    )
    raw = model(torch.tensor([PROMPT + tokens_of(rounds)]))[0].softmax(-1)
    expected = [raw[round.position - 1, round.emitted[-1]].item() for round in rounds]
    assert [round.target_confidence for round in rounds] == pytest.approx(expected, abs=1e-6)


class Overflowing:
    """A target whose logits are non-finite after ``last`` positions."""

    def __init__(self, model: Decoder, last: int) -> None:
        self.model, self.last = model, last
        self.vocab_size, self.max_positions = model.vocab_size, model.max_positions
        self.device = model.device

    def __call__(self, tokens: Tensor, cache: KVCache, start: int) -> Tensor:
        logits = self.model(tokens, cache, start)
        logits[0, max(0, self.last - start) :] = torch.nan
        return logits


class Foreseeing(Breaking):
    """Drafter of the next four of the tokens it is given."""

    def propose(self, text: Text, limit: int, *_: object) -> Draft:
        tokens = torch.tensor(self.draft[len(text.generated) :][: min(limit, 4)])
        return Draft(tokens, one_hot(tokens, VOCAB))


@pytest.mark.parametrize("trouble", ["dead end", "non-finite"])
@pytest.mark.parametrize("rule", [Rule("ratio", 0), Rule("race", 0)], ids=str)
def test_tokens_accepted_before_the_trouble_are_kept_and_recorded(trouble: str, rule: Rule) -> None:
    """And the error names the place behind them."""
    model = tiny_model("llama", vocab=VOCAB)
    plain = plainly_greedy(model)
    last = len(PROMPT) + 2
    constraints = []
    target = Overflowing(model, last - 1)
    said = "stop being finite"
    if trouble == "dead end":
        everything = torch.ones(VOCAB, dtype=torch.bool)
        constraints = [lambda tokens: everything if len(tokens) < last else ~everything]
        target = model
        said = f"no token at position {last} of the text"
    text = Text(PROMPT, Conditions(20, constraints=constraints), model)
    how = FixedLength(4), SamplingParams(), rule.randomness(), rule.verify
    drafter = CheckedDrafter(Foreseeing(plain), model)
    rounds = loop.speculate(target, prefilled(model, PROMPT), text, drafter, *how)
    first = next(rounds)
    assert (first.drafted, first.accepted, first.emitted) == (plain[:4], 2, plain[:2])
    ended = Round(5, [1, 2, 3, 4], 3, [1, 2], [], "eos")
    assert [verdict for _, verdict in ended.verdicts()] == ["accepted"] * 2 + ["discarded"] * 2
    assert [verdict for _, verdict in first.verdicts()] == [
        *("accepted", "accepted", "rejected", "discarded")
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
    drawn = rules.verify_by_ratio(p, q, torch.tensor([drafted]), Scripted(*uniforms), Place(0))
    return tuple(each.item() for each in drawn)


def test_a_draft_in_float64_is_not_rounded_to_a_float32_target() -> None:
    """Rounded to float32, this q would be .1, and u = 1 - 1e-10 would accept."""
    p = torch.tensor([[0.1, 0.9], [0.5, 0.5]])
    q = torch.tensor([[p[0, 0].item() + 1e-10, 0.9]], dtype=torch.float64)
    assert by_ratio(p, q, 0, 1 - 1e-10, 0.0)[0] == 0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_logits_after_a_rejected_token_may_be_non_finite(broken: float) -> None:
    """Plain decoding never comes to a text that contains it, so an overflow there is no error."""
    target = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    always_two = torch.tensor([[0.0, 0.0, 1.0]] * 3, dtype=torch.float64)
    model = TableModel(target, always_two)
    model.tables[None][0] = torch.tensor([0.0, 0.0, broken])  # the row after a 2
    rounds: list[Round] = []
    run_loop(model, Request(max_new_tokens=6), Setup(), SeededRandomness(0), rounds)
    assert tokens_of(rounds) == [1, 0, 1, 0, 1, 0]
    assert (rounds[0].drafted, rounds[0].accepted) == ([2, 2], 0)
