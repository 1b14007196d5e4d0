"""The judge of foreign code: laws by hand, refusals, this project's own loop, and transformers."""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding.proof import __main__ as command
from decoding.proof import enumeration, loop_law, plain_law
from decoding.proof.foreign import (
    Comparison,
    Law,
    Refused,
    assert_lossless,
    law_of,
    total_variation,
)
from decoding.randomness import SeededRandomness
from decoding.sampling import SamplingParams
from tests.decoding.proof.foreign import bigrams, block_verification, clones, of_transformers
from tests.laws import speculative
from tests.mutants import TABLE

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)
LOGITS = P.log()
MADE = torch.Generator()
OTHER_AT_EACH_CALL = iter([P, P[:1]])
uniform_by_name = random.uniform
permutation_by_name = np.random.permutation

DRAWS: dict[str, Callable[[], Any]] = {
    "multinomial": lambda: torch.multinomial(P, 1)[0],
    "a given tensor": lambda: [
        drawn := torch.zeros(1, dtype=torch.int64),
        torch.multinomial(P, 1, out=drawn),
        drawn.item(),
    ][-1],
    "a method": lambda: P.multinomial(1).item(),
    "names": lambda: torch.multinomial(input=P, num_samples=1).item(),
    "Categorical": lambda: torch.distributions.Categorical(P).sample(),
    "Categorical of logits": lambda: torch.distributions.Categorical(logits=LOGITS).sample().item(),
    "race": lambda: torch.argmax(P / torch.empty_like(P).exponential_(1), dim=-1),
    "race of uniforms": lambda: (P / -torch.log(torch.rand_like(P))).argmax(-1),
    "Gumbel": lambda: (LOGITS + -torch.log(-torch.log(torch.rand(3)))).argmax(),
    "Gumbel of exponentials": lambda: (-torch.empty(3).exponential_().log() + LOGITS).argmax(),
    "race in place": lambda: [
        probs := P.clone(),
        probs.div_(torch.empty(3).exponential_()),
        probs.argmax(),
    ][-1],
    "inverse distribution": lambda: torch.searchsorted(P.cumsum(0), torch.rand(1), right=True)[0],
    "inverse distribution of one number": lambda: torch.searchsorted(P.cumsum(0), torch.rand(())),
    "first sum above": lambda: (P.cumsum(0) > torch.rand(())).int().argmax(),
    "logarithms": lambda: (P.cumsum(0).log() > torch.rand(()).log()).int().argmax(),
    "Python": lambda: 0 if (u := random.random()) < 0.5 else 1 if u < 0.8 else 2,
    "NumPy": lambda: int((np.random.rand(1)[0] >= P.cumsum(0)).sum()),
    "an array of NumPy's": lambda: (np.cumsum(P.numpy()) > np.random.random((1,))).int().argmax(),
    "NumPy's names": lambda: (P.numpy() / -np.log(np.random.random(size=3))).argmax(axis=-1),
    "speculative": speculative(P, Q, lambda p, q: (p - q).clamp(min=0)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_by_any_of_these_functions_has_its_law(name: str) -> None:
    law = law_of(DRAWS[name])
    assert not law.is_sampled
    assert law.probs == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=1e-7)


ROWS = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
FACTORS = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
LAWS: dict[str, tuple[Callable[[], Any], Any, float]] = {  # a result, and its probability
    "a number that decides twice": (
        lambda: ((u := torch.rand(2))[0] < 0.5, u.clone()[0] < 0.25),
        (True, True),
        0.25,
    ),
    "numbers from a generator with one seed": (
        lambda: [
            made := MADE.manual_seed(0),
            tuple(torch.rand(1, generator=made) < 0.5 for _ in range(2)),
        ][-1],
        ((True,), (True,)),
        0.25,
    ),
    "a factor that moves with its number": (
        lambda: (torch.rand(2, 2) * FACTORS).T[0, 1].item() < 1,
        True,
        0.25,
    ),
    "dropout that is off": (
        lambda: torch.nn.functional.dropout(P, training=False).multinomial(1).item(),
        0,
        0.5,
    ),
    "independent rows": (lambda: torch.multinomial(ROWS, 1), ((1,), (0,)), 0.125),
    "independent races": (
        lambda: (P / torch.empty(2, 3).exponential_()).argmax(-1),
        (2, 0),
        0.1,
    ),
    "samples without replacement": (lambda: torch.multinomial(P, 2), (0, 1), 0.3),
    "tosses": (lambda: torch.bernoulli(ROWS[:, 0]), (1.0, 0.0), 0.375),
    "tosses of names": (lambda: torch.bernoulli(input=ROWS[:, 0]), (1.0, 0.0), 0.375),
    "tosses in place, of a half": (lambda: ROWS[:, 0].clone().bernoulli_(), (1.0, 0.0), 0.25),
    "a race with a negative weight": (
        lambda: (torch.tensor([0.5, -0.25]) / torch.empty(2).exponential_()).argmax(),
        0,
        1.0,
    ),
    "a race of zeros": (
        lambda: (torch.zeros(2) / torch.empty(2).exponential_()).argmax(),
        0,
        1.0,
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_result_has_the_probability_found_by_hand(name: str) -> None:
    run, result, probability = LAWS[name]
    assert law_of(run).probs[result] == pytest.approx(probability)


def test_every_random_function_of_python_and_numpy_is_replaced_or_refused() -> None:
    """All but those that return the state. After an error too they are the libraries' again."""
    with pytest.raises(RuntimeError, match="sum of probabilities <= 0"):
        law_of(partial(torch.multinomial, torch.zeros(3), 1))
    for module, known in ((random, "getstate"), (np.random, "get_state")):
        before = vars(module).copy()
        names = {*module.__all__} - {known}
        kept = law_of(lambda: [name for name in names if vars(module)[name] is before[name]])  # noqa: B023
        assert kept.probs == {(): 1.0} and vars(module) == before
    assert torch.rand(1).__class__ is torch.Tensor


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: torch.randn(3).argmax(), "torch's randn"),
        (lambda: torch.rand(3).sum() < 1, "sum of u"),
        (lambda: float(torch.rand(1)), "__float__ of u"),
        (lambda: (torch.rand(3) + 1e-9).log(), "add of u"),
        (lambda: (P / torch.empty(3).exponential_()).topk(1), "topk of a race"),
        (lambda: (torch.rand(3) * 2).log() < 0, "log of u"),
        (lambda: (P / -(u := torch.rand(3)).log()).argmax() + (u[0] < 0.5), "decided a race"),
        (
            lambda: [(P / (e := torch.empty(3).exponential_())).argmax() > 0, (Q / e).argmax() > 0],
            "not independent",  # races that share their noise
        ),
        (lambda: (ROWS / torch.empty(2).exponential_()).argmax(-1), "not independent"),
        (lambda: (ROWS / torch.empty(2, 2).exponential_()).argmax(0), "argmax of a race"),
        (lambda: torch.rand(1).mul_(2), "mul_ of u"),
        (lambda: torch.ones(1).mul_(torch.rand(3)) < 0.5, "mul_ of u"),  # as torch refuses
        (lambda: torch.ones(3, dtype=torch.long).mul_(torch.rand(3)) < 0.5, "mul_ of u"),
        (lambda: torch.rand(1).lt_(0.5), "lt_ of u"),
        (lambda: LOGITS.add(-torch.empty(3).exponential_().log(), alpha=2), "add of G"),
        (lambda: random.choice([1, 2]), "random.choice"),
        (lambda: (torch.rand(1), torch.manual_seed(0)), "seed or state set after a draw"),
        (lambda: (torch.rand(1), torch.random.manual_seed(0)), "seed or state set after a draw"),
        (lambda: (random.random(), random.seed(0)), "seed or state set after a draw"),
        (
            lambda: [torch.rand(1, generator=MADE.manual_seed(0)) < 0.5 for _ in range(2)],
            "seed or state set after a draw",
        ),
        (lambda: round(random.random()), "round of u"),
        (lambda: torch.eye(3)[0].multinomial(2), "more samples than positive weights"),
        (lambda: (P - 0.25).multinomial(1), "element < 0"),
        (lambda: random.uniform(0, 1), "random.uniform"),
        (lambda: random.expovariate(1), "random.expovariate"),
        (lambda: random.Random(0), "random.Random"),
        (lambda: np.random.permutation(3), "numpy.random.permutation"),
        (lambda: np.random.RandomState(0), "numpy.random.RandomState"),
        (lambda: torch.nn.functional.dropout(P).argmax(), "torch is used where"),
        (lambda: uniform_by_name(0, 1) < 0.5, "random is used where"),
        (lambda: permutation_by_name(3)[0], "numpy.random is used where"),
        (lambda: torch.rand(1) * -1 > -0.3, "mul of u"),
        (lambda: torch.rand(1).to(torch.int64) < 0.5, "to of u"),
        (lambda: torch.rand(1).to(torch.tensor([1])) < 0.5, "to of u"),
        (lambda: torch.rand(1).type(torch.long) < 0.5, "type of u"),
        (lambda: np.random.default_rng(), "numpy.random.default_rng"),
        *(
            (lambda ends=ends: torch.empty(2).uniform_(*ends), "uniform_ .* but from 0 to 1")
            for ends in ((0, 2), (1, 1))
        ),
        (lambda: torch.rand(2)[0].uniform_(), "uniform_ of u"),
        (lambda: torch.nn.init.uniform_(torch.empty(1), 0, 2) < 0.5, "torch's uniform_"),
        (lambda: torch.nn.init.constant_(torch.rand(1), 1.0), "constant_ of u"),
        (
            lambda: torch.multinomial(next(OTHER_AT_EACH_CALL), 1),
            "did not begin from the same state",
        ),
        (lambda: np.sin(np.random.rand(3)), "sin of u"),
        (lambda: np.add.reduce(np.random.rand(3)), "numpy.add of a random number"),
        (lambda: torch.bernoulli(torch.rand(3)), "bernoulli of u"),
        (lambda: torch.stack([torch.rand(()), torch.rand(())]) < 0.5, "stack of u"),
        (
            lambda: torch.searchsorted(P, torch.rand(1), sorter=P.argsort()),
            "searchsorted of u",
        ),
        (lambda: torch.rand(1) * 0 <= 0, "times 0 cannot be compared with 0"),
        (lambda: (-P / torch.empty(3).exponential_()).argmax(), "negative weights"),
        (
            lambda: [a := np.zeros(1), torch.from_numpy(a).uniform_(), a[0] < 0.5][-1],
            "array of NumPy's",
        ),
        (
            lambda: [x := torch.zeros(1), a := x.numpy(), x.exponential_(), a[0] < 0.5][-1],
            "array of NumPy's",
        ),
        *(
            (lambda draw=draw: [x := torch.zeros(2), draw(x), x < 0.5], "part of a tensor")
            for draw in (
                lambda x: x[0].uniform_(),
                lambda x: x.view(-1).exponential_(),
                lambda x: torch.rand(1, out=x[:1]),
                lambda x: x[:1].add_(-torch.empty(1).exponential_().log()),
            )
        ),
    ],
)
def test_code_that_cannot_be_enumerated_is_refused_by_name(
    run: Callable[[], Any], said: str
) -> None:
    with pytest.raises((Refused, enumeration.ProofError, RuntimeError), match=said):
        law_of(run)


def test_a_law_of_too_many_paths_is_sampled_with_an_error_that_holds() -> None:
    law = law_of(lambda: torch.multinomial(P, 6, replacement=True)[:2], paths=700)
    exact = {(a, b): (P[a] * P[b]).item() for a in range(3) for b in range(3)}
    found = Comparison(Law(exact, len(exact)), law)
    assert 0 < found.distance < found.error < 0.1
    assert Comparison(law, law).error > 2 * found.error, "two bounds hold as surely as one"


def test_a_residual_that_is_p_is_found_with_the_results_that_differ_most() -> None:
    """A drafted token is rejected half of the time, and a is drawn too rarely then."""
    with pytest.raises(
        enumeration.ProofError, match=r"total variation 0.15 [^1]*\n1 +0.300000 +0.450000"
    ):
        assert_lossless(lambda: torch.multinomial(P, 1).item(), speculative(P, Q, lambda p, q: p))


# This project's loop, with the randomness of production


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.7, top_k=2)], ids=str)
def test_the_loop_with_its_own_random_numbers_has_plain_samplings_law(
    params: SamplingParams,
) -> None:
    request = plain_law.Request(params=params, max_new_tokens=3)
    law = law_of(lambda: loop_law.run_loop(TABLE, request, loop_law.Setup(), SeededRandomness(0)))
    assert total_variation(law.probs, plain_law.plain_law(TABLE, request)) < 1e-9
    assert law.paths > 30


# Block verification as a reader of its paper writes it


@pytest.mark.parametrize(
    ("mistake", "gamma", "is_lossless"),
    [  # with this number of drafted tokens: is it lossless?
        ("none", 2, True),
        ("first failure", 2, False),
        ("ratio residual", 2, False),
        ("ratio residual", 1, True),  # after one token both residuals are the same
        ("bonus residual", 1, False),
        ("raw q", 1, False),
    ],
)
def test_block_verification_from_the_paper_is_found_lossless_but_with_a_mistake(
    mistake: str, gamma: int, is_lossless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_verification, "GAMMA", gamma)
    monkeypatch.setattr(bigrams, "TOKENS", 2)
    found = Comparison(law_of(bigrams.plain), law_of(lambda: block_verification.write(mistake)))
    assert found.is_within(1e-9) == is_lossless


# transformers, unchanged

FAST = ("top-k", "top-p", "min-p", "n-grams", "suppressed tokens", "end of text")


@pytest.mark.parametrize("draft", of_transformers.ASSISTED)
@pytest.mark.parametrize(
    "parameters",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.prove)
        for name in of_transformers.SETS
    ],
)
def test_assisted_generation_of_transformers_has_its_plain_samplings_law(
    parameters: str, draft: str
) -> None:
    """Its logits are float32, so the laws differ by rounding."""
    plain = partial(of_transformers.plain, parameters)
    assert_lossless(plain, partial(plain, **of_transformers.ASSISTED[draft]))


# Clones that a reader names

CLONES = {
    "GPT_FAST": "gpt_fast",
    "LLM_SPECULATIVE_SAMPLING": "without_cache",
    "ROMSTO": "romsto",
    "LAYERSKIP": "layerskip",
    "DRAFT_AND_VERIFY": "draft_and_verify",
    "SWIFT": "swift",  # with an epsilon of 1e-6
}


@pytest.mark.parametrize("variable", CLONES)
def test_a_clone_has_plain_samplings_law(variable: str) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no clone: see docs/judge.md")
    assert_lossless(bigrams.plain, getattr(clones, CLONES[variable]))


# The command

USERS = """
import torch
P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.1, 0.8, 0.1])

def plain():
    return torch.multinomial(P, 1).item()

def wrong():
    drafted = torch.multinomial(Q, 1)
    if torch.rand(1) < P[drafted] / Q[drafted]:
        return drafted.item()
    return torch.multinomial(P, 1).item()

def long():
    return torch.multinomial(P, 9, replacement=True).tolist()

def noisy():
    return torch.randn(3).argmax().item()

def broken():
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("files", "status", "told"),
    [
        ("users.py:plain users.py:wrong", 1, "total variation 0.15 (3 and 6 paths, enumerated)"),
        ("users.py:plain users.py:wrong", 1, "speculative 1 0.300000 0.450000 0 0.500000"),
        ("users.py:plain users.py:plain", 0, "total variation 0 (3 and 3 paths, enumerated)"),
        (
            "users.py:long users.py:long --paths 20",
            2,
            "so allow more paths (--paths), or shorten the texts",
        ),
        ("users.py:plain users.py:long --paths 4", 2, "may differ by 1.1 by chance"),
        ("users.py:plain users.py:noisy", 2, "randn cannot be enumerated"),
        ("users.py:plain users.py:broken", 2, "division by zero"),
        ("users.py:plain users.py:missing", 2, "has no function missing"),
        ("nothing.py:a b", 2, "error: "),
        ("users.py:plain users.py:plain --paths 0", 2, "--paths at least 1"),
    ],
)
def test_the_command_prints_the_distance_and_what_differs(
    files: str,
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("users.py").write_text(USERS)
    assert command.main(files.split()) == status
    said = " ".join("".join(capsys.readouterr()).split())
    assert told in said and "Traceback" not in said
