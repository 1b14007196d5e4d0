"""Options, prompts and structured output as users give them: read as they are meant, or refused in
one line.
"""

import json
import os
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
from app.options import GRAMMARS, Options, parse
from app.plan_file import DraftPlan
from app.prompt import encode_prompt
from app.session import Session
from decoding.grammar import GrammarConstraint
from model.errors import InputError
from model.plan import LayerPlan
from tests.refusal import line_of, refusal
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
OF_NINE = DraftPlan(LayerPlan.early_exit(9, 2))
JSON = r'\{"kind": "(cat|dog)", "legs": (-\d+|\d)\}'


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose template opens a thinking part, unless a variable forbids it."""
    folder = chat_folder(tmp_path_factory.mktemp("models") / "thinker")
    (folder / "chat_template.jinja").write_text(CHAT + THINKING)
    (folder / "list.json").write_text("[1]")
    return folder


@pytest.fixture(scope="module")
def session(thinker: Path) -> Session:
    return generate.load(str(thinker), draft="none", max_new_tokens=8)


# Options

REFUSED = {  # options -> the name of the wrong one, and a part of the line
    "text for a number": ({"temperature": "0.7"}, "temperature", "must be a number"),
    "a truth value for a number": ({"temperature": True}, "temperature", "must be a number"),
    "a fraction": ({"seed": 1.5}, "seed", "must be a whole number"),
    "a number for a truth value": ({"chat": "yes"}, "chat", "must be True or False"),
    "another rule": ({"coupling": "bogus"}, "coupling", "one of ratio, race, block"),
    "a number for a list": ({"stop": 3}, "stop", "must be a list of strings"),
    "numbers in a list": ({"stop": ["a", 3]}, "stop", "must be a list of strings"),
    "a number for a plan": ({"plan": 3}, "plan", "must be a string or a DraftPlan"),
    "a list for a dict": (
        {"chat_template_kwargs": [1]},
        "chat_template_kwargs",
        "must be a string or a dict",
    ),
    "nothing for a list": ({"stop": None}, "stop", "must be a list of strings"),
    "a number for text": ({"draft": 3}, "draft", "must be a string"),
    "too large a seed": ({"seed": 1 << 64}, "seed", "must be from 0 to 1844"),
    "a negative number": ({"top_k": -(10**400)}, "top_k", "must be at least 0"),
    "a negative temperature": ({"temperature": -1.0}, "temperature", "at least 0"),
    "an infinite one": ({"temperature": float("inf")}, "temperature", "finite"),
    "no number": ({"min_target_confidence": float("nan")}, "min_target_confidence", "from 0 to 1"),
    "no room for an answer": ({"context": 1}, "context", "at least 2"),
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
    "a prompt for a server": ({"serve": "8000", "prompt": "hi"}, None, "prompt has no effect with"),
    "a dry conversation": ({"interactive": True, "dry_run": True}, None, "--dry-run has no effect"),
    "a prompt for an unset port": ({"serve": "", "prompt": ""}, None, "prompt has no effect"),
    "plain text in a conversation": ({"interactive": True, "chat": False}, None, "needs a chat"),
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": "0.7"}, "--temperature must be a number"),
        ({"trace": True}, "give adaptive, ban, bits, chat, chat_template_kwargs, coupling, "),
        ({"colour": "red"}, "colour is no option of a call: give adaptive, "),
        ({"devise": "cpu"}, "load takes model, revision, device, dtype, context, no_compile too"),
        ({"model": "tiny-gemma2"}, "model is no option of a call: give adaptive, "),
        ({"regex": "\ud800"}, "--regex is not UTF-8 text"),
        ({"regex": "a{99999999}"}, "the regular expression: lexer error: too many"),
        ({"json_schema": {"enum": ["\ud800"]}}, "the JSON schema: unexpected end of hex"),
        ({"json_schema": {"enum": {1}}}, "--json-schema is no JSON"),
        ({"chat_template_kwargs": "{"}, "--chat-template-kwargs is no JSON"),
        ({"chat_template_kwargs": ""}, "--chat-template-kwargs is empty"),
        ({"chat_template_kwargs": {"x": {1}}}, "--chat-template-kwargs is no JSON"),
        ({"chat_template_kwargs": {"messages": []}}, "variable 'messages' is set already"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "variable 'bos_token' is set already"),
        ({"draft": "absent.py:Drafter"}, "absent.py"),
        ({"draft": "skip", "plan": "absent.json"}, "absent.json"),
        ({"draft": "skip", "plan": ""}, "plan is empty"),
        ({"draft": "skip", "plan": OF_NINE}, "the plan is one of 9 layers, but thinker has 4"),
        ({"draft": "auto", "plan": OF_NINE}, "the plan is one of 9 layers, but thinker has 4"),
        ({"grammar": os.devnull}, "it has no rule start"),
        ({"json_schema": "list.json"}, "--json-schema must hold a JSON object, found [1]"),
        ({"json_schema": "[1]"}, "--json-schema must hold a JSON object, found [1]"),
        ({"chat_template_kwargs": "list.json"}, "kwargs must hold a JSON object, found [1]"),
        ({"json_schema": "a\0b"}, "cannot be read as UTF-8 text: embedded null byte"),
    ],
    ids=str,
)
def test_every_call_of_python_refuses_it(
    session: Session, wrong: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(session.folder)
    for call in (session.write, session.chat().say):
        assert said in refusal(call, "Hello", **wrong)
    assert said in refusal(session.write_all, ["Hello"], **wrong)


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
        assert session.write("Hello", **options).tokens
    except InputError as error:
        assert "\n" not in str(error)


# Prompts


@pytest.mark.parametrize(
    ("prompt", "said", "of_a_turn"),
    [
        *(
            (prompt, "a string that is not empty", "a string that is not empty")
            for prompt in ("", " ", None, 3, [], ["Hello"], [True], b"Hello")
        ),
        ([1 << 20], "if you gave no ids, the tokenizer is another model's", "must be a string"),
        ([-1], "some outside 0 to", "must be a string"),
        ([{"role": "user"}], "a message is", "must be a string"),
        ([{"role": "user", "content": "\ud800"}], "a message is", "must be a string"),
        ("\ud800", "cannot be read as UTF-8 text", "cannot be read as UTF-8 text"),
    ],
    ids=ascii,
)
def test_what_is_no_prompt_is_refused(
    session: Session, prompt: Any, said: str, of_a_turn: str
) -> None:
    """A turn of a conversation is a text."""
    for call in (session.write, session.stream):
        assert said in refusal(call, prompt)
    assert of_a_turn in refusal(session.chat().say, prompt)
    assert "prompts must be a list" in refusal(session.write_all, "Hello")


def test_a_prompt_is_a_text_its_token_ids_or_a_conversation(session: Session) -> None:
    sample = session.write("hi")
    ids = sample.source.tokens[: sample.prompt_tokens]
    for same in (ids, tuple(ids), HI):
        assert session.write(same).tokens == sample.tokens
        assert "".join(session.stream(same)) == sample.text
    assert [each.tokens for each in session.write_all(["hi", ids, HI])] == [sample.tokens] * 3


def test_a_variable_of_the_template_switches_thinking_off(session: Session) -> None:
    wanted = session.write("hi").prompt_tokens - len(session.tokenizer.encode("<think>\n"))
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
    assert (loaded.folder, loaded.dtype, loaded.options.device) == (thinker, torch.float32, "cpu")
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
        ({"grammar": 'start : "x" /[0-9]{2}/ "y"'}, "x[0-9]{2}y"),
        ({"grammar": tmp_path / "g.lark"}, "x[0-9]{2}y"),
    ):
        for sample in (
            session.write(PROMPT, **given),
            *session.write_all([PROMPT], **given),
            session.chat().say("hi", **given),
        ):
            assert re.fullmatch(f"{expected}q", sample.text)


@pytest.mark.parametrize(
    ("option", "content", "draft", "written"),
    [
        ("json_schema", SCHEMA, "none", f"{JSON}q by plain"),
        ("plan", {"attn": [2], "mlp": [1]}, "skip", "(.|\n)* by skipping 1 attention and 1 MLP .*"),
    ],
)
def test_a_schema_and_a_plan_come_through_pipes_too(
    option: str, content: dict[str, Any], draft: str, written: str, chat_model: Path
) -> None:
    """A schema is told to the model and constrains the answer. A plan takes memory and drafts. But
    a pipe is read once.
    """
    end, into = os.pipe()
    os.write(into, json.dumps(content).encode())
    os.close(into)
    session = generate.load(str(chat_model), draft=draft, **{option: f"/dev/fd/{end}"})
    sample = session.write(PROMPT, max_new_tokens=64)
    assert re.fullmatch(written, f"{sample.text} by {sample.draft}")


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
    schema = Options(json_schema=json.dumps(SCHEMA, indent=2), **given)
    assert encode_prompt(tokenizer, "hi", schema) == encode_prompt(
        tokenizer, prompt, Options(**same)
    )


def test_a_dead_end_is_told_with_the_grammars_reason(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = generate.load(str(chat_model), draft="none", regex="[ab]{9}", max_new_tokens=9)
    nothing = torch.zeros(session.config.vocab_size, dtype=torch.bool)
    reason = "the regular expression: too many states"
    compute = GrammarConstraint.compute
    monkeypatch.setattr(
        GrammarConstraint,
        "compute",
        lambda self, written: (nothing, reason) if written else compute(self, written),
    )
    assert refusal(session.write, PROMPT) == reason
