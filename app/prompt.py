"""Prompts and grammars: what the options give as text, files or JSON, and the token ids.

Knows nothing of sessions and caches.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from app.common.files import read_text
from app.options import Options, flag_of
from model.config import ModelConfig
from model.errors import InputError, explaining
from weights.tokenizer import Tokenizer

# options that name a file, and those that are JSON or name a file of it
FILES = ("plan", "grammar")
JSON_OPTIONS = ("json_schema", "chat_template_kwargs")
Messages = Sequence[dict[str, str]]  # {"role": ..., "content": ...}
# In every Lark grammar, but in no file's name: requests, which may name no file, rely on that.
LARK_START = r"start\s*:"
Prompt = str | Sequence[int] | Messages  # a text, token ids, or a conversation


def read_prompt(options: Options) -> str:
    """Return the text of the command line's prompt: the option, or the contents of a file ("-":
    standard input) without a byte order mark. With neither, a piped standard input is read.

    Raises InputError when it is missing, given twice or cannot be read.
    """
    file = options.prompt_file
    if options.prompt is None and file is None and not sys.stdin.isatty():
        file = "-"
    if (options.prompt is None) == (file is None):
        raise InputError("give one prompt: as an argument, with --prompt-file, or through a pipe")
    if file is None:
        return options.prompt
    with explaining("standard input cannot be read as UTF-8 text", (OSError, UnicodeError)):
        return (sys.stdin.read() if file == "-" else read_text(file)).removeprefix("\ufeff")


def checked_text(prompt: Any) -> str:
    """Return the prompt. Raises InputError for anything but a string of UTF-8 that is not blank."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(
            "the prompt must be a string that is not empty, or a list of token ids or messages,"
            f" found {prompt!r:.80}"
        )
    with explaining("the prompt cannot be read as UTF-8 text", (UnicodeError,)):
        prompt.encode()
    return prompt


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, options: Options) -> list[int]:
    """Return the token ids of a text, as a user's turn of a chat or as it is, or of a conversation,
    up to the beginning of the next answer. Token ids are returned as they are.

    A text is a turn where the model has a chat template, unless ``--no-chat`` is given. Raises
    InputError for anything else, and for a system message without a chat.
    """
    kinds = {*map(type, prompt)} if isinstance(prompt, list | tuple) else set()
    if kinds == {int}:
        return [*prompt]
    messages = prompt if kinds == {dict} else [{"role": "user", "content": checked_text(prompt)}]
    has_template = tokenizer.chat_template is not None
    if kinds == {dict} or (has_template if options.chat is None else options.chat):
        return encode_chat(tokenizer, messages, options)
    for name in ("system", "chat_template_kwargs"):
        if getattr(options, name) is not None:
            raise InputError(
                f"{flag_of(name)} needs a chat: leave out --no-chat, or use a model with a chat"
                " template"
            )
    return tokenizer.encode(prompt, find_names=True)


def encode_chat(tokenizer: Tokenizer, messages: Messages, options: Options) -> list[int]:
    """Return the token ids of a conversation, up to the beginning of the next answer.

    The system message of the options comes first, unless the conversation has one. The model is
    told the JSON schema, if any, at the end of the system message or, where the chat template
    refuses one, of the first message. Raises InputError as ``Tokenizer.encode_chat`` does.
    """
    with explaining(
        'a message is {"role": ..., "content": ...}, two strings of UTF-8',
        (KeyError, TypeError, UnicodeError),
    ):
        "".join(each[name] for each in messages for name in ("role", "content")).encode()
    if options.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system}, *messages]
    encode = partial(
        tokenizer.encode_chat, variables=read_json_option(options, "chat_template_kwargs")
    )
    if options.json_schema is None:
        return encode(messages)
    _, schema = read_grammar(options)
    line = f"Answer in JSON that follows this schema: {schema}"
    if messages[0]["role"] != "system":
        with suppress(InputError):
            return encode([{"role": "system", "content": line}, *messages])
    first = {**messages[0], "content": f"{messages[0]['content']}\n{line}"}
    return encode([first, *messages[1:]])


def check_ids(ids: Sequence[int], config: ModelConfig, context: int) -> None:
    """Raise InputError for token ids that the model does not have, and for as many as the
    ``context`` or more.
    """
    if not (ids and 0 <= min(ids) <= max(ids) < config.vocab_size):
        raise InputError(
            f"the prompt has no token ids, or some outside 0 to {config.vocab_size - 1}: if you"
            " gave no ids, the tokenizer is another model's"
        )
    if len(ids) >= context:
        raise InputError(
            f"the prompt has {len(ids)} tokens, the context {context} (the model's"
            f" {config.max_positions}): shorten the prompt, in a conversation forget the oldest"
            " turns"
        )


def with_contents(options: Options, read_plan: Callable[[str], object]) -> Options:
    """Return the options with the contents of the files that they name in place of the names: a
    pipe can be read only once. ``read_plan`` reads a plan for the model. Raises InputError.
    """
    for name in (*FILES, *JSON_OPTIONS):
        if getattr(options, name) == "":
            raise InputError(f"{flag_of(name)} is empty: give a file", name)
    read: dict[str, object] = {
        name: read_json_option(options, name)
        for name in JSON_OPTIONS
        if getattr(options, name) is not None
    }
    if isinstance(options.plan, str):
        read["plan"] = read_plan(options.plan)
    if options.grammar is not None and not re.search(LARK_START, options.grammar):
        read["grammar"] = source = read_text(options.grammar)
        if not re.search(LARK_START, source):
            raise InputError(f"{options.grammar} is no grammar: it has no rule start", "grammar")
    return replace(options, **read) if read else options


def read_grammar(options: Options) -> tuple[str, str] | None:
    """Return the kind and the source of the options' grammar, if any, after ``with_contents``."""
    if options.json_schema is not None:
        return "json_schema", json.dumps(read_json_option(options, "json_schema"))
    if options.regex is not None:
        return "regex", options.regex
    if options.grammar is None:
        return None
    return "lark", options.grammar


def read_json_option(options: Options, name: str) -> dict[str, Any]:
    """Return the JSON object of an option: itself, or a file's; an empty one where the option is
    not given. Raises InputError.
    """
    value = {} if getattr(options, name) is None else getattr(options, name)
    if isinstance(value, str) and not value.lstrip().startswith(("{", "[")):
        value = read_text(value)
    with explaining(f"{flag_of(name)} is no JSON", (TypeError, ValueError, RecursionError), name):
        found = json.loads(json.dumps(value) if isinstance(value, dict) else value)
    if not isinstance(found, dict):
        raise InputError(f"{flag_of(name)} must hold a JSON object, found {found!r:.80}", name)
    return found
