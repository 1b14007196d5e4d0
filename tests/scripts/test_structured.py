"""Structured output of the real checkpoint: under every draft the plain text, and valid."""

import json
import re
from itertools import cycle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import generate
from app.files import read_json
from app.session import Session
from benchmark.sections import SCHEMAS

BUILT_IN = read_json(SCHEMAS)
NAMES = ["sentiment", "person", "tool call", "event"]
SENTENCE = r"(Yes|No), [a-z ]{5,40}\."
ASKED: list[tuple[str, dict[str, Any]]] = [
    *((BUILT_IN[name]["request"], {"json_schema": BUILT_IN[name]["schema"]}) for name in NAMES),
    ("When did the first people land on the Moon?", {"regex": r"(19|20)\d{2}-\d{2}-\d{2}"}),
    ("Is the sky blue? Answer in one short sentence.", {"regex": SENTENCE}),
]
DRAFTS = ["exit", "auto"]  # the second by lookup, in low bits, or forced
STYLES: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 5}]  # in turns


@pytest.fixture(scope="module")
def session(smollm2: Path) -> Session:
    return generate.load(str(smollm2), max_new_tokens=160, coupling="race")


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


def test_texts_of_an_expression_written_together_are_the_plain_ones(session: Session) -> None:
    prompts = [prompt for prompt, _ in ASKED]
    plain = [session.write(each, regex=SENTENCE, draft="none").tokens for each in prompts]
    together = session.write_all(prompts, regex=SENTENCE)
    assert [sample.tokens for sample in together] == plain
