"""Which written texts are worth learning from: those that do not repeat themselves and keep to what was asked."""

from __future__ import annotations

import re
from dataclasses import replace

from decoding.corpus.text_file import WrittenText

SEQUENCE = 4  # words: so many in a row that were said before count as a repetition
MOST_REPEATED = 0.05  # of a text's sequences
LEAST_WORDS = 30
LONGEST_SENTENCES = 20  # words, on average, of a story for children
LEAST_MENTIONED = 0.5  # of what a story's prompt asks for
SENTENCE_END = re.compile(r"[.!?][\"'”’)]*(?=\s|$)")
# What a request is made of besides its subject.
COMMON = set(
    re.findall(
        r"\w+",
        """
        a about an and at because bedtime before begins behind boy by called child children class edge edges end
        ends finds five for friend from funny gets girl happy has have he her him his home i in is it its kids learn
        learned learns little look looking lose loses losing make making me much my named near new not of on one
        paragraph place please repair sentence sentences share shares she short should simple six small so some
        story take takes tale tell that the their them they thing things tiny to too took tries two under up very
        way where which who with word words write you young your
        """,
    )
)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def repetition(text: str) -> float:
    """The share of a text's four-word sequences that occurred before in it; 0 for a text of fewer words."""
    words = words_of(text)
    sequences = list(zip(*(words[start:] for start in range(SEQUENCE)), strict=False))
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def mentioned(prompt: str, text: str) -> float:
    """The share of what the prompt asks for that the text names: words other than ``COMMON``; 1 if it asks for nothing.

    A word is named by any that begins like it, less an ending of up to two letters: "foxes" names a fox.
    """
    asked = set(words_of(prompt)) - COMMON
    said = words_of(text)
    named = [word for word in asked if any(other.startswith(word[: max(3, len(word) - 2)]) for other in said)]
    return len(named) / len(asked) if asked else 1.0


def before_repetition(text: str) -> str:
    """The longest beginning of whole sentences that repeats itself no more than ``MOST_REPEATED``; "" if none does."""
    if repetition(text) <= MOST_REPEATED:
        return text
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return next((text[:end] for end in reversed(ends) if repetition(text[:end]) <= MOST_REPEATED), "")


def sentence_length(text: str) -> float:
    """The mean number of words of a text's sentences; the whole text counts as one where none ends."""
    return len(words_of(text)) / max(1, len(SENTENCE_END.findall(text)))


def worth_learning(text: WrittenText) -> WrittenText | None:
    """The text up to where it begins to repeat itself.

    None if little is left, or not what the prompt asked for, or sentences too long for a children's story.
    """
    response = before_repetition(text.response)
    if len(words_of(response)) < LEAST_WORDS:
        return None
    strays = mentioned(text.prompt, response) < LEAST_MENTIONED
    if text.kind == "story" and (strays or sentence_length(response) > LONGEST_SENTENCES):
        return None
    return replace(text, response=response, finished=text.finished and response == text.response)
