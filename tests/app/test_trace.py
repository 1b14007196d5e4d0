"""The live view: what it shows is the text, on every kind of console, and nothing in the text acts
on it.
"""

import io
import re
from collections.abc import Iterable
from pathlib import Path

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from app import trace
from app.characters import Labels, visible
from app.trace import LiveTrace
from decoding.rounds import Round
from decoding.text import Text as Written
from tests.calls import interrupted, recorded
from tests.commands import Run

END = 9
RED, GREEN, BLUE = 1, 2, 4  # as ANSI numbers them
# Words, a line break, a character of three bytes over two tokens and over three, a wide one, the
# end of the text; spaces, and a token without bytes and name.
PIECES = [
    b" the",
    b" quick",
    b" fox",
    b"\n",
    b"\xe2\x9c",
    b"\x94",
    b"\xe2",
    b"\x9c",
    " 狐".encode(),
    b"",
    b"  ",
    b"",
]
LABELS = Labels(lambda token: PIECES[token], {"<end>": END})


def show(
    rounds: Iterable[Round],
    *,
    width: int = 100,
    terminal: bool = False,
    colour: bool = False,
    labels: Labels = LABELS,
    into: io.StringIO | None = None,
) -> str:
    """What the view writes, without pauses."""
    file = into or io.StringIO()
    file.isatty = lambda: terminal
    console = Console(
        file=file,
        width=width,
        force_terminal=terminal or colour,
        color_system="standard" if terminal or colour else None,
        _environ={} if colour else {"NO_COLOR": "1"},
    )
    with LiveTrace(console, labels, pause=0) as view:
        for round in rounds:
            view.add(round)
    return file.getvalue()


def screen(output: str, width: int) -> list[str]:
    """What a terminal shows in the end, lines scrolled away included, without spaces at their
    ends.
    """
    emulated = pyte.HistoryScreen(width, 24, history=10_000, ratio=1)
    pyte.Stream(emulated).feed(output.replace("\n", "\r\n"))
    past = ["".join(row[column].data for column in range(width)) for row in emulated.history.top]
    return "\n".join(line.rstrip() for line in [*past, *emulated.display]).rstrip().split("\n")


def spelled(tokens: Iterable[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


@st.composite
def texts(draw: st.DrawFn) -> list[Round]:
    """Rounds as the loop yields them, of any tokens but END in any order."""
    rounds, position, tokens = [], 5, st.integers(0, END - 1)
    for _ in range(draw(st.integers(1, 12))):
        drafted = draw(st.lists(tokens, max_size=4))
        accepted = draw(st.integers(0, len(drafted)))
        rounds.append(Round(position, drafted, accepted, [*drafted[:accepted], draw(tokens)]))
        position += accepted + 1
    return rounds


@settings(max_examples=20, derandomize=True, deadline=None)
@given(rounds=texts())
def test_without_colour_the_text_is_what_stands_outside_the_rejections(rounds: list[Round]) -> None:
    shown = show(rounds)
    legend, body = shown.removesuffix("\n").split("\n", 1)
    assert legend == "[accepted] {-rejected-} {~discarded~} the target's own token"
    kept = re.sub(r"{-.*?-}|{~.*?~}|[][]", "", body)
    assert kept == spelled(token for round in rounds for token in round.emitted)
    assert "\x1b" not in shown


@settings(max_examples=20, derandomize=True, deadline=None)
@given(rounds=texts())
def test_with_colour_green_and_blue_are_the_text_and_what_failed_is_struck_through(
    rounds: list[Round],
) -> None:
    """Rejected tokens in red; those drafted after them dim, since they were never judged."""
    body = Text.from_ansi(show(rounds, colour=True).split("\n", 1)[1].removesuffix("\n"))
    runs = [(span.style, body.plain[span.start : span.end]) for span in body.spans]
    for style, _ in runs:
        assert bool(style.strike) == (bool(style.dim) or style.color.number == RED)
        assert style.dim or style.color.number in (RED, GREEN, BLUE)
    kept = "".join(text for style, text in runs if not style.strike)
    assert kept.replace("\n", "") == spelled(
        token for round in rounds for token in round.emitted
    ).replace("\n", "")
    failed = [len(round.drafted) - round.accepted for round in rounds]
    assert any(style.strike for style, _ in runs) == any(failed)
    assert any(style.dim for style, _ in runs) == (max(failed) > 1)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(rounds=texts())
def test_a_terminal_shows_every_word_once_in_whole_lines(rounds: list[Round]) -> None:
    """Redrawing loses nothing and leaves nothing behind: the screen holds what a pipe would,
    wrapped.
    """
    lines = screen(show(rounds, width=40, terminal=True, colour=True), 40)
    expected = Text.from_ansi(show(rounds, colour=True)).plain
    assert "".join("".join(lines).split()) == "".join(expected.split())
    words = {
        word for line in expected.split("\n") for word in line.split(" ") if 0 < len(word) <= 20
    }
    assert all(any(word in line for line in lines) for word in words), (
        "a word that fits a line was broken"
    )


def test_a_draft_is_seen_dim_before_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [Round(5, [], 0, [0]), Round(6, [1, 2], 1, [1, 0])]
    file = io.StringIO()
    seen = recorded(monkeypatch, trace.time, "sleep", lambda seconds: file.getvalue())
    after = show(rounds, width=60, terminal=True, colour=True, into=file)
    assert len(seen) == 1 and screen(seen[0], 60)[1] == " the quick fox"
    assert "\x1b[2m quick fox" in seen[0]
    assert "\x1b[32m quick" in after and "\x1b[9;31m fox" in after


def test_what_is_taken_back_is_named_and_what_follows_is_whole() -> None:
    """Also where the taken tokens hold half of a character, which is forgotten."""
    rounds = [
        Round(5, [0, 1], 2, [0, 1, 2], retracted=[1, 2]),
        Round(6, [], 0, [4], retracted=[4]),
        Round(6, [6, 7], 2, [6, 7, 5]),
        Round(9, [], 0, [0]),
    ]
    body = show(rounds).split("\n")[1]
    assert body == '[ the quick] fox<taken back: " quick fox"><taken back: "�">✔ the'


@pytest.mark.parametrize("colour", [True, False])
def test_nothing_in_the_text_acts_on_the_terminal(colour: bool) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\u202e\u2028[red]x[/red]\x7f\x00"
    labels = Labels(lambda token: hostile.encode(), {})
    shown = show([Round(5, [1, 1], 1, [1, 1], retracted=[1])], colour=colour, labels=labels)
    left = re.sub(r"\x1b\[[0-9;]*m", "", shown) if colour else shown
    assert left.count("\n") == 2 and left.replace("\n", "").isprintable()
    assert "[red]x[/red]" in left, "markup was obeyed"


def test_a_token_is_labelled_by_its_text_its_bytes_or_its_name() -> None:
    labels = [LABELS(token) for token in (0, 3, 4, END, 10, 11)]
    assert labels == [" the", "↵", "\\xe2\\x9c", "<end>", "␣␣", "#11"]
    assert visible("naïve café 狐 👩\u200d🚀 a b\n\t") == "naïve café 狐 👩\u200d🚀 a b↵⇥"


def test_ctrl_c_keeps_what_was_there(
    chat_model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 130, and the trace with its line of statistics."""
    interrupted(monkeypatch, Written, "extend", 4)
    ended = run("the hen", "--model", chat_model, "--draft", "none", "--trace")
    assert ended.status == 130 and "3 tokens in" in ended.err and "1.00 tokens a round" in ended.err
