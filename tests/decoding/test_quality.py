"""What the corpus writer keeps: texts about what was asked for, up to where they begin to repeat themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.corpus.quality import (
    LONGEST_SENTENCES,
    MOST_REPEATED,
    before_repetition,
    mentioned,
    repetition,
    sentence_length,
    words_of,
    worth_learning,
)
from decoding.corpus.text_file import TextFile, WrittenText

FRESH = "A fox found a red ball in the snow. She kicked it up the hill and it came down again, much too fast for her."
LOOP = " The ball rolled on and on. The ball rolled on and on. The ball rolled on and on."


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_repetition_counts_the_sequences_of_four_words_that_were_there_before(words: list[str]) -> None:
    sequences = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    again = sum(sequence in sequences[:at] for at, sequence in enumerate(sequences))
    assert repetition(" ".join(words)) == pytest.approx(again / len(sequences) if sequences else 0)


@pytest.mark.parametrize(
    ("prompt", "text", "share"),
    [
        ("Write a short story about a fox.", "Two foxes met.", 1),
        ("Write a short story about a fox.", "A village slept.", 0),
        ("Tell a story in five sentences: a fox finds a golden key.", "The fox slept.", 1 / 3),
        ("A story about a young sailor.", "He sailed, as sailors do.", 1),
        ("Write a short story.", "Anything.", 1),
    ],
)
def test_a_prompt_asks_for_its_own_words_and_not_for_those_of_every_request(
    prompt: str, text: str, share: float
) -> None:
    assert mentioned(prompt, text) == pytest.approx(share)


def test_a_text_that_begins_to_repeat_itself_ends_before_it() -> None:
    assert before_repetition(FRESH) == FRESH
    kept = before_repetition(FRESH + LOOP)
    assert kept == FRESH + " The ball rolled on and on." and repetition(kept) <= MOST_REPEATED
    assert before_repetition("no end " * 9) == ""


def text_about(prompt: str, response: str) -> WrittenText:
    return WrittenText("story", prompt, response, True, 0.7)


@pytest.mark.parametrize("long_enough", [FRESH + " Then the two of them went home and had some soup."])
def test_what_is_kept_is_about_the_prompt_and_finished_only_if_it_is_whole(long_enough: str) -> None:
    about = text_about("Write a story about a fox and a red ball.", long_enough)
    assert worth_learning(about) == about
    cut = worth_learning(text_about(about.prompt, long_enough + LOOP))
    assert cut is not None and not cut.finished and long_enough in cut.response
    assert worth_learning(text_about("Write a story about a king.", long_enough)) is None
    assert worth_learning(text_about(about.prompt, " ".join(words_of(long_enough)[:29]))) is None
    unpunctuated = " ".join(words_of(long_enough)) + "."
    assert sentence_length(unpunctuated) > LONGEST_SENTENCES > sentence_length(long_enough)
    assert worth_learning(text_about(about.prompt, unpunctuated)) is None


def test_the_texts_of_an_earlier_file_are_judged_and_written_once(tmp_path: Path) -> None:
    count: Callable[[str], int] = len
    earlier = TextFile(tmp_path / "earlier.jsonl", count)
    texts = [text_about("p", f"{number} is the number.") for number in range(4)]
    earlier.append(texts)
    file = TextFile(tmp_path / "file.jsonl", count)
    for _ in range(2):
        file.take(tmp_path / "earlier.jsonl", lambda text: None if text.response.startswith("2") else text)
    kept = TextFile(tmp_path / "file.jsonl", count)
    assert (kept.lines, kept.beginnings) == (3, {text.response for text in texts if text.response[0] != "2"})
