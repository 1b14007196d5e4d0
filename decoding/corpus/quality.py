"""Filter of written texts: by repetition, length, and mention of the prompt's subject."""

import re

SEQUENCE = 4  # words per sequence, which is repeated if it occurred before
MOST_REPEATED = 0.05  # largest share of repeated sequences in a text
LEAST_WORDS = 30  # of a text
LONGEST_SENTENCES = 20  # largest mean number of words of a story's sentences
LEAST_MENTIONED = 0.5  # smallest share of a prompt's subject words that its story names
SENTENCE_END = re.compile(r"[.!?][\"'”’)]*(?=\s|$)")
# Words of a request that are not its subject.
COMMON = """
a about an and at because bedtime before begins behind boy by called child children class edge edges end
ends finds five for friend from funny gets girl happy has have he her him his home i in is it its kids learn
learned learns little look looking lose loses losing make making me much my named near new not of on one
paragraph place please repair sentence sentences share shares she short should simple six small so some
story take takes tale tell that the their them they thing things tiny to too took tries two under up very
way where which who with word words write you young your
"""


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def repetition(text: str) -> float:
    """The share of a text's four-word sequences that occurred before in it; 0 for a text of fewer words."""
    words = words_of(text)
    sequences = list(zip(*(words[start:] for start in range(SEQUENCE)), strict=False))
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def mentioned(prompt: str, text: str) -> float:
    """The share of the prompt's words, other than ``COMMON``, that the text mentions; 1 where there are none.

    A word with the same beginning, less two letters, mentions it: "foxes" mentions a fox.
    """
    asked = set(words_of(prompt)) - set(words_of(COMMON))
    said = words_of(text)
    named = [word for word in asked if any(other.startswith(word[: max(3, len(word) - 2)]) for other in said)]
    return len(named) / len(asked) if asked else 1.0


def before_repetition(text: str, finished: bool) -> str:
    """The longest beginning of whole sentences with ``repetition`` up to ``MOST_REPEATED``; "" if there is none.

    The end of a ``finished`` text, which was not cut off, ends a sentence too.
    """
    ends = [*(match.end() for match in SENTENCE_END.finditer(text)), *([len(text)] if finished else [])]
    return next((text[:end] for end in reversed(ends) if repetition(text[:end]) <= MOST_REPEATED), "")


def worth_learning(prompt: str, response: str, finished: bool = True) -> str:
    """The story up to its last whole sentence before it begins to repeat itself.

    Empty where that is too short, strays from its prompt or has sentences too long for children.
    """
    story = before_repetition(response, finished)
    words, sentences = len(words_of(story)), max(1, len(SENTENCE_END.findall(story)))
    about = mentioned(prompt, story) >= LEAST_MENTIONED
    return story if about and words >= LEAST_WORDS and words / sentences <= LONGEST_SENTENCES else ""
