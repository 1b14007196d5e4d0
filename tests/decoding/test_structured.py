"""Structured output as a user asks for it: of the command line, of Python and of the server."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import generate
from app.prompt import encode_prompt, tell_schema
from app.server import requests
from app.server.requests import MAX_SOURCE
from tests.commands import Run
from tests.folders import END
from tests.refusal import refusal
from tests.serving import Served, chat_folder, events_of, serving
from weights.tokenizer import Tokenizer

PROMPT = "the hen and the"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
JSON = r'\{"kind": "(cat|dog)", "legs": (-\d+|\d)\}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_folder(tmp_path_factory.mktemp("models") / "tiny")
    ends = [80, Tokenizer(folder).special[END]]  # the first is the letter q
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving("--model", str(folder), "--draft", "exit", "--max-new-tokens", "64") as running:
        yield running


def test_the_command_line_writes_a_text_of_a_schema_an_expression_or_a_grammar(
    folder: Path, tmp_path: Path, run: Run
) -> None:
    """A schema given itself, or in a file."""
    asked = PROMPT, "--model", folder, "--draft", "exit", "--max-new-tokens", "64"
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=4))
    (tmp_path / "g.lark").write_text('start: "x" /[0-9]{2}/ "y"')
    for option, form, expected in (
        ("--json-schema", json.dumps(SCHEMA), JSON),
        ("--json-schema", str(tmp_path / "schema.json"), JSON),
        ("--regex", "x[0-9]{2}y", "x[0-9]{2}y"),
        ("--grammar", str(tmp_path / "g.lark"), "x[0-9]{2}y"),
    ):
        found = run(*asked, option, form)
        assert found.status == 0 and re.fullmatch(expected, found.out.strip())


def test_a_schema_from_python_is_a_dictionary_too(folder: Path) -> None:
    session = generate.load(str(folder), draft="lookup", max_new_tokens=64, json_schema=SCHEMA)
    for sample in (session.write(PROMPT), session.write_all([PROMPT])[0], session.chat().say("hi")):
        assert re.fullmatch(JSON, sample.text)
    assert session.write(PROMPT, regex="x[0-9]y").text[::2] == "xy"
    assert "give one of" in refusal(session.write, PROMPT, json_schema=SCHEMA, regex="a")
    assert "json_schema must be" in refusal(session.write, PROMPT, json_schema=3)


def test_the_trace_marks_forced_tokens(folder: Path, run: Run) -> None:
    asked = PROMPT, "--model", folder, "--draft", "exit", "--max-new-tokens", "64", "--trace"
    legend, text = run(*asked, "--regex", "abcabcabc").out.split("\n", 1)
    assert "<forced by the grammar>" in legend and text.startswith("<a")
    assert re.sub("[<>]", "", text).startswith("abcabcabc")
    assert "forced" not in run(*asked).out.split("\n")[0]


# ---- the prompt ----


def test_the_model_is_told_the_schema_in_the_system_message(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    line = f"Answer in JSON that follows this schema: {json.dumps(SCHEMA)}"
    pretty = json.dumps(SCHEMA, indent=2)

    def decoded(**options: Any) -> str:
        return tokenizer.decode(encode_prompt(tokenizer, "hi", **options))

    assert decoded(schema=pretty) == decoded(system=line)
    assert decoded(schema=pretty, system="be kind") == decoded(system=f"be kind\n{line}")
    assert line not in decoded(schema=pretty, chat=False)


def test_where_the_template_refuses_system_messages_the_first_message_tells_it(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(folder)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    told = tell_schema(tokenizer, [{"role": "user", "content": "hi"}], "{}")
    line = "Answer in JSON that follows this schema: {}"
    assert told == [{"role": "user", "content": f"hi\n{line}"}]


# ---- the server ----

FORMS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA},
            }
        },
        JSON,
    ),
    ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*"),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ({"structured_outputs": {"regex": "x[0-9]{2}y"}}, "x[0-9]{2}y"),
    ({"structured_outputs": {"choice": ["a.b", "c|d", "e f"]}}, r"a\.b|c\|d|e f"),
    ({"structured_outputs": {"grammar": 'start: "x" | "y" start'}}, "y*x"),
]


@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_the_server_writes_what_is_asked_for(
    form: dict[str, Any], expected: str, served: Served
) -> None:
    for sampling in ({}, {"temperature": 0.8, "seed": 2}):
        assert re.fullmatch(expected, served.text(prompt=PROMPT, **form, **sampling))
    chat = {"messages": [{"role": "user", "content": PROMPT}], **form}
    answer = json.loads(served.ask("/v1/chat/completions", chat)[1])
    assert re.fullmatch(expected, answer["choices"][0]["message"]["content"])


def test_a_schema_of_the_command_line_holds_where_the_request_gives_none(folder: Path) -> None:
    options = "--model", str(folder), "--draft", "none", "--json-schema", json.dumps(SCHEMA)
    with serving(*options, "--max-new-tokens", "64") as running:
        assert re.fullmatch(JSON, running.text(prompt=PROMPT))
        assert running.text(prompt=PROMPT, structured_outputs={"regex": "xy"}) == "xy"


WRONG = [
    ({"response_format": {"type": "json_schema"}}, "response_format: give the type text"),
    ({"response_format": {"type": "yaml"}}, "response_format: give the type text"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {"not": {}}}}, 'json_schema: Unimplemented keys: ["not"]'),
    ({"structured_outputs": {"regex": "("}}, "regex: unclosed group"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "give one of"),
    ({"structured_outputs": {"regex": "a" * (MAX_SOURCE["regex"] + 1)}}, "at most 65536"),
    ({"structured_outputs": {"grammar": "a" * (MAX_SOURCE["grammar"] + 1)}}, "at most 8192"),
]


@pytest.mark.parametrize(("form", "part"), WRONG)
def test_a_wrong_grammar_is_refused_in_one_sentence(
    form: dict[str, Any], part: str, served: Served
) -> None:
    for stream in (False, True):
        body = {"prompt": PROMPT, "stream": stream, **form}
        status, error = served.refusal("/v1/completions", body)
        assert status == 400 and part in error["message"] and "\n" not in error["message"]


def test_masks_that_take_too_long_end_the_text_as_an_error_and_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is cut off is no finished text, in a stream neither."""
    monkeypatch.setattr(requests, "MASK_SECONDS", 0.002)
    slow = {"prompt": PROMPT, "structured_outputs": {"regex": "(a|b|c|d){400}"}, "max_tokens": 450}
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(served.text, prompt=PROMPT)
        status, error = served.refusal("/v1/completions", slow)
    assert status == 400 and "masks took more than 0.002 s" in error["message"]
    *_, last = events_of(served.ask("/v1/completions", {**slow, "stream": True})[1])
    assert "masks took more" in last["error"]["message"]
    assert beside.result() == served.text(prompt=PROMPT)
