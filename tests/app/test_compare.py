"""Comparison with plain decoding: the same prompt, options and rule, in turns, after a warm-up."""

import re
import tempfile
from collections.abc import Iterator
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import generate
from app import output, session
from app.output import MOST_TURNS, TURNS, comparison
from app.session import Sample, Session, load
from decoding.drafters import PromptLookup
from decoding.rounds import Round
from tests.folders import write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tmp_path_factory.mktemp("models") / "model"))


def test_the_baseline_starts_from_the_same_context_after_a_warm_up() -> None:
    """Runs of the loop: two short ones that are not timed, the text that is shown, then turns."""
    runs: list[tuple[str, int, int]] = []
    production = session.speculate

    def watched(*arguments: Any, **named: Any) -> Iterator[Round]:
        _, cache, text, drafter, *_ = arguments
        runs.append(
            (type(drafter).__name__, text.conditions.max_new_tokens, cache.length - len(text))
        )
        return production(*arguments, **named)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(session, "speculate", watched):
        options = ["--model", str(write_folder(Path(folder))), "--max-new-tokens", "9"]
        assert generate.main(["the hen", *options, "--draft", "exit", "--compare"]) == 0
    drafters, budgets, beyond_prompt = zip(*runs, strict=True)
    both = ("ModelDrafter", "NoDraft")
    assert drafters == (*both, "ModelDrafter", *both * TURNS) and TURNS >= 3
    # The warm-up is long enough for a draft of full length, 4 tokens.
    assert budgets[0] == budgets[1] > 5 and budgets[2:] == (9,) * (len(budgets) - 2)
    # the first run finds the prompt but its last token, as the loop wants it
    assert beyond_prompt[0] == -1


@pytest.mark.parametrize(("tokens", "draft"), [(1, "exit"), (4, "exit"), (2, "lookup")])
def test_a_warm_up_writes_no_further_than_a_text_does(tokens: int, draft: str, model: str) -> None:
    """The cache reaches no further."""
    session = load(model, draft=draft, max_new_tokens=tokens)
    session.warm_up([5, 9, 2])
    assert len(session.slot.tokens) <= 3 + tokens


@pytest.mark.parametrize("options", [{"draft": "none"}, {"draft": "exit", "gamma": 0}], ids=str)
def test_plain_decoding_is_not_compared_with_itself(options: dict[str, Any], model: str) -> None:
    """Noise would be shown as a result."""
    session = load(model, max_new_tokens=60, **options)
    assert "both ways are plain decoding" in comparison(session, session.write("the hen"))


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch, model: str) -> Session:
    """A session whose drafts are empty, and so take as long as plain decoding."""
    monkeypatch.setattr(PromptLookup, "find", lambda *_: (0, []))
    return load(model, draft="lookup")


def written(session: Session, tokens: int) -> Sample:
    options = session.options.merged({"max_new_tokens": tokens})
    return session.finish(session.begin([5, 9, 2], options))


def test_texts_that_differ_are_reported_with_their_first_difference(idle: Session) -> None:
    """A draft that changes the text would be a defect: here the sample is falsified. A drafter's
    name may begin with "plain", and it may draft nothing.
    """
    sample = written(idle, 8)
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
    speeds = f"1.00 times plain decoding, {speed} against {speed} tokens/s"
    speeds += f" without the prompt (the median of {turns} turns, 1.00-1.00)"
    short = f"[same text; too short to compare speeds: {tokens} tokens]"
    said = comparison(idle, written(idle, tokens))
    assert said == (f"[{speeds}, same text]" if turns else short)


def test_turns_that_disagree_are_told(idle: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each text takes longer than the one before it. The speeds are those of one turn."""
    ticks = accumulate(count(step=1e-4))
    monkeypatch.setattr(session, "now", lambda device: next(ticks))
    monkeypatch.setattr(output, "UNSTEADY", 1.01)
    said = comparison(idle, written(idle, 48))
    assert "the turns differ much: compare again on an idle machine" in said
    times, drafted, plain = map(float, re.findall(r"\d+\.\d+", said)[:3])
    assert times == pytest.approx(drafted / plain, rel=0.1) and times != 1


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_the_other_rules_promise_the_same_law_not_the_same_text(rule: str, model: str) -> None:
    session = load(model, draft="lookup", max_new_tokens=9, temperature=1.0, coupling=rule)
    assert "another text of the same law" in comparison(session, session.write("the hen"))
