"""The predicted rounds are those of the production loop, greedy and under enumeration."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from app.chooser import Setting
from decoding.drafters import ModelDrafter
from decoding.policies import AdaptiveExit, FixedLength, Policy
from decoding.proof.enumeration import Enumerator, RaceEnumerator
from decoding.randomness import Randomness, SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.text import Rules, Text
from decoding.verify import Verify, verify_by_race, verify_by_ratio
from model import FULL, Decoder, LayerPlan
from model.fast.gpu import StaticDecoder
from search.acceptance import DEPTHS, Acceptance, Calibration, accepted_by_race
from search.costs import CostTable
from search.prediction import expected_rounds, predict
from search.texts import Continuation
from tests.folders import byte_tokenizer
from tests.laws import speculated, tiny_model

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
    text = Text(prompt, Rules(budget, eos_ids), model)
    how = policy, params, randomness, verify
    return list(speculated(model, text, lambda *of: ModelDrafter(*of, plan), *how))


def greedily(
    model: Decoder,
    prompt: Sequence[int],
    plan: LayerPlan,
    policy: Policy,
    eos_ids: frozenset[int] = frozenset(),
) -> list[Round]:
    rest = SamplingParams(), SeededRandomness(0), BUDGET, eos_ids
    return run(model, prompt, plan, policy, *rest)


def written(model: Decoder, eos_ids: frozenset[int] = frozenset()) -> list[Continuation]:
    """Greedy texts of the model after each prompt."""
    full = LayerPlan.full(model.num_layers)
    texts = [
        (each, emitted(greedily(model, each, full, FixedLength(0), eos_ids))) for each in PROMPTS
    ]
    return [Continuation(prompt, text, BUDGET - len(text)) for prompt, text in texts]


def emitted(rounds: Sequence[Round]) -> tuple[int, ...]:
    return tuple(token for round in rounds for token in round.emitted)


def counts(rounds: Sequence[Round], longest: int) -> list[int]:
    return [sum(len(round.drafted) == length for round in rounds) for length in range(longest + 1)]


def calibration_of(
    model: Decoder,
    texts: Sequence[Continuation],
    params: SamplingParams,
    depths: int = DEPTHS,
    coupling: str = "ratio",
) -> Calibration:
    setting = Setting(Path(), model, byte_tokenizer(), params, model.max_positions, coupling)
    return Calibration(setting, texts, depths)


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
    ("family", "eos_ids"), [("llama", frozenset({3})), ("gemma3_text", frozenset())]
)
def test_greedy_rounds_are_predicted_exactly(family: str, eos_ids: frozenset[int]) -> None:
    """Every draft length, with the depths of the whole draft computed: rounds, draft lengths and
    acceptances.
    """
    model = tiny_model(family, vocab=7, layers=4)
    texts = written(model, eos_ids)
    calibration = calibration_of(model, texts, SamplingParams(), depths=4)
    for plan in PLANS:
        found = expected_rounds(calibration.acceptance(plan), range(1, 5), [0.0])
        drafts, accepted_tokens, rejected_tokens = (each[0] for each in found)
        for gamma in range(1, 5):
            rounds = [
                round
                for text in texts
                for round in greedily(model, text.prompt, plan, FixedLength(gamma), eos_ids)
            ]
            accepted = sum(min(round.accepted, len(round.emitted)) for round in rounds)
            rejections = sum(
                round.accepted < min(len(round.drafted), len(round.emitted)) for round in rounds
            )
            found = [
                *drafts[gamma - 1, : gamma + 1],
                accepted_tokens[gamma - 1].sum(),
                rejected_tokens[gamma - 1].sum(),
            ]
            expected = [*counts(rounds, gamma), accepted, rejections]
            assert found == pytest.approx(expected, abs=1e-9), (plan, gamma)


def given_each_text(
    enumerator: Enumerator, write: Callable[[], list[Round]], numbers: Callable[..., list[float]]
) -> dict[tuple[int, ...], list[float]]:
    """Per text, the expected ``numbers`` of its rounds, over every outcome of every draw."""
    weights: dict[tuple[int, ...], float] = defaultdict(float)
    sums: dict[tuple[int, ...], torch.Tensor] = defaultdict(
        lambda: torch.zeros(1, dtype=torch.float64)
    )
    more = True
    while more:
        rounds = write()
        weights[emitted(rounds)] += enumerator.weight
        found = enumerator.weight * torch.tensor(numbers(rounds), dtype=torch.float64)
        sums[emitted(rounds)] = sums[emitted(rounds)] + found
        more = enumerator.next_path()
    return {text: (sums[text] / weight).tolist() for text, weight in weights.items()}


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
    model, prompt, gamma = tiny_model("llama", vocab=3, layers=4), (1, 2, 0), 2
    enumerator = Enumerator()
    expected = given_each_text(
        enumerator,
        lambda: run(model, prompt, plan, FixedLength(gamma), params, enumerator, budget=3),
        lambda rounds: [*counts(rounds, gamma), sum(round.accepted for round in rounds)],
    )
    texts = [Continuation(prompt, text) for text in expected]
    acceptance = calibration_of(model, texts, params, depths=gamma).acceptance(plan)
    for number, numbers in enumerate(expected.values()):
        one = Acceptance(*(values[number : number + 1] for values in vars(acceptance).values()))
        rounds, accepted, _ = expected_rounds(one, [gamma], [0.0])
        found = [*rounds[0, 0], accepted[0, 0].sum()]
        assert found == pytest.approx(numbers, abs=1e-9)


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0), SamplingParams(0.7, repetition_penalty=1.3)]
)
def test_rounds_of_the_race_are_predicted_exactly_for_every_text(params: SamplingParams) -> None:
    """Two tokens, one drafted a round, so that the draft's own first token decides: enumerated,
    given each text.
    """
    model, prompt, plan = tiny_model("llama", vocab=2, layers=4), (1, 0, 0), PLANS[1]
    enumerator = RaceEnumerator()
    how = FixedLength(1), params, enumerator, 3, frozenset(), verify_by_race
    accepted = given_each_text(
        enumerator,
        lambda: run(model, prompt, plan, *how),
        lambda rounds: [rounds[0].accepted],
    )
    texts = [Continuation(prompt, text) for text in accepted]
    found = calibration_of(model, texts, params, depths=1, coupling="race").acceptance(plan)
    expected = [rate for [rate] in accepted.values()]
    assert found.accept[:, 0, 0].tolist() == pytest.approx(expected, abs=1e-9)


def test_acceptance_is_measured_alike_in_the_longer_cache_of_a_static_step() -> None:
    models = (
        tiny_model("llama", layers=4),
        StaticDecoder(tiny_model("llama", layers=4), compiled=False),
    )
    texts = [Continuation((0, 1, 2), (2, 1, 0, 1))]
    calibrations = [calibration_of(model, texts, SamplingParams(1.0)) for model in models]
    assert torch.equal(*(each.acceptance(PLANS[0]).accept for each in calibrations))


def test_a_token_that_the_draft_cannot_draw_is_never_accepted_by_race() -> None:
    p, q = torch.tensor([[0.25, 0.75]]).double(), torch.tensor([[0.0, 1.0]]).double()
    for draft, token, accepted in ((q, 0, 0), (q, 1, 1), (p, 0, 1)):
        assert accepted_by_race(p, draft, torch.tensor([[token]])).item() == accepted


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_an_exit_threshold_predicts_rounds_and_acceptances_exactly(threshold: float) -> None:
    """What a draft does once it has left the text is estimated; it changes how much is drafted, not
    which rounds.
    """
    model = tiny_model("llama", vocab=7, layers=4, seed=1)
    texts = written(model)
    calibration = calibration_of(model, texts, SamplingParams(), depths=4)
    for plan in PLANS:
        predicted, accepted, _ = expected_rounds(
            calibration.acceptance(plan), [4], [0.0, threshold]
        )
        rounds = [
            round
            for text in texts
            for round in greedily(model, text.prompt, plan, AdaptiveExit(threshold, 4, step=0.0))
        ]
        found = [predicted[1, 0].sum(), accepted[1, 0].sum()]
        expected = [len(rounds), sum(round.accepted for round in rounds)]
        assert found == pytest.approx(expected, abs=1e-9)
        if all(round.accepted == len(round.drafted) for round in rounds):  # none left the text
            assert predicted[1, 0].tolist() == pytest.approx(counts(rounds, 4), abs=1e-9)


def test_the_speed_up_is_tokens_over_the_cost_of_the_rounds() -> None:
    """The full plan drafts what the target writes: every round keeps all, so the arithmetic is by
    hand.
    """
    ones, length = torch.ones(1, 1, 6, dtype=torch.float64), torch.tensor([6])
    acceptance = Acceptance(ones, ones, ones, ones, length, length)
    costs = CostTable(0.98, (1.0, 1.05, 1.1), confidence=0.02)
    found = predict(acceptance, costs, [2], [0.0])
    cost = 2 * (2 * 0.98 + 1.1)  # rounds of 2 drafted and 3 written tokens
    assert found.speedup == pytest.approx(6 / cost)
    assert (found.acceptance_rate, found.kept_share) == (1.0, 1.0)
    unsure = Acceptance(ones, 0.4 * ones, 0.4 * ones, ones, length, length)
    # each draft ends after one token
    stopping = predict(unsure, costs, [2], [0.5])
    assert stopping.speedup == pytest.approx(6 / (3 * (0.98 + 0.02 + 1.05)))
    assert predict(unsure, costs, [1, 2], [0.0, 0.5]).threshold == 0.0
