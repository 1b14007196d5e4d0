"""Texts written together are those written alone, token for token; a text that fails or leaves ends
alone.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.chooser import Drafting
from app.together import Entry, Scheduler
from app.writer import Task, Writer
from decoding.drafters import ModelDrafter, PromptLookup
from decoding.policies import FixedLength
from decoding.proof.enumeration import output_law, total_variation
from decoding.proof.judge import self_draft
from decoding.proof.plain_law import Request, plain_law
from decoding.proof.table_model import TEXTS, TableModel
from decoding.randomness import Randomness
from decoding.sampling import SamplingParams
from decoding.text import DeadEnd, Rules, Text
from decoding.verify import Rule, verify_by_ratio
from model import Decoder, InputError, KVCache, LayerPlan, build, parse_config
from model.fast import accelerate
from model.fast.cpu import decoder as compiled
from tests.calls import recorded
from tests.configs import small
from tests.laws import REAL_DRAFTERS, REAL_POLICIES, tiny_model

VOCAB, CAPACITY, CHUNK = 11, 48, 4
LETTERS = [b"abcdefghijk"[token : token + 1] for token in range(VOCAB)]
TINY: dict[str, Any] = {"vocab": VOCAB, "hidden": 16}
DRAFTS = accelerate(tiny_model("llama", layers=1, seed=99, **TINY).bfloat16())
MODELS: dict[str, Decoder] = {
    "float64": tiny_model("llama", **TINY),
    "bfloat16": accelerate(tiny_model("llama", **TINY).bfloat16()),
    "bfloat16, gemma2": accelerate(tiny_model("gemma2", **TINY).bfloat16()),
    "bfloat16, gemma3_text": accelerate(tiny_model("gemma3_text", **TINY).bfloat16()),
}


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """Most prompts are read in several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.decoder.PREFILL_CHUNK", CHUNK)
        yield


def nothing_after(tokens: int) -> Any:
    """A constraint that allows no token in a text of ``tokens`` tokens or more."""
    return lambda text: torch.zeros(VOCAB, dtype=torch.bool) if len(text) >= tokens else None


@dataclass(frozen=True)
class Wish:
    """Text to write. It ``arrives`` after this number of rounds of all texts, and ``leaves`` after
    this number of its rounds."""

    prompt: list[int]
    rules: Rules
    kind: str = "none"
    policy: str = "fixed"
    params: SamplingParams = SamplingParams(1.0)
    coupling: str = "ratio"
    seed: int = 0
    arrives: int = 0
    leaves: int | None = None

    def drafting(self, model: Decoder) -> Drafting:
        def new_drafter(cache: KVCache) -> Any:
            if self.kind == "fast model":
                return ModelDrafter(DRAFTS, DRAFTS.new_cache(cache.capacity))
            return REAL_DRAFTERS[self.kind](model, cache)

        return Drafting(self.kind, new_drafter, REAL_POLICIES[self.policy])

    def text(self, model: Decoder) -> Text:
        return Text(self.prompt, self.rules, model, LETTERS.__getitem__)

    @property
    def drawn(self) -> Coupling:
        return Coupling(self.coupling, self.seed)

    def task(self, model: Decoder, drafting: Drafting | None = None, **more: Any) -> Task:
        way = drafting or self.drafting(model)
        return Task(self.text(model), way, self.params, self.drawn, **more)


Outcome = tuple[list[int], str | None, str]


def outcome(text: Text, error: BaseException | None = None) -> Outcome:
    """Tokens and finish; of a text that failed the message alone."""
    return ([], None, str(error)) if error else (text.generated, text.finish, "")


def alone(model: Decoder, wish: Wish) -> Outcome:
    writer = Writer(model, CAPACITY, LETTERS.__getitem__)
    writer.begin(wish.prompt)
    task, rounds = wish.task(model), count(1)

    def read(*round: object) -> None:
        if next(rounds) == wish.leaves:
            raise KeyboardInterrupt

    task.readers.append(read)
    try:
        with suppress(KeyboardInterrupt):
            writer.write_all([task])
    except InputError as error:
        return outcome(task.text, error)
    return outcome(task.text)


def together(model: Decoder, wishes: Sequence[Wish], places: int) -> list[Outcome]:
    scheduler = Scheduler(model, CAPACITY, places)
    to_come = sorted(wishes, key=lambda wish: wish.arrives)
    entries: dict[int, Entry] = {}
    reported = 0

    def arrive(wish: Wish) -> None:
        rounds = count(1)

        def read(*round: object) -> None:
            nonlocal reported
            reported += 1
            if next(rounds) == wish.leaves:
                entry.cancelled = True
            arrive_if_time()

        entry = entries[id(wish)] = Entry(wish.task(model, readers=[read]))
        scheduler.submit(entry)

    def arrive_if_time() -> None:
        while to_come and to_come[0].arrives <= reported:
            arrive(to_come.pop(0))

    while to_come:
        reported = max(reported, to_come[0].arrives)
        arrive_if_time()
        scheduler.run()
    ended = [entries[id(wish)] for wish in wishes]
    return [outcome(entry.task.text, entry.error) for entry in ended]


rules = st.builds(
    Rules,
    st.integers(1, 16),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
    st.lists(st.sampled_from(["ab", "g", "cc"]), max_size=1),
    st.lists(st.sampled_from(["aa", "bc", "d", "ef"]), max_size=2),
    st.lists(st.integers(4, 20).map(nothing_after), max_size=1),
)
wishes = st.builds(
    Wish,
    st.one_of(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=13),
        st.just([3, 1, 4, 1, 5, 9, 2, 6, 5, 3]),
    ),
    rules,
    st.sampled_from([*REAL_DRAFTERS, "fast model"]),
    st.sampled_from([*REAL_POLICIES]),
    st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(1.0),
            SamplingParams(0.8, top_p=0.8, repetition_penalty=1.2),
        ]
    ),
    st.sampled_from(["ratio", "race"]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 20),
    st.one_of(st.none(), st.integers(1, 8)),
)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, derandomize=True, deadline=None)
@given(wanted=st.lists(wishes, min_size=2, max_size=5), places=st.integers(1, 4))
def test_texts_written_together_are_those_written_alone(
    name: str, wanted: list[Wish], places: int
) -> None:
    model = MODELS[name]
    for wish, (tokens, *end) in zip(wanted, together(model, wanted, places), strict=True):
        tokens_alone, *end_alone = alone(model, wish)
        if wish.leaves is None:
            assert (tokens, end) == (tokens_alone, end_alone)
        else:  # ended after a number of rounds, whose lengths may follow a clock
            written = min(len(tokens), len(tokens_alone))
            assert tokens[:written] == tokens_alone[:written]


@pytest.mark.parametrize("coupling", ["ratio", "race"])
def test_draft_lengths_know_the_load_except_under_the_ratio_rule(coupling: str) -> None:
    """There they follow from the text's past alone, and a seed repeats the very rounds in any
    company.
    """
    model = MODELS["bfloat16"]
    wish = Wish([1, 2, 3], Rules(30), "best of", "break-even", coupling=coupling)
    tasks = [replace(wish, seed=seed).task(model) for seed in range(3)]
    Scheduler(model, CAPACITY, 3).write_all(tasks)
    for task in tasks:
        writer = Writer(model, CAPACITY, LETTERS.__getitem__)
        writer.begin(wish.prompt)
        text = writer.new_text(wish.rules)
        alone = writer.write(text, wish.drafting(model), wish.params, task.coupling)
        assert task.sample.tokens == alone.tokens
        assert (task.sample.rounds == alone.rounds) == (coupling == "ratio")


def test_a_users_drafter_may_have_attributes_of_any_name() -> None:
    def new_drafter(cache: KVCache) -> PromptLookup:
        drafter = PromptLookup(VOCAB)
        drafter.model, drafter.drafters = "mine", []
        return drafter

    model, wish = MODELS["bfloat16"], Wish([1, 2, 1, 2], Rules(8), params=SamplingParams())
    tasks = [wish.task(model, Drafting("own", new_drafter)) for _ in range(2)]
    Scheduler(model, CAPACITY, 2).write_all(tasks)
    assert [task.text.generated for task in tasks] == [alone(model, wish)[0]] * 2


class SharedTable(TableModel):
    """A table whose calls share steps."""

    batches_calls = True

    def __init__(self, *tables: Tensor) -> None:
        super().__init__(*tables)
        self.widths: list[int] = []

    def together(
        self, calls: Sequence[tuple[Tensor, KVCache, int]], plan: LayerPlan | None = None
    ) -> list[Tensor]:
        self.widths.append(len(calls))
        return [self(*call, plan) for call in calls]


@pytest.mark.parametrize("table", [TableModel, SharedTable])
def test_the_joint_law_of_two_texts_is_the_product_of_plain_samplings(
    table: type[TableModel],
) -> None:
    """Enumerated through the scheduler: every outcome of every draw of both."""
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.rand(2, 4, 2, dtype=torch.float64, generator=generator) + 0.1
    model = table(target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True))
    drafting = Drafting("self", lambda cache: self_draft(model, cache), lambda: FixedLength(1))
    requests = [Request(prompt=(0, 1)), Request(prompt=(1,), banned=("bb",))]

    def write(randomness: Randomness) -> tuple[object, ...]:
        coupling = SimpleNamespace(
            name="ratio", randomness=lambda device: randomness, verify=verify_by_ratio
        )
        texts = [Text(each.prompt, each, model, TEXTS.__getitem__) for each in requests]
        tasks = [Task(text, drafting, SamplingParams(1.0), coupling) for text in texts]
        Scheduler(model, 16, 2).write_all(tasks)
        return tuple((tuple(text.generated), text.finish) for text in texts)

    first, second = (plain_law(model, request) for request in requests)
    product = {(one, two): p * q for one, p in first.items() for two, q in second.items()}
    assert total_variation(output_law(write), product) < 1e-9
    if isinstance(model, SharedTable):
        assert 2 in model.widths


def test_a_draft_that_reads_many_forced_tokens_after_one_of_prompt_is_no_prompt() -> None:
    """A copy of its entries, of which there are none, would be asked for again for ever."""

    def force(tokens: Sequence[int]) -> Tensor | None:
        return torch.arange(VOCAB) == 5 if len(tokens) < 20 else None

    model = MODELS["bfloat16"]
    wish = Wish([1], Rules(24, constraints=[force]), "exit", params=SamplingParams())
    drafting = replace(wish.drafting(model), new_policy=lambda: FixedLength(22))
    Scheduler(model, CAPACITY, 2).write_all([task := wish.task(model, drafting)])
    assert outcome(task.text) == alone(model, wish)


def counted(model: Decoder, patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """List of all later computations of the model: ("step", rows) and ("chunk", tokens)."""
    seen: list[tuple[str, int]] = []
    recorded(patch, compiled, "step", lambda _, batch: seen.append(("step", len(batch.positions))))
    recorded(
        patch,
        model.model,
        "hidden",
        lambda tokens, *rest: seen.append(("chunk", tokens.shape[1])),
    )
    return seen


def test_steps_are_shared_and_a_common_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(MODELS["bfloat16"], monkeypatch)
    wish = Wish([3, 1, 4, 1, 5, 9], Rules(8), "exit", params=SamplingParams())
    together(MODELS["bfloat16"], [wish, replace(wish), replace(wish)], 3)
    assert [each for each in seen if each[0] == "chunk"] == [("chunk", 4), ("chunk", 1)]
    # The first text drafts a token before the others have copied its prompt; then they go on in
    # step.
    steps = [rows for kind, rows in seen if kind == "step"]
    assert steps[:5] == [1, 3, 3, 2, 12] and set(steps[5:]) <= {3, 6, 9, 12}


def test_a_long_prompt_is_read_between_the_steps_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step at most between two of its chunks, and none of them delays a step."""
    model = MODELS["bfloat16"]
    short, long = Wish([1, 2], Rules(20)), Wish([1, 2, 3] * 6, Rules(2), arrives=3)
    expected = [alone(model, wish) for wish in (short, long)]
    seen = counted(model, monkeypatch)
    assert together(model, [short, long], 2) == expected
    first = [kind for kind, _ in seen].index("chunk", 1)
    assert seen[first : first + 9 : 2] == [("chunk", 4)] * 4 + [("chunk", 1)]
    assert seen[first + 1 : first + 8 : 2] == [("step", 1)] * 4


@pytest.mark.parametrize("name", MODELS)
def test_a_text_that_fails_ends_alone(name: str) -> None:
    """By its constraint, a drafter that writes at a wrong position, before its first round, by
    non-finite numbers.
    """

    class Careless:
        def __init__(self, model: Decoder, cache: KVCache) -> None:
            self.model, self.cache = model, cache

        def propose(self, text: Text, *_: object) -> None:
            last = text.tensor(self.model.device)[None, -1:]
            self.model(last, self.cache, len(text) + 3, LayerPlan.early_exit(3, 1))

        def rollback(self, length: int) -> None:
            pass

    def refuse(cache: KVCache) -> None:
        raise InputError("no such drafter")

    config = small("llama", vocab_size=VOCAB, hidden=16, tie_word_embeddings=False)
    model = build(parse_config(config)).double().requires_grad_(False)
    model.initialise(std=0.7, generator=torch.Generator().manual_seed(0))
    model.embed_tokens.weight[7] = float("nan")
    model = model if name == "float64" else accelerate(model.bfloat16())
    rules = Rules(8, constraints=[lambda tokens: torch.arange(VOCAB) != 7])
    good = Wish([1, 2, 3, 4, 5], rules, "exit")
    dead_end = replace(rules, constraints=[*rules.constraints, nothing_after(7)])
    failing = [
        replace(good, rules=dead_end).task(model),
        replace(good, prompt=[1, 7, 3, 4, 5]).task(model),
        good.task(model, Drafting("careless", lambda cache: Careless(model, cache))),
        good.task(model, Drafting("refused", refuse)),
    ]
    tasks = [good.task(model), *failing, good.task(model)]
    scheduler = Scheduler(model, CAPACITY, 6)
    entries = [Entry(task) for task in tasks]
    for entry in entries:
        scheduler.submit(entry)
    scheduler.run()
    expected = alone(model, good)
    assert expected[0] and outcome(tasks[0].text) == outcome(tasks[-1].text) == expected
    errors = [entry.error for entry in entries[1:-1]]
    assert [type(error) for error in errors] == [DeadEnd, InputError, ValueError, InputError]
    assert "finite" in str(errors[1]) and "leaves a hole" in str(errors[2])
    may_be_copied = [bool(row.prompt) for row in scheduler.slots]
    assert may_be_copied == [True, False, False, False, False, True]
    scheduler.write_all([again := good.task(model)])
    assert outcome(again.text) == expected, "no row was left unusable"


@pytest.mark.parametrize("place", ["reader", "step"])
def test_ctrl_c_ends_all_and_keeps_what_was_written(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = MODELS["bfloat16"], count(1)
    scheduler = Scheduler(model, CAPACITY, 2)

    def interrupt(*_: object) -> None:
        if next(calls) == 7:
            raise KeyboardInterrupt

    if place == "step":
        recorded(monkeypatch, compiled, "step", interrupt)
    readers = [interrupt] if place == "reader" else []
    wishes = [Wish([1, 2, 3], Rules(20), seed=seed) for seed in range(3)]
    tasks = [wish.task(model, readers=readers) for wish in wishes]
    with pytest.raises(KeyboardInterrupt):
        scheduler.write_all(tasks)
    assert [task.sample.finish for task in tasks] == ["interrupted"] * 3
    assert [bool(task.sample.rounds) for task in tasks] == [True, True, False]
    for wish, task in zip(wishes[:2], tasks, strict=False):
        written = task.text.generated
        assert written == alone(model, wish)[0][: len(written)] and 3 <= len(written) <= 6
    assert not scheduler.active and not scheduler.waiting


def test_readers_take_no_time_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = Writer(MODELS["float64"], 20)
    writer.begin([1, 2])
    seconds = 0.0
    monkeypatch.setattr(writer, "clock", lambda: seconds)

    def take_time(*_: object) -> None:
        nonlocal seconds
        seconds += 1

    text, greedy = writer.new_text(Rules(6)), SamplingParams()
    task = Task(text, writer.plain, greedy, Coupling("race", 0), [take_time])
    assert writer.write_all([task]) == task.sample.seconds == 0.0
    assert (len(task.sample.rounds), seconds) == (6, 6.0)


def test_what_readers_take_is_no_decoding_time() -> None:
    model, wish = MODELS["bfloat16"], Wish([1, 2, 3], Rules(10), params=SamplingParams())
    scheduler = Scheduler(model, CAPACITY, 2)
    tasks = [wish.task(model, readers=[lambda *_: time.sleep(0.05)]) for _ in range(2)]
    scheduler.write_all(tasks)
    assert scheduler.reading > 1.0
    assert all(task.sample.seconds < 0.5 for task in tasks)


def test_a_conversation_goes_on_in_the_slot_that_has_read_it() -> None:
    """Whatever slot that is; the text is the one of a conversation read anew."""
    model = MODELS["bfloat16"]
    first = [1, 2, 3, 4, 5, 6]
    scheduler = Scheduler(model, CAPACITY, 2)
    tasks = [Wish(prompt, Rules(4)).task(model) for prompt in ([7, 8, 9], first)]
    scheduler.write_all(tasks)
    answer = tasks[1].sample.tokens
    turn = Wish([*first, *answer, 10, 1], Rules(4))
    answers = [(len(first), len(first) + len(answer))]
    later, anew = (turn.task(model, answers=answers) for _ in range(2))
    scheduler.write_all([later])
    assert scheduler.slots[1].prompt == turn.prompt, "where the first turn was written"
    Scheduler(model, CAPACITY, 1).write_all([anew])
    assert later.sample.tokens == anew.sample.tokens
