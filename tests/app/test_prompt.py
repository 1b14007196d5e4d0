"""Prompts: a text, token ids or messages; variables of a chat template; thinking parts. Structured
output, as a user asks for it.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
from app.options import Options
from app.prompt import encode_prompt
from app.session import Session
from decoding.grammar import GrammarConstraint
from tests.refusal import refusal
from tests.serving import CHAT, chat_folder
from weights.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]
SWITCH = '{"enable_thinking": false}'
THINKING = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
PROMPT = "the hen and the"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
TOLD = f"Answer in JSON that follows this schema: {json.dumps(SCHEMA)}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
JSON = r'\{"kind": "(cat|dog)", "legs": (-\d+|\d)\}'


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose template opens a thinking part, unless a variable forbids it."""
    folder = chat_folder(tmp_path_factory.mktemp("models") / "thinker")
    (folder / "chat_template.jinja").write_text(CHAT + THINKING)
    return folder


@pytest.fixture(scope="module")
def session(thinker: Path) -> Session:
    return generate.load(str(thinker), draft="none", max_new_tokens=8)


def test_a_prompt_is_a_text_its_token_ids_or_a_conversation(session: Session) -> None:
    sample = session.write("hi")
    ids = sample.source.tokens[: sample.prompt_tokens]
    for same in (ids, tuple(ids), HI):
        assert session.write(same).tokens == sample.tokens
        assert "".join(session.stream(same)) == sample.text
    together = session.write_all(["hi", ids, HI], seed=0)
    assert [each.tokens for each in together] == [sample.tokens] * 3


def test_a_variable_of_the_template_switches_thinking_off(session: Session) -> None:
    opening = len(session.tokenizer.encode("<think>\n"))
    wanted = session.write("hi").prompt_tokens - opening
    for given in (SWITCH, json.loads(SWITCH)):
        assert session.write("hi", chat_template_kwargs=given).prompt_tokens == wanted
        assert session.chat(chat_template_kwargs=given).say("hi").prompt_tokens == wanted


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"regex": "[ab]+"}, True),
        ({"stop": ["x"]}, True),
        ({"stop": ["x"], "chat_template_kwargs": SWITCH}, False),
        ({}, False),
    ],
)
def test_a_grammar_or_a_stop_that_begins_in_a_thinking_part_is_said(
    options: dict[str, Any], is_said: bool, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.write("hi", **options)
    assert ("opens a thinking part" in capsys.readouterr().err) == is_said


def test_python_gives_paths_dtypes_devices_and_single_strings(
    thinker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(thinker.parent))
    loaded = generate.load(
        Path("~/thinker"), dtype=torch.float32, device=torch.device("cpu"), max_new_tokens=8
    )
    assert (loaded.folder, loaded.dtype) == (thinker, torch.float32)
    assert loaded.options.device == "cpu"
    for stops in ("x", ["x"], ("x",)):
        assert loaded.options.merged({"stop": stops}).stop == ("x",)


@pytest.mark.parametrize(
    ("given", "shown"), [("", '"é<"'), ("ensure_ascii=False", '"é<"'), ("True", r'"\u00e9<"')]
)
def test_a_template_writes_json_as_in_transformers(thinker: Path, given: str, shown: str) -> None:
    tokenizer = Tokenizer(thinker)
    tokenizer.chat_template = f"{{{{ messages[0]['content'] | tojson({given}) }}}}"
    ids = tokenizer.encode_chat([{"role": "user", "content": "é<"}])
    assert tokenizer.decode(ids) == shown


# Structured output


def test_a_text_is_one_of_a_schema_an_expression_or_a_grammar(
    chat_model: Path, tmp_path: Path
) -> None:
    """Given itself, or in a file. This model's end of text is the letter q."""
    session = generate.load(str(chat_model), draft="exit", max_new_tokens=64)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=4))
    (tmp_path / "g.lark").write_text('start: "x" /[0-9]{2}/ "y"')
    for given, expected in (
        ({"json_schema": SCHEMA}, JSON),
        ({"json_schema": json.dumps(SCHEMA)}, JSON),
        ({"json_schema": str(tmp_path / "schema.json")}, JSON),
        ({"regex": "x[0-9]{2}y"}, "x[0-9]{2}y"),
        ({"grammar": 'start: "x" /[0-9]{2}/ "y"'}, "x[0-9]{2}y"),
        ({"grammar": tmp_path / "g.lark"}, "x[0-9]{2}y"),
    ):
        for sample in (
            session.write(PROMPT, **given),
            *session.write_all([PROMPT], **given),
            session.chat().say("hi", **given),
        ):
            assert re.fullmatch(f"{expected}q", sample.text)


@pytest.mark.parametrize(
    ("template", "given", "prompt", "same"),
    [
        ("", {}, "hi", {"system": TOLD}),
        ("", {"system": "be kind"}, "hi", {"system": f"be kind\n{TOLD}"}),
        ("", {"chat": False}, "hi", {"chat": False}),
        (NO_SYSTEM, {}, f"hi\n{TOLD}", {}),
    ],
    ids=["alone", "after another", "without a chat", "refused"],
)
def test_the_system_message_or_where_it_is_refused_the_first_one_tells_the_schema(
    template: str, given: dict[str, Any], prompt: str, same: dict[str, Any], chat_model: Path
) -> None:
    tokenizer = Tokenizer(chat_model)
    tokenizer.chat_template = template + tokenizer.chat_template
    pretty = json.dumps(SCHEMA, indent=2)
    told = encode_prompt(tokenizer, "hi", Options(json_schema=pretty, **given))
    assert told == encode_prompt(tokenizer, prompt, Options(**same))


def test_a_dead_end_is_told_with_the_grammars_reason(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = generate.load(str(chat_model), draft="none", regex="[ab]{9}", max_new_tokens=9)
    nothing = torch.zeros(session.config.vocab_size, dtype=torch.bool)
    reason = "the regular expression: too many states"
    compute = GrammarConstraint._compute
    monkeypatch.setattr(
        GrammarConstraint,
        "_compute",
        lambda self, written: (nothing, reason) if written else compute(self, written),
    )
    assert refusal(session.write, PROMPT) == reason
