"""The Python interface: texts, streams, conversations, texts together, and what a call leaves
behind. Conversations at a terminal.
"""

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import generate
from app import session as sessions
from app.session import Session
from decoding.verify import RULES
from model.decoder import PREFILL_CHUNK
from model.fast import cpu
from tests.calls import interrupted, recorded
from tests.commands import Run
from tests.refusal import refusal

FOX = "Tell me of a fox."
STORY = "Tell me a story of a fox who learns to share his food with all the others."
PROMPTS = [FOX, "Hello", "The hen and the fox", FOX]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "draft": "lookup"}
ABSENT = "absent.py:Drafter"


@pytest.fixture(scope="module")
def session() -> Session:
    return generate.load("tiny-llama", **OPTIONS)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read eight tokens at a time."""
    for module in ("app.sample", "model.decoder"):
        monkeypatch.setattr(f"{module}.PREFILL_CHUNK", 8)


# 59 tokens of a prompt, which are not whole chunks of 8
SYSTEM = [{"role": "system", "content": "You tell stories of foxes and hens. " * 5}]


@pytest.mark.usefixtures("short_chunks")
def test_a_prompt_is_read_from_the_prefix_on_that_the_cache_holds_and_the_text_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In whole chunks, so that the text has the bits of a fresh reading."""
    prompts = [[*SYSTEM, {"role": "user", "content": text}] for text in (FOX, "Hello", FOX * 2)]
    fresh = [generate.generate("tiny-llama", prompt, **OPTIONS) for prompt in prompts]
    session = generate.load("tiny-llama", **OPTIONS)
    read = recorded(
        monkeypatch,
        type(session.model.model),
        "prefill",
        lambda _, ids, cache, at=0: (at, ids.shape[1]),
    )
    for prompt, wanted in zip(prompts, fresh, strict=True):
        assert session.write(prompt).tokens == wanted.tokens
        assert "".join(session.stream(prompt)) == wanted.text
    lengths = [sample.prompt_tokens - 1 for sample in fresh]
    assert [at + count for at, count in read] == lengths, "each is read once"
    assert read[0] == (0, lengths[0]) and all(at % 8 == 0 for at, _ in read)
    assert all(count < 8 + 2 * len(FOX) < at for at, count in read[1:])


def test_speed_counts_the_time_from_the_end_of_the_prompt_to_the_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that a reader moves by 1000 seconds, copies by 100, the prompt by 10, each pass by 1.
    Texts in shared steps have the same time.
    """
    session = generate.load("tiny-llama", max_new_tokens=12, draft="none")
    clock = [0]
    monkeypatch.setattr(sessions, "now", lambda device: clock[-1])

    def takes(patch: pytest.MonkeyPatch, owner: Any, name: str, seconds: int) -> None:
        recorded(patch, owner, name, lambda *_: clock.append(clock[-1] + seconds))

    takes(monkeypatch, type(session.model.model), "prefill", 10)
    takes(monkeypatch, type(session.model), "together", 1)
    with monkeypatch.context() as patch:
        takes(patch, sessions, "strategy_of", 100)
        sample = session.begin(session.encode(FOX))
        for _ in session.rounds(sample):
            clock.append(clock[-1] + 1000)
    assert (sample.prompt_seconds, sample.seconds, sample.speed) == (10, 12, 1)
    assert sample.first_token_seconds == 100 + 10 + 1
    samples = [session.begin(session.encode(FOX)) for _ in range(2)]
    session.finish_all(samples)
    for each in samples:
        assert (each.prompt_seconds, each.seconds, each.first_token_seconds) == (10, 12, 10 + 1)


def test_the_context_that_a_model_is_loaded_with_ends_every_text() -> None:
    small = generate.load("tiny-llama", context=20, max_new_tokens=50)
    for sample in (small.write(FOX), *small.write_all([FOX])):
        assert (len(sample.source), sample.finish) == (20, "length")


def test_memory_is_looked_at_for_a_prompt_that_is_not_known_yet_and_for_the_copies_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = recorded(monkeypatch, Session, "memory", lambda _, positions, prompt=0: prompt)
    session = generate.load("tiny-llama", draft="none")
    assert prompts == [PREFILL_CHUNK]
    monkeypatch.setattr("weights.memory.free_bytes", lambda device: 1000)
    for draft in ("lowbit", "exit"):
        said = refusal(session.write, FOX, draft=draft, bits=4)
        assert "do not fit into memory: give --draft none or lookup" in said
    assert "the model does not fit on cpu" in refusal(
        session.write, FOX, draft="model", draft_model="tiny-llama"
    )


def test_the_low_bit_copies_of_a_plan_stay_those_of_the_first_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps hold their addresses."""
    session = generate.load("tiny-llama", dtype="float32", **OPTIONS | {"draft": "lowbit"})
    made_after = recorded(monkeypatch, cpu, "rounded", lambda *_: session.written)
    samples = [session.write(FOX, bits=bits) for bits in (4, 8, 4, 8)]
    assert {*made_after} == {0, 12}
    drafts = [[round.drafted for round in sample.rounds] for sample in samples]
    assert drafts[:2] == drafts[2:]


# Texts together


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "draft",
    [*({"draft": kind} for kind in ("exit", "lowbit", "auto")), {"draft_model": "tiny-llama"}],
    ids=str,
)
def test_a_seed_repeats_its_texts_alone_and_together(
    session: Session, rule: str, draft: dict[str, str]
) -> None:
    options = {"temperature": 0.9, "seed": 11, "coupling": rule, "draft": "model"} | draft
    samples = session.write_all(PROMPTS, **options)
    for number, (prompt, sample) in enumerate(zip(PROMPTS, samples, strict=True)):
        alone = session.begin(session.encode(prompt), session.options.merged(options), number)
        assert session.finish(alone).tokens == sample.tokens
    assert samples[0].tokens != samples[3].tokens, "two samples of one prompt"


def test_a_prompt_that_samples_share_is_read_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = recorded(monkeypatch, type(session.model.model), "prefill", lambda *_: 1)
    samples = session.write_all([FOX] * 3, temperature=1.0, seed=1)
    assert len(read) == 1 and len({tuple(sample.tokens) for sample in samples}) == 3


def test_two_threads_write_the_texts_that_each_would_write_alone(session: Session) -> None:
    wanted = [session.write(prompt).tokens for prompt in PROMPTS]
    chats = [session.chat() for _ in PROMPTS]
    answers = [session.chat().say(prompt).tokens for prompt in PROMPTS]

    def work(number: int) -> bool:
        written = session.write(PROMPTS[number]).tokens == wanted[number]
        together = [each.tokens for each in session.write_all(PROMPTS)] == wanted
        return written and together and chats[number].say(PROMPTS[number]).tokens == answers[number]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert all(threads.map(work, range(len(PROMPTS))))


def test_ctrl_c_ends_all_texts_and_keeps_what_was_written(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = session.options.merged({"draft": "none"})
    samples = [session.begin(session.encode(prompt), given) for prompt in PROMPTS]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, type(session.model), "together", 7)
        session.finish_all(samples)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        whole = session.write(prompt, draft="none").tokens
        assert whole[: len(sample.tokens)] == sample.tokens != whole
        assert sample.finish == "interrupted" and sample.rounds


def test_an_error_of_one_text_is_raised_when_the_others_are_written(session: Session) -> None:
    samples = [
        session.begin([5, 9, 2], session.options.merged({"draft": kind}))
        for kind in ("exit", ABSENT, "none", "lookup")
    ]
    assert ABSENT in refusal(session.finish_all, samples)
    assert [sample.finish for sample in samples] == ["length", "interrupted", "length", "length"]


# Streams and conversations


def test_a_call_cuts_off_the_stream_on_its_cache_and_no_other(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was not begun, and where the call needs a larger cache."""
    monkeypatch.setattr(sessions, "POSITIONS", 8)
    small = generate.load("tiny-llama", **OPTIONS)
    chat = session.chat()
    streams = [chat.stream(FOX), small.stream(FOX), session.stream("Hello"), session.stream(FOX)]
    begun = [next(stream) for stream in streams]
    assert not torch.is_inference_mode_enabled(), "this is left to the caller"
    late = chat.stream("Late")
    chat.say("And?")
    held = recorded(monkeypatch, small, "new_slot", lambda _: small.slot)
    small.write(FOX, max_new_tokens=40)
    assert held == [None], "the smaller cache is freed first"
    for cut in (late, *streams[:3]):
        assert "cut this stream off" in refusal(list, cut)
    assert begun[3] + "".join(streams[3]) == session.write(FOX).text
    assert chat.messages[1]["content"].startswith(begun[0]) and len(chat.messages) == 4


def test_a_turn_reads_only_what_is_new(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the prompt of the whole conversation, read from the common prefix on."""
    chat = session.chat()
    chat.say(STORY)
    read = recorded(
        monkeypatch, type(session.model.model), "prefill", lambda _, ids, *at: ids[0].tolist()
    )
    answer = chat.say("And?")
    prompt = session.encode(chat.messages[:-1])
    assert answer.source.tokens[: answer.prompt_tokens] == prompt
    assert read == [prompt[-1 - len(read[0]) : -1]] and len(read[0]) < len(prompt) / 2


def test_an_answer_that_is_not_read_to_its_end_is_kept_so_far(session: Session) -> None:
    chat = session.chat()
    pieces = chat.stream("Tell me a story.")
    begun = next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"].startswith(begun) and chat.sample.finish == "interrupted"
    assert chat.say("Go on.").finish == "length"
    for _ in range(3):
        chat.forget()
    assert chat.messages == []


@pytest.mark.usefixtures("short_chunks")
def test_ctrl_c_while_a_prompt_is_read_leaves_no_entries_under_another_prompts_tokens(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = session.chat()
    answer = chat.say(STORY)
    chat.forget()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, type(session.model.model), "hidden", 3)
        chat.say(STORY[::-1])
    assert chat.say(STORY).tokens == answer.tokens


def test_no_turn_without_an_answer_is_kept_and_oldest_turns_can_be_forgotten() -> None:
    chat = generate.load("tiny-llama", max_new_tokens=6, context=120).chat()
    chat.say("Hello")
    chat.say("Again")
    assert "forget the oldest turns" in refusal(chat.say, "fox " * 120)
    assert ABSENT in refusal(chat.say, "Hello", draft=ABSENT) and chat.sample.rounds
    assert "absent.json cannot be read" in refusal(chat.session.chat, json_schema="absent.json")
    assert "system is an option of chat, not of a turn" in refusal(chat.say, "Hello", system="s")
    late = chat.stream("Late")
    chat.forget()
    assert "cut this stream off" in refusal(list, late)
    assert [each["content"] for each in chat.messages if each["role"] == "user"] == ["Again"]
    assert chat.say("Hello").rounds


LINES = """/stats
Hello
/stats
/draft none
/stats
/draft bogus

/trace
Again
/bogus 3
/forget
/reset now
/reset
/help"""
TERMINAL = ["--interactive", "--model", "tiny-llama", "--draft", "lookup", "--max-new-tokens", "8"]


def test_a_conversation_at_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(LINES))
    said = run(*TERMINAL)
    assert said.status == 0, "at the end of input"
    assert session.chat(max_new_tokens=8).say("Hello").text in said.out
    for line in (
        "nothing is written yet",
        "[draft: none]",
        "no draft is called 'bogus'",
        "[unknown command '/bogus 3': /help",
        "[unknown command '/reset now': /help",
        "/draft KIND",
    ):
        assert said.err.count(line) == 1
    # of the last answer, whatever drafts next
    assert said.err.count("tokens/s; prompt lookup") == 2
    assert "accepted" in said.out, "the trace"
