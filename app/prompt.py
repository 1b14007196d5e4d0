"""Prompts: their text, their token ids, and a check of their length.

Knows nothing of sessions and caches.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from app.files import explaining, read_text
from app.options import Options
from model.errors import InputError
from weights.tokenizer import Tokenizer

Messages = Sequence[dict[str, str]]  # {"role": ..., "content": ...}


def read_prompt(options: Options) -> str:
    """Return the text of the command line's prompt: the argument, or the file's contents ("-":
    standard input) without a byte order mark. Raises InputError when it is missing, given twice or
    cannot be read.
    """
    if (options.prompt is None) == (options.prompt_file is None):
        raise InputError("give one prompt: as an argument, or with --prompt-file")
    if options.prompt_file is None:
        return options.prompt
    with explaining("standard input cannot be read as UTF-8 text", (OSError, UnicodeError)):
        is_pipe = options.prompt_file == "-"
        text = sys.stdin.read() if is_pipe else read_text(options.prompt_file)
    return text.removeprefix("\ufeff")


def checked_prompt(prompt: Any) -> str:
    """Return the prompt. Raises InputError for anything but a string of UTF-8 with a letter."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"the prompt must be a string that is not empty, found {prompt!r:.80}")
    with explaining("the prompt cannot be read as UTF-8 text", (UnicodeError,)):
        prompt.encode()
    return prompt


def encode_prompt(tokenizer: Tokenizer, prompt: str, options: Options) -> list[int]:
    """Return the token ids of a prompt, as a user's turn of a chat or as plain text.

    It is a turn where the model has a chat template, unless ``--no-chat`` is given. Raises
    InputError for a system message without a chat.
    """
    is_chat = tokenizer.chat_template is not None if options.chat is None else options.chat
    if is_chat:
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}], options)
    if options.system is not None:
        raise InputError(
            "--system needs a chat: leave out --no-chat, or use a model with a chat template"
        )
    return tokenizer.encode(prompt, find_names=True)


def encode_chat(tokenizer: Tokenizer, messages: Messages, options: Options) -> list[int]:
    """Return the token ids of a conversation, up to the beginning of the next answer.

    The system message of the options comes first, unless the conversation has one. The model is
    told the JSON schema, if any, at the end of the system message or, where the chat template
    refuses one, of the first message. Raises InputError as ``Tokenizer.encode_chat`` does.
    """
    messages = [*messages]
    has_system = bool(messages) and messages[0]["role"] == "system"
    if options.system is not None and not has_system:
        messages = [{"role": "system", "content": options.system}, *messages]
        has_system = True
    if options.json_schema is None:
        return tokenizer.encode_chat(messages)
    with explaining("--json-schema is no JSON", (ValueError, RecursionError), "json_schema"):
        schema = json.dumps(json.loads(read_schema(options)))
    line = f"Answer in JSON that follows this schema: {schema}"
    if not has_system:
        with suppress(InputError):
            return tokenizer.encode_chat([{"role": "system", "content": line}, *messages])
    first = {**messages[0], "content": f"{messages[0]['content']}\n{line}"}
    return tokenizer.encode_chat([first, *messages[1:]])


def read_grammar(kind: str, options: Options) -> str:
    """Return the source of a grammar: that of ``--regex`` is given itself, a schema or a Lark
    grammar may be a file's. A Lark grammar defines ``start:``, which no file's name does.
    """
    if kind == "json_schema":
        return read_schema(options)
    source = str(getattr(options, kind))
    return read_text(source) if kind == "grammar" and "start:" not in source else source


def read_schema(options: Options) -> str:
    """Return the JSON schema of the options as JSON: itself, a dictionary's, or a file's."""
    schema = options.json_schema
    if isinstance(schema, dict):
        with explaining("--json-schema is no JSON", (TypeError, ValueError, RecursionError)):
            return json.dumps(schema)
    if not str(schema):
        raise InputError("--json-schema is empty: give a file, or a JSON object", "json_schema")
    return schema if str(schema).lstrip().startswith("{") else read_text(schema)
