"""The Python interface and conversations: checked options, streams, and caches kept from turn to
turn that equal those of a conversation read anew.
"""

import io
from functools import reduce
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import generate
from app.options import merge_options
from app.prompt import MOST_ANSWERS, Segment, conversation, segments_of, steps
from app.session import ContextFull, Session
from model import InputError
from tests.calls import recorded
from tests.commands import Run
from tests.refusal import refusal

FOX = "Tell me of a fox."
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "draft": "lookup"}


@pytest.fixture(scope="module")
def session() -> Session:
    return generate.load("tiny-llama", **OPTIONS)


def test_a_text_is_the_same_written_streamed_and_in_shared_steps(session: Session) -> None:
    asked = {"temperature": 0.8, "seed": 3}
    sample = session.write(FOX, **asked)
    assert "".join(session.stream(FOX, **asked)) == sample.text
    assert session.write_all([FOX, "Hello"], **asked)[0].tokens == sample.tokens
    assert (len(sample.tokens), sample.finish) == (12, "length") and sample.speed > 0
    assert generate.generate("tiny-llama", FOX, **OPTIONS, **asked).text == sample.text


def test_equal_prompts_written_together_are_different_samples(session: Session) -> None:
    one, other = session.write_all([FOX] * 2, temperature=1.0, seed=1)
    assert one.tokens != other.tokens


def test_a_call_or_ctrl_c_ends_a_stream_and_the_session_goes_on(session: Session) -> None:
    stream = session.stream(FOX)
    next(stream)
    whole = session.write(FOX)
    assert list(stream) == [] and len(whole.tokens) == 12
    stream = session.stream(FOX)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    assert session.write(FOX).tokens == whole.tokens


def test_another_draft_comes_without_the_session_s_options_of_drafting(session: Session) -> None:
    of_exit = {"draft": "exit", "exit_layer": 3, "gamma": 2}
    exits = merge_options(session.request.options, of_exit)
    given = merge_options(exits, {"draft": "lookup"})
    assert given.exit_layer is None and given.gamma is None
    assert merge_options(exits, {"draft": "exit"}).exit_layer == 3
    session.chat(draft="exit", exit_layer=3).say(FOX, draft="lookup")
    lark = merge_options(exits, {"grammar": "g"})
    assert merge_options(lark, {"regex": "a"}).grammar is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": "0.7"}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"coupling": "bogus"}, "coupling must be one of ratio, race"),
        ({"stop": "end"}, "stop must be a list of strings"),
        ({"stop": None}, "stop must be a list of strings"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"max_new_tokens": "8"}, "max_new_tokens must be a whole number"),
        ({"chat": "yes"}, "chat must be True or False"),
        ({"draft": 3}, "draft must be a string"),
        ({"trace": True}, "no option trace"),
        ({"colour": "red"}, "no option colour"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite"),
        ({"stop": ["\ud800"]}, "stop is not UTF-8 text"),
        ({"regex": "\ud800"}, "regex is not UTF-8 text"),
        ({"json_schema": {"enum": ["\ud800"]}}, "is not"),
        ({"json_schema": {"enum": {1}}}, "json_schema is no JSON"),
        ({"model": "tiny-gemma2"}, "model is an option of load"),
        ({"help": True}, "no option help"),
        ({"draft": "nonsense"}, "no draft is called"),
    ],
    ids=str,
)
def test_an_option_of_a_wrong_type_or_value_is_named(
    session: Session, wrong: dict[str, Any], said: str
) -> None:
    for call in (session.write, session.stream, session.chat().say, session.write_all):
        prompt = ["Hello"] if call == session.write_all else "Hello"
        assert said in refusal(call, prompt, **wrong)


@pytest.mark.parametrize("prompts", [None, 3, "abc"])
def test_prompts_that_are_no_list_are_refused(session: Session, prompts: Any) -> None:
    assert "prompts must be a list of strings" in refusal(session.write_all, prompts)


@pytest.mark.parametrize("prompt", ["", "  ", None, 3, ["Hello"], b"Hello"], ids=repr)
def test_a_prompt_that_is_no_text_is_refused(session: Session, prompt: Any) -> None:
    for call in (session.write, session.stream, session.chat().say):
        assert "a string that is not empty" in refusal(call, prompt)


# The reading of a conversation


def test_an_answer_is_read_by_steps_from_the_token_before_it_on() -> None:
    ids = range(20)
    first = [Segment(ids[:4], False), *steps(ids[4:9])]
    more = [Segment(ids[9:13], False), *steps(ids[13:16]), Segment(ids[16:19], False)]
    assert segments_of(ids[:9], ()) == [Segment(ids[:8], False)]
    assert segments_of(ids[:10], [(5, 9)]) == first
    assert segments_of(ids, [(5, 9), (14, 16)]) == first + more


def test_a_conversation_of_many_answers_is_rendered_a_limited_number_of_times() -> None:
    """Each rendering takes time in proportion to the conversation."""
    tokenizer = Mock(encode_chat=lambda messages, answer="": calls.append(answer) or [1])
    calls: list[str] = []
    _, answers = conversation(tokenizer, [{"role": "assistant", "content": ""}] * 4000)
    assert len(calls) == 1 + 2 * MOST_ANSWERS and not answers


def entries(chat: Any) -> list[torch.Tensor]:
    return [*chat.writer.cache.keys, *chat.writer.cache.values]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "race"])
def test_a_conversation_equals_one_that_is_read_anew(
    session: Session, options: dict[str, Any]
) -> None:
    """Its answers, and the bits of its cache."""
    turns = ["Tell me a story.", "And then?", "Who was it?"]
    chat = session.chat(**options)
    for turn in turns:
        anew = session.chat(**options)
        anew.messages = list(chat.messages)
        assert anew.say(turn).text == chat.say(turn).text
        count = min(anew.writer.cache.length, chat.writer.cache.length)
        for kept, fresh in zip(entries(chat), entries(anew), strict=True):
            assert torch.equal(kept[:, :, :count], fresh[:, :, :count])
    assert [each["role"] for each in chat.messages] == ["user", "assistant"] * 3


def test_a_turn_reads_only_what_is_new(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = session.chat()
    chat.say("Tell me a story of a fox who learns to share his food with all the others.")
    model = session.model.model
    read = recorded(monkeypatch, model, "prefill", lambda tokens, *rest: tokens.shape[1])
    chat.say("And?")
    assert sum(read) < 20 < chat.writer.cache.length


def test_an_answer_that_is_not_read_to_its_end_is_kept_so_far(session: Session) -> None:
    chat = session.chat()
    pieces = chat.stream("Tell me a story.")
    begun = next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"].startswith(begun) and chat.sample.finish == "interrupted"
    assert chat.say("Go on.").finish == "length"
    next(chat.stream("Who was it?"))
    for _ in range(3):
        chat.forget()
    chat.say("Hello")
    assert [each["content"] for each in chat.messages[::2]] == ["Hello"]


@pytest.mark.parametrize(
    "wrong",
    [{"draft": "absent.py:Drafter"}, {"draft": "skip", "plan": "absent.json"}],
    ids=["drafter", "plan"],
)
def test_nothing_is_kept_of_a_turn_that_could_not_be_answered(
    session: Session, wrong: dict[str, Any]
) -> None:
    chat = session.chat()
    chat.say("Hello")
    before = list(chat.messages)
    assert "absent" in refusal(chat.say, "Tell me a story.", **wrong)
    assert chat.messages == before


def test_the_context_that_a_model_is_loaded_with_ends_every_text() -> None:
    small = generate.load("tiny-llama", context=20, max_new_tokens=50)
    prompt = "Tell me a story of a fox."
    for sample in (small.write(prompt), *small.write_all([prompt])):
        assert (len(sample.source), sample.finish) == (20, "length")
    assert "of which 20 are used" in refusal(small.write, prompt * 2)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 10**400, "temperature": 1.0},
        {"seed": 10**5000},
        {"json_schema": {"type": "integer", "minimum": 10**40}},
        {"json_schema": reduce(lambda inner, _: {"items": inner}, range(3000), {})},
    ],
    ids=["top-k", "seed", "minimum", "depth"],
)
def test_numbers_and_schemas_of_any_size_are_taken_or_refused(
    session: Session, options: dict[str, Any]
) -> None:
    try:
        assert len(session.write("Hello", **options).tokens) == 12
    except InputError as error:
        assert "UTF-8" not in str(error)


def test_a_full_context_is_said_and_oldest_turns_can_be_forgotten(session: Session) -> None:
    chat = session.chat()
    chat.say("Hello")
    chat.say("Again")
    with pytest.raises(ContextFull, match="forget its oldest turns"):
        chat.say("fox " * session.setting.positions)
    assert len(chat.messages) == 4
    chat.forget()
    assert [each["content"] for each in chat.messages if each["role"] == "user"] == ["Again"]
    for _ in range(2):
        chat.forget()
    assert chat.messages == []


# At a terminal


TERMINAL = ["--interactive", "--model", "tiny-llama", "--draft", "lookup", "--max-new-tokens", "8"]


def test_a_conversation_at_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    lines = ["/stats", "Hello", "/stats", "/draft none", "/stats", "/draft bogus", "", "/trace"]
    lines += ["Again", "/bogus 3", "/forget", "/reset", "/help", "/quit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    said = run(*TERMINAL)
    assert said.status == 0 and "never read" not in said.out
    assert session.chat(max_new_tokens=8).say("Hello").text in said.out
    for line in (
        "nothing is written yet",
        "[draft: none]",
        "no draft is called 'bogus'",
        "[unknown command /bogus: /help",
        "/draft KIND",
    ):
        assert said.err.count(line) == 1
    assert said.err.count("tokens/s; prompt lookup") == 2, (
        "of the last answer, whatever drafts next"
    )


def test_the_trace_at_a_terminal_names_what_a_grammar_forces(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, is_named in (([], False), (["--regex", "the (fox|hen) ran"], True)):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
        said = run(*TERMINAL, "--trace", *options)
        assert said.status == 0 and ("forced by the grammar" in said.out) == is_named


def test_the_end_of_input_ends_a_conversation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(*TERMINAL).status == 0


def test_a_sample_is_printed_in_one_short_line(session: Session) -> None:
    """Without its rounds."""
    sample = session.write("Tell me of a fox.", max_new_tokens=90)
    assert repr(sample).startswith("Sample(") and len(repr(sample)) < 120
