"""Prompts: reading their text, encoding it, checking its length."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from model import InputError, ModelConfig
from weights.cli.files import check_utf8, explaining
from weights.tokenizer import Tokenizer


def read_prompt(argument: str | None, file: str | None) -> str:
    """Text of the prompt: the argument, or that of the file ("-": standard input), less a byte order mark.

    Raises InputError when it is missing, given twice, empty or not readable as UTF-8.
    """
    if (argument is None) == (file is None):
        raise InputError("give one prompt: as an argument, or with --prompt-file")
    text = argument
    if text is None:
        with explaining(f"{file} cannot be read as UTF-8 text", (OSError, UnicodeDecodeError)):
            text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        text = text.removeprefix("\ufeff")
    check_utf8("prompt", text)
    if not text.strip():
        raise InputError("the prompt is empty: give it at least one character")
    return text


def encode_prompt(tokenizer: Tokenizer, text: str, *, chat: bool | None = None, system: str | None = None) -> list[int]:
    """Token ids of the prompt: a user's turn, by default where the model has a chat template, else plain text.

    Raises InputError for a ``system`` message without a chat.
    """
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        if system is not None:
            raise InputError("--system needs a chat: leave out --no-chat, or use a model with a chat template")
        return tokenizer.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def check_prompt(ids: Sequence[int], config: ModelConfig, folder: Path) -> None:
    """Raises InputError for ids that the model of ``folder`` does not have, and for more than its context holds."""
    if not ids or max(ids) >= config.vocab_size:
        raise InputError(f"{folder}: the tokenizer does not belong to this model: it gives ids that the model lacks")
    if len(ids) >= config.max_positions:
        raise InputError(
            f"the prompt has {len(ids)} tokens, the model's context {config.max_positions}: shorten the prompt"
        )
