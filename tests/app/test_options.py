"""Options: types, ranges, what goes together, and one line for what does not."""

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from app.options import GRAMMARS, Options, parse
from app.plan_file import DraftPlan
from app.session import Session, load
from model.errors import InputError
from model.plan import LayerPlan
from tests.refusal import line_of, refusal

REFUSED = {  # options -> the name of the wrong one, and a part of the line
    "text for a number": ({"temperature": "0.7"}, "temperature", "must be a number"),
    "a truth value for a number": ({"temperature": True}, "temperature", "must be a number"),
    "a fraction": ({"seed": 1.5}, "seed", "must be a whole number"),
    "a number for a truth value": ({"chat": "yes"}, "chat", "must be True or False"),
    "another rule": ({"coupling": "bogus"}, "coupling", "one of ratio, race, block"),
    "a number for a list": ({"stop": 3}, "stop", "must be a list of strings"),
    "numbers in a list": ({"stop": ["a", 3]}, "stop", "must be a list of strings"),
    "nothing for a list": ({"stop": None}, "stop", "must be a list of strings"),
    "a number for text": ({"draft": 3}, "draft", "must be a string"),
    "a negative temperature": ({"temperature": -1.0}, "temperature", "at least 0"),
    "an infinite one": ({"temperature": float("inf")}, "temperature", "finite"),
    "no number": ({"min_target_confidence": float("nan")}, "min_target_confidence", "from 0 to 1"),
    "no text to write": ({"max_new_tokens": 0}, "max_new_tokens", "at least 1"),
    "a negative length": ({"draft": "exit", "gamma": -1}, "gamma", "at least 0"),
    "half a character": ({"stop": ["\ud800"]}, "stop", "is not UTF-8 text"),
    "an unknown draft": ({"draft": "nonsense"}, "draft", "no draft is called 'nonsense'"),
    "no draft model": ({"draft": "model"}, "draft_model", "needs --draft-model"),
    "no effect on lookup": (
        {"draft": "lookup", "bits": 4},
        "bits",
        "no effect with --draft lookup",
    ),
    "adaptive lookup": ({"draft": "lookup", "adaptive": True}, "adaptive", "no effect with"),
    "no effect on auto": ({"draft": "auto", "adaptive": True}, "adaptive", "no effect with"),
    "three bits": ({"draft": "lowbit", "bits": 3}, "bits", "one of 4, 8"),
    "two grammars": (dict.fromkeys(GRAMMARS, "a"), None, "give one of"),
    "a prompt for a server": ({"serve": "8000", "prompt": "hi"}, None, "stand alone"),
    "a dry conversation": ({"interactive": True, "dry_run": True}, None, "stand alone"),
    "a queue without a server": ({"queue": 3}, None, "no effect without --serve"),
}


@pytest.mark.parametrize(("given", "field", "said"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_option_is_named_in_one_line(
    given: dict[str, Any], field: str | None, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        Options(**given)
    assert said in line_of(caught.value) and caught.value.field == field


def test_a_command_line_fills_the_same_options() -> None:
    given = "hi --draft exit --exit-layer 3 --no-chat --stop a --stop b --temperature .5 --trace"
    assert parse(given.split()) == Options(
        prompt="hi", draft="exit", exit_layer=3, chat=False, stop=("a", "b"), temperature=0.5,
        trace=True,
    )  # fmt: skip
    assert parse([]) == Options()


def test_another_draft_comes_without_the_options_of_the_known_one() -> None:
    exits = Options(draft="exit", exit_layer=3, gamma=2, trace=True)
    assert exits.merged({"draft": "lookup"}) == Options(draft="lookup", trace=True)
    assert exits.merged({"draft": "exit"}) == exits
    assert exits.merged({"grammar": "g"}).merged({"regex": "a"}).grammar is None


@pytest.fixture(scope="module")
def session() -> Session:
    return load("tiny-llama", max_new_tokens=12, draft="lookup")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": "0.7"}, "--temperature must be a number"),
        ({"trace": True}, "no option is called trace: give adaptive, ban, "),
        ({"colour": "red"}, "no option is called colour"),
        ({"model": "tiny-gemma2"}, "model is an option of load"),
        ({"regex": "\ud800"}, "--regex is not UTF-8 text"),
        ({"regex": "a{99999999}"}, "the regular expression: lexer error: too many"),
        ({"json_schema": {"enum": ["\ud800"]}}, "is not"),
        ({"json_schema": {"enum": {1}}}, "--json-schema is no JSON"),
        ({"chat_template_kwargs": "{"}, "--chat-template-kwargs is no JSON"),
        ({"chat_template_kwargs": ""}, "--chat-template-kwargs is empty"),
        ({"chat_template_kwargs": {"x": {1}}}, "--chat-template-kwargs is no JSON"),
        ({"chat_template_kwargs": {"messages": []}}, "multiple values for keyword argument"),
        ({"draft": "absent.py:Drafter"}, "absent.py"),
        ({"draft": "skip", "plan": "absent.json"}, "absent.json"),
        ({"draft": "skip", "plan": DraftPlan(LayerPlan.full(2))}, "the plan has 2 layers"),
    ],
    ids=str,
)
def test_every_call_of_python_refuses_it(
    session: Session, wrong: dict[str, Any], said: str
) -> None:
    for call in (session.write, session.chat().say):
        assert said in refusal(call, "Hello", **wrong)
    assert said in refusal(session.write_all, ["Hello"], **wrong)


@pytest.mark.parametrize("prompt", ["", " ", None, 3, [], ["Hello"], [True], b"Hello"], ids=repr)
def test_what_is_no_prompt_is_refused(session: Session, prompt: Any) -> None:
    for call in (session.write, session.stream, session.chat().say):
        assert "a string that is not empty" in refusal(call, prompt)
    assert "prompts must be a list" in refusal(session.write_all, "Hello")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([1 << 20], "unless they were given, the tokenizer does not belong"),
        ([-1], "some outside 0 to"),
        ([{"role": "user"}], "a message is"),
        ([{"role": "user", "content": "\ud800"}], "a message is"),
        ("\ud800", "the prompt cannot be read as UTF-8 text"),
    ],
)
def test_a_prompt_that_no_model_reads_is_refused(session: Session, prompt: Any, said: str) -> None:
    assert said in refusal(session.write, prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 10**400, "temperature": 1.0},
        {"json_schema": {"type": "integer", "minimum": 10**40}},
        {"json_schema": reduce(lambda inner, _: {"items": inner}, range(3000), {})},
    ],
    ids=["top-k", "minimum", "depth"],
)
def test_numbers_and_schemas_of_any_size_are_taken_or_refused(
    session: Session, options: dict[str, Any]
) -> None:
    try:
        assert len(session.write("Hello", **options).tokens) == 12
    except InputError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("option", ["chat_template_kwargs", "json_schema"])
def test_a_file_that_holds_no_object_is_refused(
    session: Session, option: str, tmp_path: Path
) -> None:
    file = tmp_path / "list.json"
    file.write_text("[1]")
    assert "must hold a JSON object, found [1]" in refusal(
        session.write, "Hello", **{option: str(file)}
    )
