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

from app.files import explaining, read_text
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
    end of the system message or, where the chat template refuses one, of the first message. The
    schema is one that ``Grammar`` has taken.
    """
    if schema is None:
        return messages
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
    """Tokens of a prompt that are read at once: one by a step, or many by a prefill.

    Steps round every token alike, wherever they end. The rounding of a prefill depends on all of
    its tokens, so it is one segment.
    """

    tokens: Sequence[int]
    by_step: bool


MOST_ANSWERS = 64  # that are found in a conversation: each takes two renderings of the template
Spans = Sequence[tuple[int, int]]  # positions [begin, end) of earlier answers, in order


def segments_of(prompt: Sequence[int], answers: Spans) -> list[Segment]:
    """The segments of a prompt, but for its last token, which the first round reads.

    The token before an answer is read by the first step of the answer, and so belongs to it.
    """
    tokens = prompt[:-1]
    found = []
    at = 0
    for begin, end in answers:
        first = max(at, begin - 1)
        found += [Segment(tokens[at:first], False), *steps(tokens[first:end])]
        at = end
    found.append(Segment(tokens[at:], False))
    return [segment for segment in found if segment.tokens]


def steps(tokens: Sequence[int]) -> list[Segment]:
    """Segments of tokens that are read one by one."""
    return [Segment([token], True) for token in tokens]


def conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], schema: str | None = None
) -> tuple[list[int], Spans]:
    """Token ids of a conversation, up to the beginning of the next answer, and the positions of the
    answers in it. The model is told the JSON ``schema``: see ``tell_schema``.

    An answer begins where the conversation before it ends, and its tokens are those of its text.
    Where the chat template rewrites earlier messages, there is no such place, and the answer is
    read as a part of the user's next turn. So are those after the first ``MOST_ANSWERS``. Raises
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
