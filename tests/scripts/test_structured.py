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
NAMES = ["sentiment", "ticket", "person", "tool call", "invoice", "event"]
FORMS = {name: read_json(SCHEMAS)[name] for name in NAMES}
EXPRESSIONS = {
    "When did the first people land on the Moon?": r"(19|20)\d{2}-\d{2}-\d{2}",
    "Is the sky blue? Answer in one short sentence.": r"(Yes|No), [a-z ]{5,40}\.",
}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (each["request"], {"json_schema": each["schema"]}) for name, each in FORMS.items()},
    **{prompt: (prompt, {"regex": regex}) for prompt, regex in EXPRESSIONS.items()},
}
DRAFTS = ["lookup", "lowbit", "exit", "auto"]
STYLES = {"greedy": {}, "raced": {"temperature": 0.7, "seed": 5}}
CASES = [
    pytest.param(name, style, marks=() if (number + turn) % 2 else pytest.mark.prove)
    for number, name in enumerate(ASKED)
    for turn, style in enumerate(STYLES)
]


@pytest.fixture(scope="module")
def session(smollm2: Path) -> Session:
    return generate.load(MODEL, max_new_tokens=BUDGET, coupling="race")


@pytest.mark.parametrize(("name", "style"), CASES)
def test_every_draft_writes_the_plain_text_and_it_is_valid(
    session: Session, name: str, style: str
) -> None:
    prompt, form = ASKED[name]
    plain, *drafted = (
        session.write(prompt, draft=draft, **form, **STYLES[style]) for draft in ("none", *DRAFTS)
    )
    assert plain.finish == "eos"
    assert all((each.tokens, each.finish) == (plain.tokens, "eos") for each in drafted)
    if "regex" in form:
        assert re.fullmatch(form["regex"], plain.text)
    else:
        formats = jsonschema.FormatChecker()
        jsonschema.validate(json.loads(plain.text), form["json_schema"], format_checker=formats)


def test_eight_at_once_through_the_server_are_the_texts_alone(session: Session) -> None:
    bodies, alone = [], []
    for prompt, form in ASKED.values():
        outputs = {option.removesuffix("_schema"): value for option, value in form.items()}
        bodies.append({"prompt": prompt, "structured_outputs": outputs, "max_tokens": BUDGET})
        alone.append(session.write(prompt, **form, draft="none", chat=False).text)
    with (
        serving("--model", MODEL, "--draft", "auto", "--together", "8") as served,
        ThreadPoolExecutor(8) as pool,
    ):
        assert [*pool.map(lambda body: served.text(**body), bodies)] == alone
