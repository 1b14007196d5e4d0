"""The law of every drafter, policy and rule equals plain sampling's, by enumeration of the
production loop.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations, product
from random import Random

import pytest
import torch
from torch import Tensor

from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength
from decoding.proof import enumeration, loop_law, table_model
from decoding.proof.plain_law import Request
from decoding.randomness import KeyedRandomness, Randomness, SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.verify import RULES
from model.decoder import Decoder
from tests.configs import FAMILIES
from tests.laws import (
    EXACT,
    REAL_DRAFTERS,
    TABLE_DRAFTERS,
    prefilled,
    random_tables,
    tiny_model,
)
from tests.refusal import refusal


def no_letter_twice(tokens: Sequence[int], eos_ids: frozenset[int]) -> Tensor:
    """A constraint with dead ends: no token may follow itself, and after token 1 came twice nothing
    may follow. Like many grammars, it is undefined after the end of the text.
    """
    generated = tokens[1:]
    assert not eos_ids & set(generated), "called with tokens after the end of the text"
    ended = list(tokens).count(1) > 1
    return torch.tensor([not ended and token != tokens[-1] for token in range(3)])


# The axes. The first value of each is its plainest.
AXES: dict[str, dict[str, object]] = {
    "drafter": TABLE_DRAFTERS,
    "params": {
        "temperature 1": SamplingParams(1.0),
        "greedy": SamplingParams(0.0),
        "temperature .6": SamplingParams(0.6),
        "top-k 2": SamplingParams(1.0, top_k=2),
        "top-p .7": SamplingParams(0.8, top_p=0.7),
        "min-p .3": SamplingParams(1.3, min_p=0.3),
        "penalty 1.5": SamplingParams(1.0, repetition_penalty=1.5),
        "subtracted": SamplingParams(1.0, frequency_penalty=0.8, presence_penalty=-0.5),
        "everything": SamplingParams(0.9, 2, 0.9, 0.1, 0.8, 0.6, 0.4),
    },
    "policy": {
        "fixed 2": lambda: FixedLength(2),
        "fixed 1": lambda: FixedLength(1),
        "fixed 0": lambda: FixedLength(0),
        "adaptive": lambda: AdaptiveExit(0.45, 2, step=0.15),
        "gate": lambda: ConfidenceGate(FixedLength(2), 0.4),
        "gate on adaptive": lambda: ConfidenceGate(AdaptiveExit(0.5, 2), 0.3),
    },
    "stop": {
        "budget": {},
        "eos": {"eos_ids": frozenset({1})},
        "two eos": {"eos_ids": frozenset({2, 0})},
        "stop string": {"stop_strings": ("ba",)},
        "eos and stop strings": {"eos_ids": frozenset({2}), "stop_strings": ("bb", "aa")},
    },
    "allowed": {
        "free": {},
        "constraint": {"constraints": (no_letter_twice,)},
        "banned": {"banned": ("bb",)},
        # Two tokens, since repeated retractions make too many paths for a third, as they do above
        # in some tables.
        "banned from the prompt": {"banned": ("aa", "ba"), "prompt": (1, 0), "max_new_tokens": 2},
        "banned and constraint": {"banned": ("ab",), "constraints": (no_letter_twice,)},
    },
}


def every_pair(axes: dict[str, dict[str, object]]) -> list[dict[str, str]]:
    """Cases such that any two values of any two axes meet in at least one of them (greedy covering
    array).
    """
    names = list(axes)
    missing = {
        ((a, x), (b, y)) for a, b in combinations(names, 2) for x in axes[a] for y in axes[b]
    }
    every_case = [tuple(zip(names, values, strict=True)) for values in product(*axes.values())]
    pairs_of = {case: set(combinations(case, 2)) for case in every_case}
    cases = []
    while missing:
        best = max(every_case, key=lambda case: len(missing & pairs_of[case]))
        missing -= pairs_of[best]
        cases.append(dict(best))
    return cases


def random_row(random: Random, vocab: int) -> list[float]:
    """One distribution: mostly generic, sometimes with a zero, with ties, or one-hot."""
    weights = [random.uniform(0.1, 1.0) for _ in range(vocab)]
    one = random.randrange(vocab)
    special = {
        "zero": [weight * (token != one) for token, weight in enumerate(weights)],
        "tie": [1.0 + round(weight) for weight in weights],
        "one-hot": [float(token == one) for token in range(vocab)],
    }
    weights = special.get(random.choice([*special, *["generic"] * 3]), weights)
    return [weight / sum(weights) for weight in weights]


def mixed_tables(
    random: Random, kind: str, vocab: int = 3, states: int = 4
) -> table_model.TableModel:
    """Target and draft tables: "unrelated", "equal", or the draft's supports "shifted" (disjoint
    from one-hots).
    """
    target = [random_row(random, vocab) for _ in range(states)]
    draft = {
        "unrelated": [random_row(random, vocab) for _ in range(states)],
        "shifted": [row[1:] + row[:1] for row in target],
        "equal": target,
    }[kind]
    return table_model.TableModel(
        *(torch.tensor(rows, dtype=torch.float64) for rows in (target, draft))
    )


KINDS = ["unrelated", "shifted", "equal"]
# All rules but the race, which is enumerated over two tokens only: a new rule is proven here.
RULES_OF_ANY_SIZE = [rule for rule in RULES if rule != "race"]


def case_deviation(
    model: table_model.TableModel | Decoder,
    case: dict[str, str],
    max_new_tokens: int,
    drafters: dict[str, object] = AXES["drafter"],
    rule: str = "ratio",
) -> float:
    """Distance of the production loop's law from plain sampling's in one case of the axes (first
    values by default).
    """
    chosen = {
        axis: values[case.get(axis, next(iter(values)))]
        for axis, values in (AXES | {"drafter": drafters}).items()
    }
    conditions = {"max_new_tokens": max_new_tokens, **chosen["stop"], **chosen["allowed"]}
    eos_ids = conditions.get("eos_ids", frozenset())
    constraints = [partial(each, eos_ids=eos_ids) for each in conditions.pop("constraints", ())]
    request = Request(params=chosen["params"], constraints=constraints, **conditions)
    return loop_law.bias(model, request, loop_law.Setup(chosen["drafter"], chosen["policy"]), rule)


@pytest.mark.parametrize("case", every_pair(AXES), ids=lambda case: ", ".join(case.values()))
def test_every_pair_of_axes_keeps_the_law(case: dict[str, str]) -> None:
    longest = 2 if case["allowed"] == "banned" else 3
    lengths = [longest, 3, 3, 2, 2, 2, 2, 1, 1, 1]
    if case["allowed"] == "banned from the prompt":  # its texts have two tokens, of many paths
        lengths = lengths[:4]
    for number, length in enumerate(lengths):
        model = mixed_tables(Random(f"{case} {number}"), KINDS[number % 3])
        for rule in RULES_OF_ANY_SIZE[: len(RULES_OF_ANY_SIZE) - number % 2]:
            assert case_deviation(model, case, length, rule=rule) < EXACT


def test_a_text_ends_where_the_models_context_is_full() -> None:
    request = Request(prompt=(0,) * 62, max_new_tokens=4)
    assert loop_law.bias(random_tables(0, 4, 3), request, loop_law.Setup()) < EXACT


@pytest.mark.parametrize(
    ("prompt", "rule", "said"),
    [
        ((), "ratio", "a prompt has 1 to 63 tokens, found 0"),
        ((0,) * 64, "ratio", "a prompt has 1 to 63 tokens, found 64"),
        ((0,), "typical", "a rule is one of ratio, race, block, found 'typical'"),
        ((0,), "race", "a race is enumerated over two tokens, found 3"),
    ],
)
def test_what_cannot_be_proven_is_refused_in_one_line(
    prompt: tuple[int, ...], rule: str, said: str
) -> None:
    found = refusal(
        loop_law.bias, random_tables(0, 4, 3), Request(prompt=prompt), loop_law.Setup(), rule
    )
    assert found == said


def test_draws_are_enumerated_as_the_rules_randomness_shares_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If draft and residual race with the same exponentials, the ratio rule changes the law."""
    case = (random_tables(0, 4, 2), Request(), loop_law.Setup(), "ratio")
    monkeypatch.setattr(loop_law.Rule, "randomness", lambda rule: KeyedRandomness(rule.seed))
    assert loop_law.bias(*case) > 0.01
    mine = type("Mine", (SeededRandomness,), {})
    monkeypatch.setattr(loop_law.Rule, "randomness", lambda rule: mine(rule.seed))
    assert "which draws of Mine share random numbers" in refusal(loop_law.bias, *case)


@pytest.mark.parametrize("states", range(2, 10))
def test_every_later_row_of_a_table_shows_one_wrong_token(states: int) -> None:
    model = random_tables(0, states, 2)
    for right, place in product(product(range(2), repeat=5), range(5)):
        wrong = (*right[:place], 1 - right[place], *right[place + 1 :])
        assert not model.row(right).equal(model.row(wrong))


def test_a_draft_in_place_of_the_targets_entries_ends_the_proof() -> None:
    model = random_tables(0, 4, 3)
    with pytest.raises(enumeration.ProofError, match="an entry of the draft's"):
        model(torch.tensor([[1]]), prefilled(model, (0, 1, 2)), 1, table_model.DRAFT_PLAN)


def accepted_at_first(model: table_model.TableModel, gamma: int, rule: str) -> float:
    """Mean number of drafted tokens that the first round accepts, by enumeration."""
    request = Request(max_new_tokens=gamma + 1)
    setup = loop_law.Setup(policy=lambda: FixedLength(gamma))

    def first(randomness: Randomness) -> int:
        rounds: list[Round] = []
        loop_law.run_loop(model, request, setup, randomness, rule, rounds.append)
        return rounds[0].accepted

    return sum(kept * weight for kept, weight in enumeration.output_law(first).items())


@pytest.mark.parametrize("gamma", [1, 2, pytest.param(3, marks=pytest.mark.prove)])
def test_block_verification_keeps_at_least_as_many_tokens_as_the_ratio_rule(gamma: int) -> None:
    """On average, and more from two drafted tokens on."""
    more = [
        accepted_at_first(model, gamma, "block") - accepted_at_first(model, gamma, "ratio")
        for model in (random_tables(seed, 4, 3) for seed in range(4))
    ]
    assert min(more) > -EXACT and (max(more) > 0.01) == (gamma > 1)


@pytest.mark.parametrize("rule", RULES_OF_ANY_SIZE)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", list(AXES["params"]))
def test_a_model_draft_of_non_finite_logits_keeps_the_law(
    broken: float, params: str, rule: str
) -> None:
    """A draft in half precision may overflow where its target does not."""
    model = mixed_tables(Random(3), "unrelated")
    model.tables[table_model.DRAFT_PLAN][1:] = broken
    request = Request(params=AXES["params"][params], max_new_tokens=2)
    assert loop_law.bias(model, request, loop_law.Setup(), rule) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("drafter", list(AXES["drafter"]))
@pytest.mark.parametrize("params", list(AXES["params"]))
def test_the_full_product_of_axes_keeps_the_law(drafter: str, params: str) -> None:
    """Every policy, stop and rule, each on two different tables."""
    rest = {axis: list(AXES[axis]) for axis in ("policy", "stop", "allowed")}
    for number, values in enumerate(product(*rest.values())):
        case = {"drafter": drafter, "params": params, **dict(zip(rest, values, strict=True))}
        for length, rule in product((2, 3), RULES_OF_ANY_SIZE):
            model = mixed_tables(Random(f"{drafter} {params} {number} {length}"), KINDS[number % 3])
            assert case_deviation(model, case, length, rule=rule) < EXACT, case


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("vocab", [4, 5])
@pytest.mark.parametrize("drafter", list(AXES["drafter"]))
@pytest.mark.parametrize("params", list(AXES["params"]))
def test_larger_vocabularies_keep_the_law(seed: int, vocab: int, drafter: str, params: str) -> None:
    model = mixed_tables(Random(seed), KINDS[seed % 3], vocab, states=7)
    assert case_deviation(model, {"drafter": drafter, "params": params}, 2) < EXACT


def uncached(family: str, **sizes: int) -> Decoder:
    """A real module that is the oracle too: there each row is from a pass over the whole history,
    without a cache.
    """
    model = tiny_model(family, **sizes)
    model.row = torch.inference_mode()(lambda history: model(torch.tensor([history]))[0, -1])
    return model


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("axis", "value"), [(axis, value) for axis, values in AXES.items() for value in values]
)
def test_real_modules_with_their_real_caches_keep_the_law_along_every_axis(
    family: str, axis: str, value: str
) -> None:
    assert case_deviation(uncached(family), {axis: value}, 2, REAL_DRAFTERS) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", list(REAL_DRAFTERS))
@pytest.mark.parametrize(("policy", "rule"), [("fixed 2", "ratio"), ("adaptive", "block")])
def test_real_drafts_across_the_edge_of_a_window_keep_the_law(
    family: str, drafter: str, policy: str, rule: str
) -> None:
    """Three tokens after a prompt longer than the windows of two, and than a plan's first keys."""
    request = Request(prompt=(0, 1, 1, 0, 0, 1), params=SamplingParams(1.5), max_new_tokens=3)
    setup = loop_law.Setup(REAL_DRAFTERS[drafter], AXES["policy"][policy])
    assert loop_law.bias(uncached(family, vocab=2), request, setup, rule) < EXACT
