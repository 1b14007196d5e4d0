"""Filter of the corpus writer: texts about their prompt, up to where they begin to repeat themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.corpus.quality import (
    MOST_REPEATED,
    before_repetition,
    mentioned,
    repetition,
    words_of,
    worth_learning,
)

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
    assert before_repetition(FRESH, True) == FRESH
    kept = before_repetition(FRESH + LOOP, True)
    assert kept == FRESH + " The ball rolled on and on." and repetition(kept) <= MOST_REPEATED
    assert before_repetition("no end " * 9, True) == ""


@pytest.mark.parametrize(("text", "whole"), [('3.5 km. "No." And th', '3.5 km. "No."'), ("One.", "One."), ("no", "")])
def test_a_text_that_was_cut_off_ends_with_its_last_whole_sentence(text: str, whole: str) -> None:
    assert before_repetition(text, finished=False) == whole
    assert before_repetition(text, finished=True) == text


def test_a_story_is_kept_that_is_about_its_prompt_long_enough_and_of_short_sentences() -> None:
    prompt = "Write a story about a fox and a red ball."
    long_enough = FRESH + " Then the two of them went home and had some soup."
    assert worth_learning(prompt, long_enough) == long_enough
    assert worth_learning(prompt, long_enough + LOOP) == long_enough + " The ball rolled on and on."
    assert worth_learning("Write a story about a king.", long_enough) == ""
    assert worth_learning(prompt, " ".join(words_of(long_enough)[:29])) == ""
    assert worth_learning(prompt, " ".join(words_of(long_enough)) + ".") == "", "one long sentence"
