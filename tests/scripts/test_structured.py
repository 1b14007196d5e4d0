"""Structured output of the real checkpoint: under every draft the plain text, and valid."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import generate
from app.files import read_json
from app.session import Session
from benchmark.sections import SCHEMAS
from tests.serving import serving

MODEL = "smollm2-135m-instruct"
BUDGET = 160
SHORT = [0, 1, 6, 7]  # of those below
BUILT_IN = read_json(SCHEMAS)
NAMES = ["sentiment", "ticket", "person", "tool call", "invoice", "event"]
ASKED: list[tuple[str, dict[str, Any]]] = [
    *((BUILT_IN[name]["request"], {"json_schema": BUILT_IN[name]["schema"]}) for name in NAMES),
    ("When did the first people land on the Moon?", {"regex": r"(19|20)\d{2}-\d{2}-\d{2}"}),
    (
        "Is the sky blue? Answer in one short sentence.",
        {"regex": r"(Yes|No), [a-z ]{5,40}\."},
    ),
]
DRAFTS = ["exit", "auto"]  # the second by lookup, in low bits, or forced
FORMS = {"json_schema": "json", "regex": "regex"}  # names in a request to the server
STYLES: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 5}]  # in turns


@pytest.fixture(scope="module")
def session(smollm2: Path) -> Session:
    return generate.load(MODEL, max_new_tokens=BUDGET, coupling="race")


@pytest.mark.parametrize(
    ("prompt", "form", "style"),
    [(*asked, style) for asked, style in zip(ASKED, cycle(STYLES), strict=False)],
    ids=lambda value: str(value)[:40],
)
def test_every_draft_writes_the_plain_text_of_a_schema_or_an_expression(
    session: Session, prompt: str, form: dict[str, Any], style: dict[str, Any]
) -> None:
    given = {**form, **style}
    plain, *drafted = (session.write(prompt, draft=draft, **given) for draft in ("none", *DRAFTS))
    assert plain.finish == "eos"
    assert all((each.tokens, each.finish) == (plain.tokens, "eos") for each in drafted)
    if "regex" in form:
        assert re.fullmatch(form["regex"], plain.text)
    else:
        checker = jsonschema.FormatChecker()
        jsonschema.validate(json.loads(plain.text), form["json_schema"], format_checker=checker)


def test_texts_at_once_through_the_server_are_the_texts_alone(session: Session) -> None:
    asked = [ASKED[number] for number in SHORT]
    bodies = [
        {"prompt": prompt, "structured_outputs": {FORMS[kind]: source}, "max_tokens": BUDGET}
        for prompt, form in asked
        for kind, source in form.items()
    ]
    alone = [session.write(prompt, **form, draft="none", chat=False).text for prompt, form in asked]
    with (
        serving("--model", MODEL, "--draft", "auto", "--together", "4") as served,
        ThreadPoolExecutor(4) as pool,
    ):
        assert [*pool.map(lambda body: served.text(**body), bodies)] == alone
