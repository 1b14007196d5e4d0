"""Comparison with plain decoding: the same prompt, options and rule, in turns, after a warm-up."""

import math
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import generate
from app import session
from app.output import MOST_TURNS, TURNS, comparison
from app.session import Session, load
from decoding.drafters import PromptLookup
from tests.calls import recorded


def test_the_baseline_starts_from_the_same_context_after_a_warm_up() -> None:
    """Runs of the loop: two short ones that are not timed, the text that is shown, then a turn."""
    options = ["--model", "tiny-llama", "--max-new-tokens", "9", "--draft", "exit", "--compare"]
    with pytest.MonkeyPatch.context() as patch:
        runs = recorded(
            patch,
            session,
            "speculate",
            lambda model, cache, text, drafter, *_, **__: (
                type(drafter).__name__,
                text.conditions.max_new_tokens,
                cache.length - len(text),
            ),
        )
        assert generate.main(["the hen", *options]) == 0
    drafters, budgets, beyond_prompt = zip(*runs, strict=True)
    both = ("ModelDrafter", "NoDraft")
    assert drafters == (*both, "ModelDrafter", *both)
    # The warm-up is long enough for a draft of full length, 4 tokens.
    assert budgets[0] == budgets[1] > 5 and budgets[2:] == (9,) * (len(budgets) - 2)
    # the first run finds the prompt but its last token, as the loop wants it
    assert beyond_prompt[0] == -1


@pytest.mark.parametrize(
    ("tokens", "draft", "context"),
    [(1, "exit", None), (4, "exit", None), (2, "lookup", None), (1, "exit", 2)],
)
def test_a_warm_up_writes_no_further_than_a_text_does(
    tokens: int, draft: str, context: int | None, chat_model: Path
) -> None:
    """The cache reaches no further, nor does a prompt that is longer than the context."""
    session = load(str(chat_model), draft=draft, max_new_tokens=tokens, context=context)
    session.warm_up([5, 9, 2])
    assert len(session.slot.tokens) <= min(3 + tokens, context or math.inf)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": "none"}, "both ways are plain decoding"),
        ({"draft": "exit", "gamma": 0}, "both ways are plain decoding"),
        ({"temperature": 1.0, "coupling": "ratio"}, "another text of the same law"),
        ({"temperature": 1.0, "coupling": "block"}, "another text of the same law"),
    ],
    ids=str,
)
def test_neither_noise_nor_another_draw_is_told_as_a_difference(
    options: dict[str, Any], said: str, chat_model: Path
) -> None:
    session = load(str(chat_model), **{"draft": "lookup", "max_new_tokens": 60} | options)
    assert said in comparison(session, session.write("the hen"))


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose drafts are empty, and so take as long as plain decoding."""
    monkeypatch.setattr(PromptLookup, "find", lambda *_: (0, []))
    return load("tiny-llama", draft="lookup")


def test_texts_that_differ_are_reported_with_their_first_difference(idle: Session) -> None:
    """A draft that changes the text would be a defect: here the sample is falsified. A drafter's
    name may begin with "plain", and it may draft nothing.
    """
    sample = idle.write([5, 9, 2], max_new_tokens=8)
    sample.draft = "plainest of mine.py"
    assert "same text" in comparison(idle, sample)
    sample.source.tokens[3 + 4] ^= 1
    assert "the texts differ from token 4 on" in comparison(idle, sample)


@pytest.mark.parametrize(
    ("tokens", "seconds", "turns"),
    [(8, 9.0, 0), (48, 0.11, 5), (48, 1e-4, MOST_TURNS), (48, 9.0, TURNS)],
)
def test_speeds_are_compared_unless_the_text_is_too_short(
    tokens: int, seconds: float, turns: int, idle: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tokens in a moment are written in more turns."""
    ticks = count(step=seconds / tokens)  # one before each round and one after it
    monkeypatch.setattr(session, "now", lambda device: next(ticks))
    speed = f"{tokens / seconds:.1f}"
    said = comparison(idle, idle.write([5, 9, 2], max_new_tokens=tokens))
    wanted = ["1.00", speed, speed, str(turns), "1.00", "1.00"] if turns else [str(tokens)]
    assert re.findall(r"[\d.]+", said) == wanted and "same text" in said
