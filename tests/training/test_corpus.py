"""Corpus writer: the file; the command; the filter, which ends stories where they repeat
themselves.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.session import load
from tests.calls import interrupted, recorded, status_of
from training.corpus import __main__ as corpus
from training.corpus.stories import (
    TEMPLATES,
    kept_story,
    repetition,
    words_of,
)

# The file.

Command = Callable[..., tuple[int, str]]
TEXTS = [
    {"prompt": "Of a fox?", "response": "A fox.\nIt \u00e4te \u2028 \U0001f98a."},
    {"prompt": "Hi!", "response": "Hello"},
    {"prompt": "Again.", "response": "The end"},
]


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_of_stories_that_begin_alike_the_first_is_kept() -> None:
    stories = {}
    corpus.add(stories, TEXTS[:2])
    same = "x" * corpus.DISTINCT_CHARACTERS
    first, alike, other = (
        {"prompt": "", "response": text} for text in (same + "a", same + "b", same[1:])
    )
    corpus.add(stories, [*TEXTS, first, alike, other])
    assert [*stories.values()] == [*TEXTS, first, other]


def test_every_form_of_a_request_and_of_an_opening_can_be_filled() -> None:
    assert all(form.format(**TEMPLATES) for form in TEMPLATES["form"] + TEMPLATES["opening"])


# The command.


@pytest.fixture
def write(
    chat_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run the command on the tiny model: its status and its standard error.

    Its babble is worth learning here: see ``kept_story`` below.
    """
    monkeypatch.setattr(corpus, "kept_story", lambda text, subjects: text)

    def command(*arguments: object) -> tuple[int, str]:
        options = f"--model {chat_model} --temperature 2 --top-k 0 --max-new-tokens 9 --batch 12"
        status = status_of(corpus.main, [*options.split(), *map(str, arguments)])
        return status, capsys.readouterr().err

    return command


def test_the_command_writes_stories_until_there_are_tokens_enough(
    write: Command, tmp_path: Path
) -> None:
    """Each begins with whom its prompt is about."""
    out = tmp_path / "out.jsonl"
    assert write("--tokens", 500, "--out", out)[0] == 0
    rows = read(out)
    for row in rows:
        heroes = [who for who in TEMPLATES["who"] if who in row["prompt"]]
        openings = [form.format(who=who) for form in TEMPLATES["opening"] for who in heroes]
        assert list(row) == ["prompt", "response"] and row["response"].startswith(tuple(openings))
    assert write("--tokens", 500, "--out", out)[0] == 0
    assert read(out) == rows, "there were tokens enough already"


def test_a_run_that_is_interrupted_writes_what_an_uninterrupted_one_writes(
    write: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert write("--tokens", 700, "--out", whole)[0] == 0
    interrupted(monkeypatch, corpus, "write_stories", 1, 3, 4)
    statuses = [write("--tokens", 700, "--out", parts)[0] for _ in range(4)]
    assert statuses == [130, 130, 130, 0] and parts.read_bytes() == whole.read_bytes()


def test_a_model_in_a_loop_is_given_up(
    write: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "write_stories", lambda *_: TEXTS)
    status, said = write("--tokens", 10_000, "--out", tmp_path / "out")
    assert status == 2 and "raise --temperature or --top-k" in said


@pytest.mark.parametrize(
    ("content", "arguments", "complaint"),
    [
        (b"Dear diary\n", [], "line 1 is not valid JSON"),
        (b'{"prompt": "", "response": 3}\n', [], "is not a file of this command"),
        (b'{"prompt": "", "response": ""}\n{"pro', [], "line 2 is not valid JSON"),
        (b"\xff\n", [], "cannot be read as UTF-8"),
        (b"Dear diary\n", ["--model", "nowhere"], "line 1 is not valid JSON"),
        (b"", ["--tokens", 0], "must be at least 1"),
        (b"", ["--temperature", "nan"], "temperature must be at least 0"),
        (b"", ["--out", "/dev/full"], "/dev/full"),
        (b"", ["--out", "nowhere/x", "--model", "no"], "the folder nowhere does not exist"),
    ],
)
def test_what_the_command_cannot_do_is_refused_and_the_file_left_alone(
    content: bytes, arguments: list[object], complaint: str, write: Command, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    status, said = write("--tokens", 10, "--out", path, *arguments)
    assert (status, said.count("\n")) == (2, 1) and path.read_bytes() == content
    assert said.startswith("error: ") and complaint in said


TAKES = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        TAKES,
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + TAKES,
        None,
    ],
    ids=["takes", "refuses", "none"],
)
def test_a_narrator_speaks_where_the_template_lets_one(
    template: str | None, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load(str(chat_model), dtype="float32", draft="none", max_new_tokens=1, device="cpu")
    session.tokenizer.chat_template = template
    begun = recorded(monkeypatch, session, "begin", lambda ids, *_: session.tokenizer.decode(ids))
    list(corpus.write_stories(session, 3, random.Random(0)))
    assert [corpus.NARRATOR in prompt for prompt in begun] == [template == TAKES] * 3


LONG = (
    "A fox found a red ball in the snow. She kicked it up the hill and it came down again, much too"
    " fast for her. Then the two of them went home and had some soup."
)
ONCE = " The ball rolled on and on."


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_repetition_counts_the_sequences_of_four_words_that_were_there_before(
    words: list[str],
) -> None:
    """In the same text."""
    sequences = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    again = sum(sequence in sequences[:at] for at, sequence in enumerate(sequences))
    assert repetition([words, words]) == pytest.approx(again / max(1, len(sequences)))


@pytest.mark.parametrize(
    ("text", "subjects", "kept"),
    [
        (LONG, ["foxes", "ball"], LONG),
        (LONG, ["fox", "king"], LONG),
        (LONG, ["Snow"], LONG),
        (LONG, [], LONG),
        (LONG + 3 * ONCE, ["fox"], LONG + ONCE),
        (LONG + ' 3.5 km. "No." And th', [], LONG + ' 3.5 km. "No."'),
        ("no end " * 30, [], ""),
        (LONG, ["king"], ""),
        (LONG, ["fox", "king", "boat"], ""),
        (" ".join(LONG.split()[:29]) + ".", [], ""),
        (" ".join(words_of(LONG)) + ".", [], ""),
    ],
    ids=[
        "a form",
        "half of them",
        "a capital",
        "none",
        "loop",
        "half a sentence",
        "no end",
        "other",
        "a third",
        "short",
        "long",
    ],
)
def test_a_story_is_kept_that_is_about_its_prompt_long_enough_and_of_short_sentences(
    text: str, subjects: list[str], kept: str
) -> None:
    assert kept_story(text, subjects) == kept
