"""Reading of a conversation: which of its tokens are read as a prompt, and which as an answer.

A prompt is read by torch in long chunks, an answer token by token in short steps, and the two round
differently. So the reading of a conversation is defined by its messages alone: a user's turn is one
prefill, an answer is read in short steps, as when it was written. Then entries of the KV cache that
are kept from turn to turn have the same bits as those of a conversation that is read anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

from decoding.rounds import common_prefix
from weights.tokenizer import Tokenizer


class Segment(NamedTuple):
    """Positions ``[begin, end)`` of a prompt, read ``by_steps`` or by one prefill."""

    begin: int
    end: int
    by_steps: bool


Spans = Sequence[tuple[int, int]]  # positions [begin, end) of earlier answers, in order


def segments_of(length: int, answers: Spans) -> list[Segment]:
    """The segments of a prompt of ``length`` tokens, but for the last, which the first round reads.

    The token before an answer is read by the first step of the answer, and so belongs to it.
    """
    found = []
    at = 0
    for begin, end in answers:
        found += [Segment(at, begin - 1, False), Segment(max(at, begin - 1), end, True)]
        at = end
    found.append(Segment(at, length - 1, False))
    return [segment for segment in found if segment.begin < segment.end]


def conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]]
) -> tuple[list[int], Spans]:
    """Token ids of a conversation, up to the beginning of the next answer, and the positions of the
    answers in it.

    An answer begins where the conversation before it ends, and its tokens are those of its text.
    Where the chat template rewrites earlier messages, there is no such place, and the answer is
    read as a part of the user's next turn. Raises InputError as ``Tokenizer.encode_chat`` does.
    """
    ids = tokenizer.encode_chat(messages)
    answers = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = len(tokenizer.encode_chat(messages[:number]))
            end = common_prefix(ids, tokenizer.encode_chat(messages[:number], message["content"]))
            if end > begin:
                answers.append((begin, end))
    return ids, answers


def reusable(
    tokens: Sequence[int], read: Sequence[Segment], ids: Sequence[int], wanted: Sequence[Segment]
) -> int:
    """Number of entries of a cache that a new prompt can use.

    The cache holds ``tokens``, read in the segments ``read``; the prompt's are ``ids`` and
    ``wanted``. Of steps every token counts by itself, a prefill counts only as a whole, since the
    rounding of a row depends on the others of its chunk.
    """
    entries = 0
    for old, new in zip(read, wanted, strict=False):
        if (old.begin, old.by_steps) != (new.begin, new.by_steps):
            break
        end = min(old.end, new.end)
        equal = new.begin + common_prefix(tokens[new.begin : end], ids[new.begin : end])
        if new.by_steps or equal == old.end == new.end:
            entries = equal
        if not equal == old.end == new.end:
            break
    return entries
