"""Filter of the corpus writer: texts about their prompt, up to where they begin to repeat
themselves.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.corpus.stories import (
    MOST_REPEATED,
    before_repetition,
    kept_story,
    repetition,
    words_of,
)

FRESH = (
    "A fox found a red ball in the snow. She kicked it up the hill and it came down again, much too"
    " fast for her."
)
LOOP = " The ball rolled on and on. The ball rolled on and on. The ball rolled on and on."


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_repetition_counts_the_sequences_of_four_words_that_were_there_before(
    words: list[str],
) -> None:
    sequences = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    again = sum(sequence in sequences[:at] for at, sequence in enumerate(sequences))
    assert repetition(" ".join(words)) == pytest.approx(again / len(sequences) if sequences else 0)


def test_a_text_that_begins_to_repeat_itself_ends_before_it() -> None:
    assert before_repetition(FRESH) == FRESH
    kept = before_repetition(FRESH + LOOP)
    assert kept == FRESH + " The ball rolled on and on." and repetition(kept) <= MOST_REPEATED
    for text, whole in (
        ('3.5 km. "No." And th', '3.5 km. "No."'),
        ("One.", "One."),
        ("no end " * 9, ""),
    ):
        assert before_repetition(text) == whole


def test_a_story_is_kept_that_is_about_its_prompt_long_enough_and_of_short_sentences() -> None:
    long_enough = FRESH + " Then the two of them went home and had some soup."
    for subjects in (["foxes", "ball"], ["fox", "king"], ["Snow"], []):
        assert kept_story(long_enough, subjects) == long_enough
    assert kept_story(long_enough + LOOP, ["fox"]) == long_enough + " The ball rolled on and on."
    for subjects in (["king"], ["fox", "king", "boat"]):
        assert kept_story(long_enough, subjects) == ""
    assert kept_story(" ".join(words_of(long_enough)[:29]), []) == ""
    assert kept_story(" ".join(words_of(long_enough)) + ".", []) == "", "one long sentence"
