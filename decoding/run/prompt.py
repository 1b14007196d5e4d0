"""Prompts: their text, their token ids, a check of their length, and how a conversation is read.

A prompt is read by torch in long chunks, an answer token by token in short steps, and the two round
differently. So the reading of a conversation is defined by its messages alone: a user's turn is one
prefill, an answer is read in short steps, as when it was written. Then entries of the KV cache that
are kept from turn to turn have the same bits as those of a conversation that is read anew.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cli.files import explaining, read_text
from decoding.rounds import common_prefix
from model import InputError, ModelConfig
from weights.tokenizer import Tokenizer


def read_prompt(argument: str | None, file: str | None) -> str:
    """Text of the prompt: ``argument``, or the contents of ``file`` ("-": standard input) without a
    byte order mark. Raises InputError when it is missing, given twice or cannot be read.
    """
    if (argument is None) == (file is None):
        raise InputError("give one prompt: as an argument, or with --prompt-file")
    if file is None:
        return argument
    with explaining("standard input cannot be read as UTF-8 text", (OSError, UnicodeError)):
        text = sys.stdin.read() if file == "-" else read_text(file)
    return text.removeprefix("\ufeff")


def checked_prompt(prompt: Any) -> str:
    """The prompt. Raises InputError for anything but a string of UTF-8 that is not empty."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"the prompt must be a string that is not empty, found {prompt!r:.80}")
    with explaining("the prompt cannot be read as UTF-8 text", (UnicodeError,)):
        prompt.encode()
    return prompt


def encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    *,
    chat: bool | None = None,
    system: str | None = None,
    schema: str | None = None,
) -> list[int]:
    """Token ids of the prompt, as a user's turn of a chat or as plain text.

    ``chat`` None is a chat where the model has a chat template. In a chat the model is told the
    JSON ``schema``. Raises InputError for a ``system`` message without one.
    """
    if not (tokenizer.chat_template is not None if chat is None else chat):
        if system is not None:
            raise InputError(
                "--system needs a chat: leave out --no-chat, or use a model with a chat template"
            )
        return tokenizer.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    return tokenizer.encode_chat(tell_schema(tokenizer, messages, schema))


def tell_schema(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], schema: str | None
) -> Sequence[dict[str, str]]:
    """The messages of a conversation with a JSON ``schema``, if any, which the model is told at the
    end of the system message or, where the chat template refuses one, of the first message.
    """
    if schema is None:
        return messages
    with explaining("--json-schema is no JSON", (ValueError, RecursionError)):
        line = f"Answer in JSON that follows this schema: {json.dumps(json.loads(schema))}"
    if messages[0]["role"] != "system":
        with_system = [{"role": "system", "content": line}, *messages]
        with suppress(InputError):
            tokenizer.encode_chat(with_system)
            return with_system
    first = {**messages[0], "content": f"{messages[0]['content']}\n{line}"}
    return [first, *messages[1:]]


def check_prompt(ids: Sequence[int], config: ModelConfig, folder: Path, context: int) -> None:
    """Raises InputError for ids outside the vocabulary of the model in ``folder``, and for as many
    as the context or more.
    """
    if not ids or max(ids) >= config.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer does not belong to this model: it gives no ids, or ids that"
            " the model lacks"
        )
    if len(ids) >= context:
        raise too_long(f"{len(ids)} tokens", config, context)


def too_long(size: str, config: ModelConfig, context: int) -> InputError:
    """Error of a prompt of this size that does not fit ``context`` positions."""
    used = f", of which {context} are used" if context < config.max_positions else ""
    remedy = "shorten the prompt" + (used and " or raise --context")
    return InputError(
        f"the prompt has {size}, the model's context {config.max_positions} tokens{used}: {remedy}"
    )


class Segment(NamedTuple):
    """Positions ``[begin, end)`` of a prompt, read ``by_steps`` or by one prefill."""

    begin: int
    end: int
    by_steps: bool


MOST_ANSWERS = 64  # that are found in a conversation: each takes two renderings of the template
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
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], schema: str | None = None
) -> tuple[list[int], Spans]:
    """Token ids of a conversation, up to the beginning of the next answer, and the positions of the
    answers in it. The model is told the JSON ``schema``: see ``tell_schema``.

    An answer begins where the conversation before it ends, and its tokens are those of its text.
    Where the chat template rewrites earlier messages, there is no such place, and the answer is
    read as a part of the user's next turn. So are those behind the first ``MOST_ANSWERS``. Raises
    InputError as ``Tokenizer.encode_chat`` does.
    """
    messages = tell_schema(tokenizer, messages, schema)
    ids = tokenizer.encode_chat(messages)
    answers = []
    given = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for at in given[:MOST_ANSWERS]:
        begin = len(tokenizer.encode_chat(messages[:at]))
        end = common_prefix(ids, tokenizer.encode_chat(messages[:at], messages[at]["content"]))
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
