"""Children's stories: requests for them, and a filter of written ones.

Most forms of ``templates.json`` state a length: without one a small model writes until it repeats
itself. The model continues an opening, so that a story names its subject in its first words.
"""

import json
import random
import re
from collections.abc import Hashable, Sequence
from pathlib import Path

TEMPLATES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("templates.json").read_text(encoding="utf-8")
)
MOST_REPEATED = 0.05  # largest share of repeated four-grams in a text
LEAST_WORDS = 30  # of a text
MOST_WORDS_PER_SENTENCE = 20  # largest mean number of words of a story's sentences
LEAST_MENTIONED = 0.5  # smallest share of a prompt's subjects that its story names
SENTENCE_END = re.compile(r"[.!?][\"'”’)]*(?=\s|$)")


def story_request(rng: random.Random) -> tuple[str, str, list[str]]:
    """Return a prompt, the opening of its story, and the subjects that the story should name.

    Prompt and opening are random forms, with blanks filled by the same random words. A subject is
    the last word in a blank of the prompt.
    """
    form = rng.choice(TEMPLATES["form"])
    blanks = {
        name: rng.choice(phrases)
        for name, phrases in TEMPLATES.items()
        if name not in ("form", "opening")
    }
    subjects = [phrase.split()[-1] for name, phrase in blanks.items() if "{" + name + "}" in form]
    return form.format(**blanks), rng.choice(TEMPLATES["opening"]).format(**blanks), subjects


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def repetition(texts: Sequence[Sequence[Hashable]]) -> float:
    """Return the share of the texts' four-grams, of words or of tokens, that occurred before in
    their text; 0 without any.
    """
    grams = [[*zip(text, text[1:], text[2:], text[3:], strict=False)] for text in texts]
    count = sum(map(len, grams))
    return (count - sum(len({*each}) for each in grams)) / max(1, count)


def before_repetition(text: str) -> str:
    """Return the longest beginning of whole sentences with ``repetition`` up to ``MOST_REPEATED``;
    "" if there is none.
    """
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    beginnings = (text[:end] for end in reversed(ends))
    return next((each for each in beginnings if repetition([words_of(each)]) <= MOST_REPEATED), "")


def kept_story(response: str, subjects: Sequence[str]) -> str:
    """Return the story up to its last whole sentence before it begins to repeat itself.

    Empty where that is too short, strays from its subjects or has sentences too long for children.
    A word with the same beginning, less two letters, names a subject: "foxes" names a fox.
    """
    story = before_repetition(response)
    words = words_of(story)
    sentences = len(SENTENCE_END.findall(story))
    stems = [subject.lower()[: max(3, len(subject) - 2)] for subject in subjects]
    named = sum(any(word.startswith(stem) for word in words) for stem in stems)
    fits = LEAST_WORDS <= len(words) <= MOST_WORDS_PER_SENTENCE * sentences
    return story if fits and named >= LEAST_MENTIONED * len(subjects) else ""
