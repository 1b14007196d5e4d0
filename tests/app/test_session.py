"""The Python interface: streams, texts together, and what a call leaves behind."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

import generate
from app import session as sessions
from app.session import Session
from decoding.rounds import Round
from decoding.verify import COUPLINGS
from model.errors import InputError
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
    assert generate.generate("tiny-llama", FOX, **OPTIONS, **options).text == sample.text


@pytest.mark.parametrize("rule", COUPLINGS)
@pytest.mark.parametrize("draft", ["exit", "lowbit", "auto"])
def test_a_seed_repeats_its_texts_alone_and_together(
    session: Session, rule: str, draft: str
) -> None:
    options = {"temperature": 0.9, "seed": 11, "coupling": rule, "draft": draft}
    samples = session.write_all(PROMPTS, **options)
    given = session.merged(options)
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


def test_ctrl_c_ends_all_texts_and_keeps_what_was_written(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = session.merged({"draft": "none"})
    samples = [session.begin(session.encode(prompt), given) for prompt in PROMPTS]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, type(session.model), "together", 7)
        session.finish_all(samples)
    assert all(sample.finish == "interrupted" and sample.rounds for sample in samples)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        whole = session.write(prompt, draft="none").tokens
        assert whole[: len(sample.tokens)] == sample.tokens != whole


def test_an_error_of_one_text_is_raised_when_the_others_are_written(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [session.begin(session.encode(prompt)) for prompt in PROMPTS]
    production = sessions.speculate

    def failing(model: Any, cache: Any, text: Any, *rest: Any, **more: Any) -> Iterator[Round]:
        yield from islice(
            production(model, cache, text, *rest, **more), 2 if text is samples[1].source else None
        )
        if text is samples[1].source:
            raise InputError("no more")

    monkeypatch.setattr(sessions, "speculate", failing)
    assert refusal(session.finish_all, samples) == "no more"
    assert [sample.finish for sample in samples] == ["length", "interrupted", "length", "length"]


def test_nothing_of_inference_mode_is_left_to_the_caller(session: Session) -> None:
    session.write(FOX)
    next(session.stream(FOX))
    session.write_all(PROMPTS)
    assert not torch.is_inference_mode_enabled()
    torch.ones(1, requires_grad=True).sum().backward()


def test_the_low_bit_copies_of_a_plan_stay_those_of_the_first_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps hold their addresses."""
    session = generate.load("tiny-llama", dtype="float32", **OPTIONS | {"draft": "lowbit"})
    first = session.write(FOX)
    rounded = recorded(monkeypatch, type(session.model.model), "rounded", lambda *_: 1)
    for bits in (4, 8, 4):
        again = session.write(FOX, draft="lowbit", bits=bits)
        assert again.tokens == first.tokens
    drafts = [round.drafted for round in first.rounds]
    assert [round.drafted for round in again.rounds] == drafts
    written = len(rounded)
    session.write(FOX, draft="lowbit", bits=8)
    assert len(rounded) == written


def test_the_context_that_a_model_is_loaded_with_ends_every_text() -> None:
    small = generate.load("tiny-llama", context=20, max_new_tokens=50)
    for sample in (small.write(FOX), *small.write_all([FOX])):
        assert (len(sample.source), sample.finish) == (20, "length")
    assert "20 are used" in refusal(small.write, FOX * 4)


def test_a_sample_is_shown_in_one_short_line(session: Session) -> None:
    """Without its rounds."""
    sample = session.write(FOX, max_new_tokens=90)
    assert repr(sample).startswith("Sample(") and len(repr(sample)) < 120
