"""Prompts: their text, their token ids, and a check of their length."""

import sys
from collections.abc import Sequence
from pathlib import Path

from model import InputError, ModelConfig
from weights.cli.files import explaining
from weights.tokenizer import Tokenizer


def read_prompt(argument: str | None, file: str | None) -> str:
    """Text of the prompt: ``argument``, or the contents of ``file`` ("-": standard input) without a byte order mark.

    Raises InputError when it is missing, given twice, empty or not readable as UTF-8.
    """
    if (argument is None) == (file is None):
        raise InputError("give one prompt: as an argument, or with --prompt-file")
    place = "the prompt" if file is None else "standard input" if file == "-" else file
    with explaining(f"{place} cannot be read as UTF-8 text", (OSError, UnicodeError)):
        if file is None:
            text = argument
        else:
            text = (sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")).removeprefix("\ufeff")
        text.encode()  # fails for bytes of an argument that are not UTF-8
    if not text.strip():
        raise InputError("the prompt is empty: give it at least one character")
    return text


def encode_prompt(tokenizer: Tokenizer, text: str, *, chat: bool | None = None, system: str | None = None) -> list[int]:
    """Token ids of the prompt, as a user's turn of a chat or as plain text.

    ``chat`` None is a chat where the model has a chat template. Raises InputError for a ``system`` message without one.
    """
    if not (tokenizer.chat_template is not None if chat is None else chat):
        if system is not None:
            raise InputError("--system needs a chat: leave out --no-chat, or use a model with a chat template")
        return tokenizer.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def check_prompt(ids: Sequence[int], config: ModelConfig, folder: Path) -> None:
    """Raises InputError for ids outside the vocabulary of the model in ``folder``, and for more than its context."""
    if not ids or max(ids) >= config.vocab_size:
        raise InputError(f"{folder}: the tokenizer does not belong to this model: it gives ids that the model lacks")
    if len(ids) >= config.max_positions:
        limit = f"{len(ids)} tokens, the model's context {config.max_positions}"
        raise InputError(f"the prompt has {limit}: shorten the prompt")
