"""Recorded sampling gives the texts of the functions as they are, on a pretended device with a pretended recorder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import recorded, sampling
from decoding.chooser import Drafting
from decoding.costs import measure_costs
from decoding.drafters import ModelDrafter
from decoding.policies import FixedLength, Policy
from decoding.randomness import KeyedRandomness, Place, SeededRandomness
from decoding.recorded import Recordings, recordings_of
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Chance, verify_by_race, verify_by_ratio
from decoding.writer import Sample, Writer
from model import LayerPlan
from model.fast.graphs import ROWS, GraphedDecoder
from model.fast.prepare import fuse
from tests import pretended
from tests.laws import REAL_DRAFTERS, REAL_POLICIES, Scripted, begun, tiny_model
from tests.pretended import PretendedRandomness, PretendedRecorder, memory

VOCAB, PROMPT = 19, [1, 2, 3, 4]
RULES = Rules(24)
FILTERED = SamplingParams(0.9, top_k=15, top_p=0.95, min_p=0.01)
PARAMS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(0.7),
    "top-k": SamplingParams(0.7, top_k=5),
    "top-p": SamplingParams(1.3, top_p=0.8),
    "min-p": SamplingParams(1.0, min_p=0.05),
    "penalty": SamplingParams(0.8, repetition_penalty=1.3),
}
POLICIES: dict[str, Callable[[], Policy]] = {
    **REAL_POLICIES,
    "longer than a step": lambda: FixedLength(ROWS + 2),
}


def graphed(device: str = pretended.NAME, recorder: Any = None) -> GraphedDecoder:
    prepared = fuse(tiny_model("llama", vocab=VOCAB).to(device))
    return GraphedDecoder(prepared, recorder or PretendedRecorder())


def chance_on(device: str, coupling: str) -> Chance:
    if coupling == "race":
        return Chance(KeyedRandomness(3, device), verify_by_race)
    return Chance(SeededRandomness(3) if device == "cpu" else PretendedRandomness(3))


def write(
    device: str,
    drafter: str,
    coupling: str = "ratio",
    params: SamplingParams = FILTERED,
    policy: str = "fixed",
    rules: Rules = RULES,
    *,
    record: bool = True,
) -> tuple[list[int], list[Round], Counter[str]]:
    """A text with its rounds, and what the device counted meanwhile."""
    model = tiny_model("llama", vocab=VOCAB) if device == "cpu" else graphed()
    cache, drafts = begun(model, drafter, PROMPT)
    text = Text(PROMPT, rules, model, lambda token: b"abcd"[token % 4 : token % 4 + 1])
    chance, decides = chance_on(device, coupling), POLICIES[policy]()
    recordings = Recordings(model)
    if record:
        params, chance = recordings.of(params, chance, decides.gamma + 1)
    made = model.recorder.recorded if device != "cpu" else 0
    pretended.counts.clear()
    rounds = list(speculate(model, cache, text, drafts, decides, params, *chance))
    assert recordings.trouble is None and getattr(model, "trouble", None) is None
    assert device == "cpu" or model.recorder.recorded == made, "something was recorded while the text was written"
    return text.tokens, rounds, pretended.counts.copy()


def check(drafter: str, coupling: str, **how: Any) -> tuple[int, int]:
    """The text is the CPU's; returns how many kernels were launched for it with recorded sampling, and without."""
    expected, *_ = write("cpu", drafter, coupling, **how)
    found, rounds, counts = write(pretended.NAME, drafter, coupling, **how)
    without, _, more = write(pretended.NAME, drafter, coupling, **how, record=False)
    assert found == without == expected
    assert len(rounds) <= counts["read"] <= more["read"]
    return counts["kernel"], more["kernel"]


@pytest.mark.parametrize("coupling", ["ratio", "race"])
@pytest.mark.parametrize("drafter", REAL_DRAFTERS)
def test_a_text_is_the_eager_one_with_far_fewer_launches(drafter: str, coupling: str) -> None:
    recorded, eager = check(drafter, coupling, policy="break-even" if drafter == "best of" else "fixed")
    assert recorded < 0.6 * eager


@pytest.mark.parametrize("coupling", ["ratio", "race"])
@pytest.mark.parametrize("params", PARAMS)
def test_every_kind_of_sampling_writes_the_eager_text(params: str, coupling: str) -> None:
    """A repetition penalty, which needs the text, leaves draw and verification recorded."""
    recorded, eager = check("exit", coupling, params=PARAMS[params])
    assert recorded < eager


@pytest.mark.parametrize("coupling", ["ratio", "race"])
@pytest.mark.parametrize("policy", ["adaptive", "gated", "longer than a step"])
def test_every_policy_writes_the_eager_text(policy: str, coupling: str) -> None:
    recorded, eager = check("lowbit", coupling, policy=policy)
    assert recorded < eager


@pytest.mark.parametrize("coupling", ["ratio", "race"])
def test_banned_words_are_obeyed(coupling: str) -> None:
    recorded, eager = check("exit", coupling, rules=Rules(24, banned=["ab", "ca"]))
    assert recorded < eager


def test_with_a_constraint_nothing_recorded_overlooks_it() -> None:
    def not_the_same_again(tokens: list[int]) -> Tensor:
        return torch.arange(VOCAB) != tokens[-1]

    tokens, *_ = write(pretended.NAME, "exit", rules=Rules(24, constraints=(not_the_same_again,)))
    assert all(token != after for token, after in pairwise(tokens))
    check("exit", "ratio", rules=Rules(24, constraints=(not_the_same_again,)))


@pytest.mark.parametrize("coupling", ["ratio", "race"])
def test_rows_of_every_number_give_the_very_results_and_take_the_same_chance(coupling: str) -> None:
    """Drafts that are likely, impossible under their own q, or wrong; and one draw between verifications."""
    recordings, generator = Recordings(graphed()), torch.Generator().manual_seed(0)
    params, chance = recordings.of(FILTERED, chance_on(pretended.NAME, coupling), ROWS)
    own, rule = chance_on(pretended.NAME, coupling)
    kept: set[bool] = set()
    for number in range(5 * ROWS):
        rows, place = number % ROWS + 1, Place(number, number % 3)
        logits = 3 * torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64).to(pretended.NAME)
        p = sampling.distribution(logits, torch.empty(0), params)
        assert torch.equal(p.cpu(), sampling.distribution(logits.cpu(), torch.empty(0), FILTERED))
        drafted = torch.where(p[:-1].amax(-1) > 0.5, p[:-1].argmax(-1), number % VOCAB)
        q = p[:-1].float() if number % 2 else torch.nn.functional.one_hot(drafted, VOCAB).float()
        found = chance.verify(p, q, drafted, chance.randomness, place)
        expected = rule(p, q, drafted, own, place)
        assert [each.item() for each in found] == [each.item() for each in expected]
        assert chance.randomness.draw(p[0], place).item() == own.draw(p[0], place).item()
        kept.add(expected[0].item() == rows - 1)
    assert kept == {True, False} and recordings.trouble is None


@pytest.mark.parametrize("coupling", ["ratio", "race"])
def test_recordings_read_and_write_nothing_but_their_desk(coupling: str) -> None:
    model = graphed()
    recordings = Recordings(model)
    recordings.of(FILTERED, chance_on(pretended.NAME, coupling), 5)
    desk = recordings.desk
    places = list(vars(desk).values())
    assert len(model.recorder.tapes) == 11  # of a draw, and for each number of rows of two functions
    for tape in model.recorder.tapes:
        assert tape.outside() <= {memory(place) for place in places}


def test_what_was_recorded_serves_every_text_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphed()
    recordings, chance = recordings_of(model), chance_on(pretended.NAME, "ratio")
    assert recordings_of(model) is recordings
    recordings.of(FILTERED, chance, 3)
    assert model.recorder.recorded == 7
    recordings.of(replace(FILTERED), chance, 2)
    assert model.recorder.recorded == 7
    recordings.of(FILTERED, chance, 4)
    assert model.recorder.recorded == 9
    monkeypatch.setattr(recorded, "MOST", 12)
    recordings.of(SamplingParams(0.5), chance, 3)
    assert model.recorder.recorded == len(recordings.kept) == 12
    recordings.of(SamplingParams(0.6), chance, 1)
    assert len(recordings.kept) == 12 and (verify_by_ratio, 4) not in recordings.kept


def test_a_model_that_records_nothing_and_chance_that_is_not_known_are_left_as_they_are() -> None:
    model, chance = tiny_model("llama", vocab=VOCAB), Chance(SeededRandomness(0))
    assert Recordings(model).of(FILTERED, chance, 3) == (FILTERED, chance)
    proof = Chance(KeyedRandomness(0), verify_by_ratio)
    assert Recordings(graphed()).of(FILTERED, proof, 3) == (FILTERED, proof)


class Failing(PretendedRecorder):
    """Fails at sampling, as a GPU may."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        if "Recording" in function.__qualname__:
            raise RuntimeError("out of memory\nand more")
        return super().record(function)


class Forgetful(PretendedRecorder):
    """What it replays computes nothing."""

    def replay(self, tape: Any) -> None:
        """Nothing happens."""


@pytest.mark.parametrize(
    ("recorder", "why"), [(Failing, "out of memory"), (Forgetful, "what was recorded computes something else")]
)
def test_where_recording_fails_the_text_is_written_without_and_that_is_said(
    recorder: type[PretendedRecorder], why: str
) -> None:
    sound, broken = graphed(), graphed()
    recordings_of(broken).recorder = recorder()
    found, expected = (sample_of(model) for model in (broken, sound))
    assert found.text.tokens == expected.text.tokens
    assert found.trouble == f"sampling is not recorded as CUDA graphs: {why}" and expected.trouble is None


def sample_of(model: GraphedDecoder) -> Sample:
    """What a writer writes with an early exit."""
    writer = Writer(model, 40)
    writer.begin(PROMPT)
    early = Drafting("exit", lambda cache: ModelDrafter(model, cache, LayerPlan.early_exit(3, 1)))
    return writer.write(writer.new_text(Rules(20)), early, FILTERED, chance_on(pretended.NAME, "ratio"))


def test_a_function_that_reads_the_device_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "unlikely_by_sorting", sampling.unlikely_among_candidates)
    recordings = Recordings(graphed())
    params, _ = recordings.of(FILTERED, chance_on(pretended.NAME, "ratio"), 1)
    assert params is FILTERED and "stream is capturing" in recordings.trouble


def test_costs_are_measured_with_what_is_recorded() -> None:
    """Or texts would be predicted to be slower than they are."""
    model = graphed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.costs.SeededRandomness", lambda seed, device: PretendedRandomness(seed))
        measure_costs(model, model, LayerPlan.early_exit(3, 1), FILTERED, longest=2)
    assert {rows for _, rows in recordings_of(model).kept} == {0, 1, 2, 3}


def test_given_uniforms_serve_tosses_first_and_then_the_draw() -> None:
    numbers = torch.zeros(3, dtype=torch.float64)
    recorded.Uniforms.fill(numbers, Scripted(0.25, 0.75, 0.5), Place(0))
    assert numbers.tolist() == [0.25, 0.75, 0.5]
    again = SeededRandomness(5).uniform(3, out=numbers.clone())
    assert torch.equal(again, SeededRandomness(5).uniform(3))
    given = recorded.Uniforms(numbers)
    assert given.accept(torch.tensor([0.5, 0.5])).tolist() == [True, False]
    assert given.draw(torch.tensor([0.4, 0.2, 0.4]), Place(0)).item() == 1
