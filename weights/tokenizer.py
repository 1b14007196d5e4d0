"""Text <-> token ids, for ``tokenizer.json`` and ``tokenizer.model`` alike, and chat templates.

The one unusual verb is ``token_bytes``: the bytes that a token adds to the text. Streaming, stop strings
and banned words all work on bytes, because a token may end in the middle of a UTF-8 character.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model import InputError
from weights.cli.files import is_there, read_optional_json
from weights.vocabulary import (
    NAMED_TOKENS,
    PRIVATE_USE,
    JsonVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    first_line,
    split_at,
    token_text,
)


class Tokenizer:
    """The tokenizer of a model folder: vocabulary, end-of-text ids, chat template."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's tokenizer files. Raises InputError when they are absent or not understood."""
        self.settings = read_optional_json(folder / "tokenizer_config.json")
        if is_there(folder / "tokenizer.json"):
            self.vocabulary: Vocabulary = JsonVocabulary(folder / "tokenizer.json", self.settings)
        elif is_there(folder / "tokenizer.model"):
            self.vocabulary = SentencePieceVocabulary(folder / "tokenizer.model", self.settings)
        else:
            raise InputError(f"{folder} holds no tokenizer.json and no tokenizer.model")
        self.chat_template = _chat_template(folder, self.settings)
        self.eos_ids = frozenset(_eos_ids(folder) or self._eos_of_settings())

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the beginning-of-text token where the model expects one.

        Names of control tokens inside ``text`` are text: a user cannot end a turn by typing its token.
        """
        return self.vocabulary.encode_prompt(text)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Each message is ``{"role": "system" | "user" | "assistant", "content": text}``. Control tokens of
        the template are control tokens; those named inside a content are text. Raises InputError when the
        model has no chat template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template: leave out --chat and --system")
        control = self.vocabulary.special
        typed = [name for name in control if any(name in message["content"] for message in messages)]
        if not typed:
            return self.vocabulary.encode(self._render(messages), parse_special=True)
        # Hide what the user typed from the template's own control tokens, then put it back as text.
        written = "".join(message["content"] for message in messages)
        fresh = (chr(code) for code in PRIVATE_USE if chr(code) not in written)
        marks = dict(zip(sorted(typed, key=len, reverse=True), fresh, strict=False))
        hidden = [{**message, "content": _replace_all(message["content"], marks)} for message in messages]
        back = {mark: name for name, mark in marks.items()}
        parts = split_at(control, self._render(hidden))
        return self.vocabulary.encode_parts([control.get(part, _replace_all(part, back)) for part in parts])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to the text: none for control tokens and ids without a piece."""
        return self.vocabulary.pieces[token] if token < len(self.vocabulary.pieces) else b""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that these tokens are when they begin it; bytes that are no UTF-8 become U+FFFD.

        It is the concatenation of their ``token_bytes``, less the space that encode puts before a text.
        """
        data = b"".join(map(self.token_bytes, tokens))
        if self.vocabulary.adds_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def _eos_of_settings(self) -> list[int]:
        name = token_text(self.settings.get("eos_token"))
        return [self.vocabulary.special[name]] if name in self.vocabulary.special else []

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        def refuse(message: str) -> None:
            raise InputError(f"the model's chat template refuses this conversation: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        names = {key: token_text(self.settings.get(key)) for key in NAMED_TOKENS}
        try:
            template = environment.from_string(self.chat_template)
            text = template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **names)
            text.encode()  # a template can write half of a surrogate pair, which is no text
            return text
        except InputError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise InputError(f"the model's chat template fails: {first_line(error)}") from None


def _replace_all(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if is_there(file):
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates: the one for plain chat is "default"
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_ids(folder: Path) -> list[int]:
    """Every id that ends a text: generation_config.json's list, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and number >= 0 for number in ids):
            raise InputError(f"{folder / name}: eos_token_id must be a token id or a list of them, found {value!r:.80}")
        if ids:
            return ids
    return []
