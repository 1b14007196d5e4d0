"""Texts that share steps are those written alone, token for token, and end alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.policies import Policy
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Conditions, DeadEnd, Text
from decoding.together import MOST_DRAFTING, ForFew, Together
from decoding.verify import RULES, Rule
from model.decoder import Decoder
from model.errors import InputError
from model.fast import accelerate
from tests.calls import recorded
from tests.configs import small
from tests.laws import REAL_DRAFTERS, REAL_POLICIES, random_model, tiny_model

VOCAB = 11
LETTERS = [bytes([letter]) for letter in b"abcdefghijk"]

MODELS: dict[str, Decoder] = {
    name: accelerate(tiny_model(family, vocab=VOCAB, hidden=16).to(dtype))
    for name, family, dtype in (
        ("llama", "llama", torch.bfloat16),
        ("gemma2", "gemma2", torch.bfloat16),
        ("gemma3_text", "gemma3_text", torch.float32),
        ("readable blocks", "llama", torch.float64),
    )
}
LLAMA = MODELS["llama"]


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.decoder.PREFILL_CHUNK", 4)  # so that most prompts take several
        yield


def nothing_after(tokens: int) -> Any:
    """A constraint that allows no token in a text of ``tokens`` tokens or more."""
    return lambda text: torch.zeros(VOCAB, dtype=torch.bool) if len(text) >= tokens else None


@dataclass
class Job:
    """Text to write, begun after ``begins`` shared steps and ended after ``most_rounds`` rounds."""

    prompt: list[int]
    conditions: Conditions
    kind: str = "none"
    policy: str = "fixed"
    params: SamplingParams = SamplingParams(1.0)
    rule: Rule = field(default=Rule("ratio", 0))
    begins: int = 0
    most_rounds: int = 1000
    rounds: list[Round] = field(default_factory=list)
    error: str = ""

    def write(self, model: Decoder, target: Any, for_few: bool = False) -> Text:
        """Write the text to its end, by ``target`` in place of the model."""
        cache = model.new_cache(48)
        text = Text(self.prompt, self.conditions, model, LETTERS.__getitem__)
        target.prefill(torch.tensor([self.prompt[:-1]], dtype=torch.int64), cache)
        drafter = REAL_DRAFTERS[self.kind](target, cache)
        if self.kind == "model" and isinstance(target, Together):
            drafter.model = Together(drafter.model, target)
        policy = drafter if isinstance(drafter, Policy) else REAL_POLICIES[self.policy]()
        if for_few:
            drafter = ForFew(drafter, target)
        how = policy, self.params, self.rule.randomness(), self.rule.verify
        try:
            for round in speculate(target, cache, text, drafter, *how):
                self.rounds.append(round)
                if len(self.rounds) == self.most_rounds:
                    break
        except InputError as error:
            self.error = str(error)
        return text

    @property
    def tokens(self) -> list[int]:
        return [token for round in self.rounds for token in (*round.emitted, *round.retracted)]


@torch.inference_mode()
def alone(model: Decoder, job: Job) -> Job:
    copied = replace(job, rounds=[], error="")
    copied.write(model, model)
    return copied


def together(model: Decoder, jobs: Sequence[Job], for_few: bool = False) -> None:
    """Write the texts in shared steps."""
    shared = Together(model)
    to_come = sorted(jobs, key=lambda job: job.begins)
    steps = 0
    while to_come or shared.calls:
        while to_come and (to_come[0].begins <= steps or not shared.calls):
            job = to_come.pop(0)
            shared.start(lambda job=job: job.write(model, shared, for_few))
        shared.step()
        steps += 1


conditions = st.builds(
    Conditions,
    st.integers(1, 16),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
    st.lists(st.sampled_from(["ab", "g", "cc"]), max_size=1),
    st.lists(st.sampled_from(["aa", "bc", "d", "ef"]), max_size=2),
    st.lists(st.integers(4, 20).map(nothing_after), max_size=1),
)
nucleus = SamplingParams(0.8, top_p=0.8, repetition_penalty=1.2)
jobs = st.builds(
    Job,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=13),
    conditions,
    st.sampled_from([*REAL_DRAFTERS]),
    st.sampled_from([*REAL_POLICIES]),
    st.sampled_from([SamplingParams(), SamplingParams(1.0), nucleus]),
    st.builds(Rule, st.sampled_from([*RULES]), st.integers(0, 2**64 - 1)),
    st.integers(0, 20),
    st.one_of(st.just(1000), st.integers(1, 8)),
)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25)
@given(wanted=st.lists(jobs, min_size=2, max_size=5))
def test_texts_written_together_are_those_written_alone(name: str, wanted: list[Job]) -> None:
    model = MODELS[name]
    together(model, wanted)
    for job in wanted:
        found = alone(model, job)
        assert (job.rounds, job.error) == (found.rounds, found.error)


@pytest.mark.parametrize("rule", RULES)
def test_many_texts_draft_nothing_except_where_that_would_change_them(rule: str) -> None:
    """They share steps of one row each; under the ratio and the block rule, each draws its random
    numbers by its draft lengths.
    """
    wanted = [
        Job([1, 2, 3], Conditions(24 if seed == 0 else 6), "exit", rule=Rule(rule, seed))
        for seed in range(MOST_DRAFTING + 1)
    ]
    together(LLAMA, wanted, for_few=rule == "race")
    found = [alone(LLAMA, job) for job in wanted]
    assert [job.tokens for job in wanted] == [job.tokens for job in found]
    drafted = [len(round.drafted) for round in wanted[0].rounds]
    assert (drafted[0] == 0) == (rule == "race") and max(drafted) > 0
    assert rule == "race" or wanted[0].rounds == found[0].rounds


def test_drafts_and_verifications_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = recorded(
        monkeypatch, type(LLAMA), "together", lambda _, calls, plan=None: (len(calls), plan is None)
    )
    wanted = [Job([3], Conditions(8), "exit", params=SamplingParams()) for _ in range(3)]
    together(LLAMA, wanted)
    assert shared[:4] == [(3, False)] * 3 + [(3, True)]


@pytest.mark.parametrize(("kind", "layers"), [("none", 3), ("model", 1)])
def test_a_long_prompt_is_read_between_the_steps_of_others(
    kind: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the target, and by a draft model of one layer: at most one step between two of its chunks,
    and none of them delays a step.
    """
    seen = recorded(monkeypatch, Decoder, "prefill", lambda model, *_: model.num_layers)
    recorded(monkeypatch, type(LLAMA), "together", lambda *_: seen.append("step"))
    together(
        LLAMA, [Job([1, 2], Conditions(20)), Job([1, 2, 3] * 6, Conditions(2), kind, begins=3)]
    )
    first = seen.index(layers, 1)
    assert seen[first : first + 9] == [layers, "step"] * 4 + [layers]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_text_of_non_finite_numbers_ends_alone(dtype: torch.dtype) -> None:
    """In a prompt with a token whose embedding is not a number."""
    config = small("llama", vocab_size=VOCAB, hidden=16, tie_word_embeddings=False)
    model = random_model(config, dtype)
    model.embed_tokens.weight[7] = torch.nan
    model = accelerate(model)
    not_7 = Conditions(8, constraints=[lambda tokens: torch.arange(VOCAB) != 7])
    good = Job([1, 2, 3, 4, 5], not_7, "exit")
    bad = replace(good, prompt=[1, 7, 3, 4, 5], rounds=[])
    together(model, [bad, good])
    assert (good.rounds, good.error) == (alone(model, good).rounds, "")
    assert "finite" in bad.error and bad.error == alone(model, bad).error


def test_an_error_of_a_shared_step_is_raised_in_the_loop_that_made_it() -> None:
    """Here one that leaves a hole in its cache."""
    shared = Together(LLAMA)
    failed: list[int] = []

    def loop(start: int) -> None:
        try:
            shared(torch.zeros(1, 1, dtype=torch.int64), LLAMA.new_cache(8), start)
        except ValueError:
            failed.append(start)

    for start in (0, 3, 0):
        shared.start(partial(loop, start))
    shared.step()
    assert failed == [3] and not shared.calls


def test_an_ended_loop_and_an_error_leave_the_caller_and_the_other_loops_as_they_were() -> None:
    """No inference mode, no waiting calls; the loops of a failed one's step go on."""
    shared = Together(LLAMA)

    def fail() -> None:
        shared(torch.zeros(1, 1, dtype=torch.int64), LLAMA.new_cache(8), 0)
        raise DeadEnd("no")

    shared.start(fail)
    loops = [shared.start(lambda: Job([1], Conditions(8)).write(LLAMA, shared)) for _ in range(2)]
    with pytest.raises(DeadEnd):
        shared.step()
    shared.stop(loops[0])
    assert not torch.is_inference_mode_enabled() and len(shared.calls) == 1
    while shared.step():
        pass
    assert not torch.is_inference_mode_enabled() and not shared.calls
