"""Structured output as a user asks for it: of the command line and of Python."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
from app.options import Options
from app.prompt import encode_prompt
from decoding.grammar import GrammarConstraint
from tests.commands import Run
from tests.folders import END
from tests.refusal import refusal
from tests.serving import chat_folder
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


# ---- the prompt ----


def test_the_model_is_told_the_schema_in_the_system_message(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    line = f"Answer in JSON that follows this schema: {json.dumps(SCHEMA)}"
    pretty = json.dumps(SCHEMA, indent=2)

    def decoded(**options: Any) -> str:
        return tokenizer.decode(encode_prompt(tokenizer, "hi", Options(**options)))

    assert decoded(json_schema=pretty) == decoded(system=line)
    both = decoded(json_schema=pretty, system="be kind")
    assert both == decoded(system=f"be kind\n{line}")
    assert line not in decoded(json_schema=pretty, chat=False)


def test_where_the_template_refuses_system_messages_the_first_message_tells_it(
    folder: Path,
) -> None:
    tokenizer = Tokenizer(folder)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    told = encode_prompt(tokenizer, "hi", Options(json_schema="{}"))
    line = "Answer in JSON that follows this schema: {}"
    assert told == encode_prompt(tokenizer, f"hi\n{line}", Options())


def test_a_dead_end_is_told_with_the_grammars_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = generate.load(str(folder), draft="none", regex="[ab]{9}", max_new_tokens=9)
    nothing = torch.zeros(session.config.vocab_size, dtype=torch.bool)
    compute = GrammarConstraint._compute

    def failing(self: GrammarConstraint, written: tuple[int, ...]) -> tuple[Any, str | None]:
        return (
            (nothing, "the regular expression: too many states")
            if written
            else compute(self, written)
        )

    monkeypatch.setattr(GrammarConstraint, "_compute", failing)
    assert refusal(session.write, PROMPT) == "the regular expression: too many states"
