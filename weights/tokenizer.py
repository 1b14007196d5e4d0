"""Tokenizers: text to token ids and back, for ``tokenizer.json`` and ``tokenizer.model`` alike, and chat templates.

``token_bytes`` gives the bytes that a token adds to the text. Streaming, stop strings and banned words work on bytes,
because a token may end in the middle of a UTF-8 character.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model import InputError
from weights.cli.files import explaining, read_optional_json, read_text
from weights.vocabulary import NAMED_TOKENS, Vocabulary, token_text

PRIVATE_USE = range(0xE000, 0xF900)  # characters without a meaning


class Tokenizer:
    """Tokenizer of a model folder: vocabulary, end-of-text ids, chat template."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's tokenizer files. Raises InputError when they are absent or damaged."""
        self.settings = read_optional_json(folder / "tokenizer_config.json")
        path = folder / ("tokenizer.json" if (folder / "tokenizer.json").exists() else "tokenizer.model")
        if not path.exists():
            raise InputError(f"{folder} holds no tokenizer.json and no tokenizer.model")
        with explaining(f"{path} is not a tokenizer that can be read", (Exception,)):  # raised by the libraries
            self.vocabulary = Vocabulary(path, self.settings)
        self.chat_template = _chat_template(folder, self.settings)
        eos = self.vocabulary.special.get(token_text(self.settings.get("eos_token")))
        self.eos_ids = frozenset(_eos_ids(folder) or ([] if eos is None else [eos]))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, after the beginning-of-text token where the model expects one.

        Names of control tokens in ``text`` are text: a user cannot end a turn by typing its token.
        """
        return self.vocabulary.encode_prompt(text)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to the beginning of the assistant's answer.

        Each message is ``{"role": "system" | "user" | "assistant", "content": text}``. Names of control tokens are
        control tokens in the template, and text in a content. Raises InputError when the model has no chat template or
        the template refuses the messages.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template: leave out --chat and --system")
        control = self.vocabulary.special
        name = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        # A mark after each character of a typed name hides it while the text is split at the template's names.
        written = "".join(message["content"] for message in messages)
        mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in written)

        def hide(found: re.Match[str]) -> str:
            return "".join(character + mark for character in found[0])

        hidden = [{**message, "content": name.sub(hide, message["content"])} for message in messages]
        parts = re.split(f"({name.pattern})(?!{mark})", self._render(hidden))
        return self.vocabulary.encode_parts([control.get(part, part.replace(mark, "")) for part in parts])

    def token_bytes(self, token: int) -> bytes:
        """Bytes that this token adds to the text: none for control tokens and ids outside the vocabulary."""
        return self.vocabulary.pieces[token] if token < len(self.vocabulary.pieces) else b""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of these tokens from its beginning; bytes that are not UTF-8 become U+FFFD.

        It is the concatenation of their ``token_bytes``, without the space that encoding puts before a text.
        """
        data = b"".join(map(self.token_bytes, tokens))
        if self.vocabulary.adds_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        """Text of a conversation by the chat template."""

        def refuse(message: str) -> None:
            raise InputError(f"the model's chat template refuses this conversation: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        names = {key: token_text(self.settings.get(key)) for key in NAMED_TOKENS}
        with explaining("the model's chat template fails", (Exception,)):  # a template can raise any error
            template = environment.from_string(self.chat_template)
            text = template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **names)
            text.encode()  # fails for half of a surrogate pair
        return text


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Chat template of a folder: that of ``chat_template.jinja``, else of the settings, if any."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name: the one for plain chat is "default"
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _eos_ids(folder: Path) -> list[int]:
    """End-of-text ids of a folder: those in generation_config.json, else in config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(folder / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(each) is int for each in ids):
                raise InputError(f"{folder / name}: eos_token_id must be token ids, found {value!r:.80}")
            return ids
    return []
