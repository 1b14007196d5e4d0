"""The Python interface: streams, texts together, and what a call leaves behind."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import generate
from app import session as sessions
from app.session import Session
from decoding.verify import RULES
from model.fast import cpu
from tests.calls import interrupted, recorded
from tests.refusal import refusal

FOX = "Tell me of a fox."
PROMPTS = [FOX, "Hello", "The hen and the fox", FOX]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "draft": "lookup"}


@pytest.fixture(scope="module")
def session() -> Session:
    return generate.load("tiny-llama", **OPTIONS)


def test_a_text_is_the_same_written_streamed_and_in_shared_steps(session: Session) -> None:
    options = {"temperature": 0.8, "seed": 3}
    sample = session.write(FOX, **options)
    assert "".join(session.stream(FOX, **options)) == sample.text
    assert session.write_all(PROMPTS, **options)[0].tokens == sample.tokens
    assert (len(sample.tokens), sample.finish) == (12, "length") and sample.speed > 0
    assert repr(sample).startswith("Sample(") and len(repr(sample)) < 120, "without its rounds"
    assert generate.generate("tiny-llama", FOX, **OPTIONS, **options).text == sample.text


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", ["exit", "lowbit", "auto", "model"])
def test_a_seed_repeats_its_texts_alone_and_together(
    session: Session, rule: str, draft: str
) -> None:
    options = {"temperature": 0.9, "seed": 11, "coupling": rule, "draft": draft}
    options["draft_model"] = "tiny-llama" if draft == "model" else None
    samples = session.write_all(PROMPTS, **options)
    given = session.options.merged(options)
    for number, (prompt, sample) in enumerate(zip(PROMPTS, samples, strict=True)):
        alone = session.begin(session.encode(prompt), given, number)
        assert session.finish(alone).tokens == sample.tokens
    assert samples[0].tokens != samples[3].tokens, "two samples of one prompt"


def test_a_prompt_that_samples_share_is_read_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = recorded(monkeypatch, type(session.model.model), "prefill", lambda *_: 1)
    samples = session.write_all([FOX] * 3, temperature=1.0, seed=1)
    assert len(read) == 1 and len({tuple(sample.tokens) for sample in samples}) == 3


def test_a_call_or_ctrl_c_ends_a_stream_and_the_session_goes_on(session: Session) -> None:
    stream = session.stream(FOX)
    next(stream)
    whole = session.write(FOX)
    assert "cut this stream off" in refusal(list, stream) and len(whole.tokens) == 12
    stream = session.stream(FOX)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    assert session.sample.finish == "interrupted"
    assert session.write(FOX).tokens == whole.tokens


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


def test_a_chat_that_goes_on_cuts_off_its_stream_and_no_other(session: Session) -> None:
    chat = session.chat()
    streams = [chat.stream(FOX), session.stream(FOX)]
    begun = [next(stream) for stream in streams]
    chat.say("And?")
    assert "cut this stream off" in refusal(list, streams[0])
    assert begun[1] + "".join(streams[1]) == session.write(FOX).text
    assert chat.messages[1]["content"].startswith(begun[0]) and len(chat.messages) == 4


# 59 tokens of a prompt, which are not whole chunks of 8
SYSTEM = [{"role": "system", "content": "You tell stories of foxes and hens. " * 5}]


def test_a_prompt_is_read_from_the_prefix_on_that_the_cache_holds_and_the_text_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In whole chunks, so that the text has the bits of a fresh reading."""
    for module in ("app.sample", "model.decoder"):
        monkeypatch.setattr(f"{module}.PREFILL_CHUNK", 8)
    prompts = [[*SYSTEM, {"role": "user", "content": text}] for text in (FOX, "Hello", FOX * 2)]
    fresh = [generate.load("tiny-llama", **OPTIONS).write(prompt) for prompt in prompts]
    session = generate.load("tiny-llama", **OPTIONS)
    target = type(session.model.model)
    read = recorded(monkeypatch, target, "prefill", lambda _, ids, cache, at=0: (at, ids.shape[1]))
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
    """A clock that copies move by 100 seconds, the prompt by 10, each pass by 1."""
    session = generate.load("tiny-llama", max_new_tokens=12, draft="none")
    clock = [0]
    monkeypatch.setattr(sessions, "now", lambda device: clock[0])

    def moving(owner: Any, name: str, by: int) -> None:
        recorded(monkeypatch, owner, name, lambda *_: clock.__setitem__(0, clock[0] + by))

    moving(sessions, "strategy_of", 100)
    moving(type(session.model.model), "prefill", 10)
    moving(type(session.model), "__call__", 1)
    sample = session.write(FOX)
    assert (sample.prompt_seconds, sample.seconds, sample.speed) == (10, 12, 1)
    assert sample.first_token_seconds == 100 + 10 + 1


def test_ctrl_c_ends_all_texts_and_keeps_what_was_written(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = session.options.merged({"draft": "none"})
    samples = [session.begin(session.encode(prompt), given) for prompt in PROMPTS]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, type(session.model), "together", 7)
        session.finish_all(samples)
    assert all(sample.finish == "interrupted" and sample.rounds for sample in samples)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        whole = session.write(prompt, draft="none").tokens
        assert whole[: len(sample.tokens)] == sample.tokens != whole


def test_an_error_of_one_text_is_raised_when_the_others_are_written(session: Session) -> None:
    """Here two of its tokens are written, then none is allowed."""
    samples = [session.begin(session.encode(prompt)) for prompt in PROMPTS]
    text = samples[1].source
    nothing = torch.zeros(text.vocab_size, dtype=torch.bool)
    ends = len(text) + 2
    text.conditions = replace(
        text.conditions, constraints=[lambda tokens: nothing if len(tokens) >= ends else None]
    )
    assert "no token" in refusal(session.finish_all, samples)
    assert [sample.finish for sample in samples] == ["length", "interrupted", "length", "length"]


def test_nothing_of_inference_mode_is_left_to_the_caller(session: Session) -> None:
    next(session.stream(FOX))
    assert not torch.is_inference_mode_enabled()


def test_the_low_bit_copies_of_a_plan_stay_those_of_the_first_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps hold their addresses."""
    session = generate.load("tiny-llama", dtype="float32", **OPTIONS | {"draft": "lowbit"})
    made = recorded(monkeypatch, cpu, "rounded", lambda *_: 1)
    first, *_ = [session.write(FOX, bits=bits) for bits in (4, 8)]
    count = len(made)
    again, *_ = [session.write(FOX, bits=bits) for bits in (4, 8)]
    assert len(made) == count > 0
    assert [each.drafted for each in again.rounds] == [each.drafted for each in first.rounds]


def test_the_context_that_a_model_is_loaded_with_ends_every_text() -> None:
    small = generate.load("tiny-llama", context=20, max_new_tokens=50)
    for sample in (small.write(FOX), *small.write_all([FOX])):
        assert (len(sample.source), sample.finish) == (20, "length")
    assert "20 are used" in refusal(small.write, FOX * 4)
