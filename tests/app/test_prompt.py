"""Prompts: a text, token ids or messages; variables of a chat template; and thinking parts."""

import json
import os
from pathlib import Path

import pytest
import torch

import generate
from app.session import Session
from tests.commands import Run
from tests.refusal import refusal
from tests.serving import CHAT, chat_folder
from weights.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]
SWITCH = '{"enable_thinking": false}'
THINKING = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"


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


def test_a_variable_of_the_template_switches_thinking_off(
    session: Session, thinker: Path, run: Run
) -> None:
    thinking = session.write("hi").prompt_tokens
    wanted = thinking - len(session.tokenizer.encode("<think>\n"))
    variables = json.loads(SWITCH)
    assert session.write("hi", chat_template_kwargs=variables).prompt_tokens == wanted
    assert session.chat(chat_template_kwargs=variables).say("hi").prompt_tokens == wanted
    command = ["hi", "-m", thinker, "--draft", "none", "-n", "2", "--json"]
    assert run(*command).result["prompt_tokens"] == thinking
    assert run(*command, "--chat-template-kwargs", SWITCH).result["prompt_tokens"] == wanted


def test_a_grammar_or_a_stop_that_begins_in_a_thinking_part_is_said(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = json.loads(SWITCH)
    for options in ({"regex": "[ab]+"}, {"stop": ["x"]}):
        session.write("hi", **options)
        assert "opens a thinking part" in capsys.readouterr().err
        session.write("hi", **options, chat_template_kwargs=variables)
        assert not capsys.readouterr().err
    session.write("hi")
    assert not capsys.readouterr().err


def test_python_gives_paths_dtypes_devices_and_single_strings(
    thinker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(thinker.parent))
    loaded = generate.load(
        Path("~/thinker"), dtype=torch.float32, device=torch.device("cpu"), max_new_tokens=8
    )
    assert (loaded.folder, loaded.dtype) == (thinker, torch.float32)
    assert loaded.options.device == "cpu"
    stops = ["x", ["x"], ("x",)]
    assert {loaded.merged({"stop": each}).stop for each in stops} == {("x",)}


@pytest.mark.parametrize(
    ("given", "shown"), [("", '"é<"'), ("ensure_ascii=False", '"é<"'), ("True", r'"\u00e9<"')]
)
def test_a_template_writes_json_as_in_transformers(thinker: Path, given: str, shown: str) -> None:
    tokenizer = Tokenizer(thinker)
    tokenizer.chat_template = f"{{{{ messages[0]['content'] | tojson({given}) }}}}"
    ids = tokenizer.encode_chat([{"role": "user", "content": "é<"}])
    assert tokenizer.decode(ids) == shown


def test_a_tokenizer_file_that_is_none_is_refused(thinker: Path, tmp_path: Path) -> None:
    """A FIFO would be waited for."""
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "holds no tokenizer.json" in refusal(Tokenizer, tmp_path)
