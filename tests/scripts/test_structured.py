"""Structured output of the real checkpoint: under every draft the plain text, and valid."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import generate
from benchmark.sections import SCHEMAS
from cli.files import read_json
from decoding.run.session import Session
from tests.serving import serving

MODEL = "smollm2-135m-instruct"
BUDGET = 160
BUILT_IN = read_json(SCHEMAS)
NAMES = ["sentiment", "ticket", "person", "tool call", "invoice", "event"]
EXPRESSIONS = {
    "When did the first people land on the Moon?": r"(19|20)\d{2}-\d{2}-\d{2}",
    "Is the sky blue? Answer in one short sentence.": r"(Yes|No), [a-z ]{5,40}\.",
}
DRAFTS = ["lookup", "lowbit", "exit", "auto"]
STYLES = {"greedy": {}, "raced": {"temperature": 0.7, "seed": 5}}


@pytest.fixture(scope="module")
def session(smollm2: Path) -> Session:
    return generate.load(MODEL, max_new_tokens=BUDGET, coupling="race")


def text_of_all(session: Session, prompt: str, **options: Any) -> str:
    """The whole text that every draft writes."""
    plain, *drafted = (session.write(prompt, draft=draft, **options) for draft in ("none", *DRAFTS))
    assert plain.finish == "eos"
    assert all((each.tokens, each.finish) == (plain.tokens, "eos") for each in drafted)
    return plain.text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", NAMES)
def test_every_draft_writes_the_plain_json_of_a_schema(
    session: Session, name: str, style: str
) -> None:
    request, schema = BUILT_IN[name]["request"], BUILT_IN[name]["schema"]
    value = json.loads(text_of_all(session, request, json_schema=schema, **STYLES[style]))
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("prompt", EXPRESSIONS)
def test_every_draft_writes_the_plain_text_of_an_expression(
    session: Session, prompt: str, style: str
) -> None:
    expression = EXPRESSIONS[prompt]
    written = text_of_all(session, prompt, regex=expression, **STYLES[style])
    assert re.fullmatch(expression, written)


def test_eight_at_once_through_the_server_are_the_texts_alone(session: Session) -> None:
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for name in NAMES:
        request, schema = BUILT_IN[name]["request"], BUILT_IN[name]["schema"]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": request, "response_format": form, "max_tokens": BUDGET}
        asked.append((body, {"prompt": request, "json_schema": schema}))
    for prompt, expression in EXPRESSIONS.items():
        body = {"prompt": prompt, "structured_outputs": {"regex": expression}}
        asked.append((body | {"max_tokens": BUDGET}, {"prompt": prompt, "regex": expression}))
    alone = [session.write(**each, draft="none", chat=False).text for _, each in asked]
    with (
        serving("--model", MODEL, "--draft", "auto", "--together", "8") as served,
        ThreadPoolExecutor(8) as pool,
    ):
        assert [*pool.map(lambda each: served.text(**each[0]), asked)] == alone
