"""Conversations: what a turn reads, keeps and forgets, and one at a terminal."""

import io
import os

import pytest

import generate
from app.session import Session
from app.terminal import turns
from tests.calls import interrupted, recorded
from tests.commands import Run
from tests.refusal import refusal

STORY = "Tell me a story of a fox who learns to share his food with all the others."


@pytest.fixture(scope="module")
def session() -> Session:
    return generate.load("tiny-llama", max_new_tokens=12, draft="lookup")


def test_a_turn_reads_only_what_is_new(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the prompt of the whole conversation, read from the common prefix on."""
    chat = session.chat()
    chat.say(STORY)
    before = [*chat.slot.tokens]
    target = type(session.model.model)
    read = recorded(monkeypatch, target, "prefill", lambda _, ids, cache, at=0: ids[0].tolist())
    answer = chat.say("And?")
    prompt = answer.source.tokens[: answer.source.prompt_length]
    ((new),) = read
    assert prompt[-1 - len(new) : -1] == new and len(new) < 20 < len(before)
    assert prompt == session.encode(chat.messages[:-1])


def test_an_answer_that_is_not_read_to_its_end_is_kept_so_far(session: Session) -> None:
    chat = session.chat()
    pieces = chat.stream("Tell me a story.")
    begun = next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"].startswith(begun) and chat.sample.finish == "interrupted"
    assert chat.say("Go on.").finish == "length"
    next(chat.stream("Who was it?"))
    for _ in range(4):
        chat.forget()
    assert chat.messages == []
    chat.say("Hello")
    assert [each["content"] for each in chat.messages[::2]] == ["Hello"]


def test_ctrl_c_while_a_prompt_is_read_leaves_no_entries_under_another_prompts_tokens(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("app.sample", "model.decoder"):
        monkeypatch.setattr(f"{module}.PREFILL_CHUNK", 8)
    chat = session.chat()
    answer = chat.say(STORY)
    chat.forget()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, type(session.model.model), "hidden", 3)
        chat.say(STORY[::-1])
    assert chat.say(STORY).tokens == answer.tokens


def test_nothing_is_kept_of_a_turn_that_could_not_be_answered(session: Session) -> None:
    chat = session.chat()
    chat.say("Hello")
    before = list(chat.messages)
    assert "absent" in refusal(chat.say, "Tell me a story.", draft="absent.py:Drafter")
    assert chat.messages == before


def test_a_full_context_is_said_and_oldest_turns_can_be_forgotten() -> None:
    chat = generate.load("tiny-llama", max_new_tokens=6, context=120).chat()
    chat.say("Hello")
    chat.say("Again")
    assert "forget the oldest turns" in refusal(chat.say, "fox " * 120)
    assert len(chat.messages) == 4
    chat.forget()
    assert [each["content"] for each in chat.messages if each["role"] == "user"] == ["Again"]
    assert chat.say("Hello").rounds


TERMINAL = ["--interactive", "--model", "tiny-llama", "--draft", "lookup", "--max-new-tokens", "8"]


def test_a_conversation_at_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    lines = ["/stats", "Hello", "/stats", "/draft none", "/stats", "/draft bogus", "", "/trace"]
    lines += ["Again", "/bogus 3", "/forget", "/reset", "/help"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    said = run(*TERMINAL)
    assert said.status == 0, "at the end of input"
    assert session.chat(max_new_tokens=8).say("Hello").text in said.out
    for line in (
        "nothing is written yet",
        "[draft: none]",
        "no draft is called 'bogus'",
        "[unknown command /bogus: /help",
        "/draft KIND",
    ):
        assert said.err.count(line) == 1
    # of the last answer, whatever drafts next
    assert said.err.count("tokens/s; prompt lookup") == 2
    assert "accepted" in said.out, "the trace"


def test_lines_that_are_pasted_together_are_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    with open(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(keyboard, b"one\ntwo\n\nthree\n")
        said = turns()
        assert next(said) == "one\ntwo\n\nthree"
        os.write(keyboard, b"/quit\n")
        assert list(said) == []
    os.close(keyboard)
