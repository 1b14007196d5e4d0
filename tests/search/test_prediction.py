"""The predicted rounds are the loop's: against a walk through every outcome, and against the loop
itself.
"""

import itertools
from collections.abc import Sequence

import pytest
import torch

from decoding.drafters import ModelDrafter
from decoding.policies import AdaptiveExit, FixedLength, Policy
from decoding.proof.enumeration import Enumerator, RaceEnumerator
from decoding.randomness import Randomness, SeededRandomness
from decoding.rounds import Round
from decoding.run.calibration import Continuation
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Verify, verify_by_race, verify_by_ratio
from model import Decoder, LayerPlan
from model.fast.gpu import StaticDecoder
from model.plan import FULL
from search.acceptance import Acceptance, Calibration, accepted_by_race
from search.costs import CostTable
from search.prediction import expected_rounds, predict
from tests.laws import tiny_model

BUDGET = 11
PROMPTS = [(1, 2, 0), (2,), (0, 1, 1, 2, 2, 1)]


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


def written(model: Decoder, eos_ids: frozenset[int] = frozenset()) -> list[Continuation]:
    """What the model writes greedily after each prompt."""
    texts = []
    for prompt in PROMPTS:
        plan = LayerPlan.full(model.num_layers)
        rounds = run(
            model,
            prompt,
            plan,
            FixedLength(0),
            SamplingParams(),
            SeededRandomness(0),
            BUDGET,
            eos_ids,
        )
        tokens = tuple(token for round in rounds for token in round.emitted)
        texts.append(Continuation(prompt, tokens, BUDGET - len(tokens)))
    return texts


def counts(rounds: Sequence[Round], longest: int) -> list[int]:
    return [sum(len(round.drafted) == length for round in rounds) for length in range(longest + 1)]


PLANS = [
    LayerPlan.early_exit(4, 2),
    LayerPlan.skipping(4, [1], [2]),
    LayerPlan.skipping(4, [0, 3], [0]),
    LayerPlan.skipping(4, [], [0, 1]),
    LayerPlan.skipping(4, [0, 1, 2, 3], [1]),
    LayerPlan.full(4),
    LayerPlan((4, FULL, 8, 0), (FULL, 4, 4, 8), head=8),
]


@pytest.mark.parametrize(
    ("family", "eos_ids"),
    [("llama", frozenset({3})), ("gemma2", frozenset()), ("gemma3_text", frozenset())],
)
def test_greedy_rounds_are_predicted_exactly(family: str, eos_ids: frozenset[int]) -> None:
    """Every draft length, with the depths of the whole draft computed: rounds, draft lengths and
    acceptances.
    """
    model = tiny_model(family, vocab=7, layers=4)
    texts = written(model, eos_ids)
    calibration = Calibration(model, texts, SamplingParams(), depths=4)
    for plan in PLANS:
        predicted = expected_rounds(calibration.acceptance(plan), range(1, 5), [0.0])
        for gamma in range(1, 5):
            expected, accepted, rejections = torch.zeros(gamma + 1), 0, 0
            for text in texts:
                randomness = SeededRandomness(0)
                rounds = run(
                    model,
                    text.prompt,
                    plan,
                    FixedLength(gamma),
                    SamplingParams(),
                    randomness,
                    BUDGET,
                    eos_ids,
                )
                expected += torch.tensor(counts(rounds, gamma))
                accepted += sum(min(round.accepted, len(round.emitted)) for round in rounds)
                rejections += sum(
                    round.accepted < min(len(round.drafted), len(round.emitted)) for round in rounds
                )
            found = predicted.drafted[0, gamma - 1, : gamma + 1]
            assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-9), (plan, gamma)
            assert predicted.accepted[0, gamma - 1].sum() == pytest.approx(accepted, abs=1e-9)
            assert predicted.rejected[0, gamma - 1].sum() == pytest.approx(rejections, abs=1e-9)


@pytest.mark.parametrize(
    ("plan", "params"),
    [
        (PLANS[1], SamplingParams(1.0)),
        (PLANS[2], SamplingParams(0.8, top_k=2, repetition_penalty=1.4)),
    ],
)
def test_sampled_rounds_are_predicted_exactly_for_every_text(
    plan: LayerPlan, params: SamplingParams
) -> None:
    """The production loop under enumeration: its expected draft lengths given each text that it may
    write.
    """
    model, prompt, gamma, budget = tiny_model("llama", vocab=3, layers=4), (1, 2, 0), 2, 3
    weights: dict[tuple[int, ...], float] = {}
    expected: dict[tuple[int, ...], torch.Tensor] = {}
    enumerator = Enumerator()
    while True:
        rounds = run(model, prompt, plan, FixedLength(gamma), params, enumerator, budget)
        text = tuple(token for round in rounds for token in round.emitted)
        found = torch.tensor(
            [*counts(rounds, gamma), sum(round.accepted for round in rounds)]
        ).double()
        weights[text] = weights.get(text, 0.0) + enumerator.weight
        expected[text] = expected.get(text, torch.zeros(gamma + 2)) + enumerator.weight * found
        if not enumerator.next_path():
            break
    texts = [Continuation(prompt, text) for text in weights]
    acceptance = Calibration(model, texts, params, depths=gamma).acceptance(plan)
    for number, text in enumerate(texts):
        one = Acceptance(*(values[number : number + 1] for values in vars(acceptance).values()))
        predicted = expected_rounds(one, [gamma], [0.0])
        law = expected[text.written] / weights[text.written]
        assert [*predicted.drafted[0, 0], predicted.accepted[0, 0].sum()] == pytest.approx(
            law.tolist(), abs=1e-9
        )


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0), SamplingParams(0.7, repetition_penalty=1.3)]
)
def test_rounds_of_the_race_are_predicted_exactly_for_every_text(params: SamplingParams) -> None:
    """Two tokens, one drafted a round, so that the draft's own first token decides: enumerated,
    given each text.
    """
    model, prompt, budget, plan = tiny_model("llama", vocab=2, layers=4), (1, 0, 0), 3, PLANS[1]
    weights: dict[tuple[int, ...], float] = {}
    accepted: dict[tuple[int, ...], float] = {}
    enumerator = RaceEnumerator()
    while True:
        rounds = run(
            model, prompt, plan, FixedLength(1), params, enumerator, budget, verify=verify_by_race
        )
        text = tuple(token for round in rounds for token in round.emitted)
        weights[text] = weights.get(text, 0.0) + enumerator.weight
        accepted[text] = accepted.get(text, 0.0) + enumerator.weight * rounds[0].accepted
        if not enumerator.next_path():
            break
    texts = [Continuation(prompt, text) for text in weights]
    found = Calibration(model, texts, params, depths=1, coupling="race").acceptance(plan)
    for number, text in enumerate(weights):
        assert found.accept[number, 0, 0].item() == pytest.approx(
            accepted[text] / weights[text], abs=1e-9
        )


def test_acceptance_is_measured_alike_in_the_longer_cache_of_a_static_step() -> None:
    found = [
        Calibration(model, [Continuation((0, 1, 2), (2, 1, 0, 1))], SamplingParams(1.0))
        .acceptance(PLANS[0])
        .accept
        for model in (
            tiny_model("llama", layers=4),
            StaticDecoder(tiny_model("llama", layers=4), compiled=False),
        )
    ]
    assert torch.equal(*found)


def test_a_token_that_the_draft_cannot_draw_is_never_accepted_by_race() -> None:
    p, q = torch.tensor([[0.25, 0.75]]).double(), torch.tensor([[0.0, 1.0]]).double()
    assert accepted_by_race(p, q, torch.tensor([[0]])).item() == 0
    assert accepted_by_race(p, q, torch.tensor([[1]])).item() == 1
    assert accepted_by_race(p, p, torch.tensor([[0]])).item() == 1


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_an_exit_threshold_predicts_rounds_and_acceptances_exactly(threshold: float) -> None:
    """What a draft does once it has left the text is estimated; it changes how much is drafted, not
    which rounds.
    """
    model = tiny_model("llama", vocab=7, layers=4, seed=1)
    texts = written(model)
    calibration = Calibration(model, texts, SamplingParams(), depths=4)
    for plan in PLANS:
        predicted = expected_rounds(calibration.acceptance(plan), [4], [0.0, threshold])
        rounds = [
            round
            for text in texts
            for round in run(
                model,
                text.prompt,
                plan,
                AdaptiveExit(threshold, 4, step=0.0),
                SamplingParams(),
                SeededRandomness(0),
            )
        ]
        assert predicted.drafted[1, 0].sum() == pytest.approx(len(rounds), abs=1e-9)
        assert predicted.accepted[1, 0].sum() == pytest.approx(
            sum(round.accepted for round in rounds), abs=1e-9
        )
        kept = [round for round in rounds if round.accepted == len(round.drafted)]
        if len(kept) == len(rounds):  # no draft left the text
            assert predicted.drafted[1, 0].tolist() == pytest.approx(counts(rounds, 4), abs=1e-9)


def walk(accept: list[list[float]], gamma: int) -> list[float]:
    """Expected rounds by number of drafted tokens, walking through every acceptance and rejection
    of every token.
    """
    length, found = len(accept[0]), [0.0] * (gamma + 1)
    for tosses in itertools.product([False, True], repeat=length * gamma):
        kept = [tosses[depth * length : (depth + 1) * length] for depth in range(gamma)]
        weight = 1.0
        for depth, at in itertools.product(range(gamma), range(length)):
            weight *= accept[depth][at] if kept[depth][at] else 1 - accept[depth][at]
        begin = 0
        while begin < length:
            drafted = min(gamma, length - begin - 1)
            found[drafted] += weight
            accepted = next(
                (depth for depth in range(drafted) if not kept[depth][begin + depth]), drafted
            )
            begin += accepted + 1
    return found


def test_the_dynamic_programme_is_the_walk_through_every_outcome() -> None:
    generator = torch.Generator().manual_seed(0)
    for gamma, length in [(1, 5), (2, 5), (3, 4)]:
        accept = torch.rand(1, gamma, length, generator=generator, dtype=torch.float64)
        certain = torch.ones_like(accept)
        lengths = torch.tensor([length])
        acceptance = Acceptance(accept, certain, certain, certain, lengths, lengths)
        rounds = expected_rounds(acceptance, [gamma], [0.0])
        assert rounds.drafted[0, 0].tolist() == pytest.approx(
            walk(accept[0].tolist(), gamma), abs=1e-12
        )


def test_the_speed_up_is_tokens_over_the_cost_of_the_rounds() -> None:
    """The full plan drafts what the target writes: every round keeps all, so the arithmetic is by
    hand.
    """
    ones, length = torch.ones(1, 1, 6, dtype=torch.float64), torch.tensor([6])
    acceptance = Acceptance(ones, ones, ones, ones, length, length)
    costs = CostTable(0.98, (1.0, 1.05, 1.1))
    found = predict(acceptance, costs, [2])
    cost = 2 * (2 * 0.98 + 1.1)  # rounds of 2 drafted and 3 written tokens
    assert found.speedup == pytest.approx(6 / cost)
    assert (found.acceptance_rate, found.kept_share) == (1.0, 1.0)
    unsure = Acceptance(ones, 0.4 * ones, 0.4 * ones, ones, length, length)
    # each draft ends after one token
    stopping = predict(unsure, costs, [2], [0.5], confidence=0.02)
    assert stopping.speedup == pytest.approx(6 / (3 * (0.98 + 0.02 + 1.05)))
    assert predict(unsure, costs, [1, 2], [0.0, 0.5], confidence=0.02).threshold == 0.0
