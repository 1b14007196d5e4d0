"""Text <-> token ids, for ``tokenizer.json`` and ``tokenizer.model`` alike, and chat templates.

The one unusual verb is ``token_bytes``: the bytes that a token adds to the text. Streaming, stop strings
and banned words all work on bytes, because a token may end in the middle of a UTF-8 character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
import sentencepiece
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model import InputError
from weights.files import read_json, read_optional_json

SPACE_MARK = "▁"  # sentencepiece writes a space so
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """What a tokenizer library must supply."""

    special: dict[str, int]  # control tokens by name; they are not text
    pieces: list[bytes]  # the bytes each token adds to the text; b"" for control tokens

    def encode(self, text: str, *, parse_special: bool) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]: ...


class Tokenizer:
    """The tokenizer of a model folder: vocabulary, end-of-text ids, chat template."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's tokenizer files. Raises InputError when they are absent or not understood."""
        self.settings = read_optional_json(folder / "tokenizer_config.json")
        if (folder / "tokenizer.json").exists():
            self.vocabulary: Vocabulary = JsonVocabulary(folder / "tokenizer.json", self.settings)
        elif (folder / "tokenizer.model").exists():
            self.vocabulary = SentencePieceVocabulary(folder / "tokenizer.model", self.settings)
        else:
            raise InputError(f"{folder} holds no tokenizer.json and no tokenizer.model")
        self.chat_template = _chat_template(folder, self.settings)
        self.eos_ids = frozenset(_eos_ids(folder))

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
        names = sorted(self.vocabulary.special, key=len, reverse=True)
        typed = [name for name in names if any(name in message["content"] for message in messages)]
        if not typed:
            return self.vocabulary.encode(self._render(messages), parse_special=True)
        # Hide what the user typed from the template's own control tokens, then put it back as text.
        marks = {name: f"\ue000{number}\ue001" for number, name in enumerate(typed)}
        hidden = [{**message, "content": _replace_all(message["content"], marks)} for message in messages]
        back = {mark: name for name, mark in marks.items()}
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", self._render(hidden)):
            if part in self.vocabulary.special:
                ids.append(self.vocabulary.special[part])
            elif part:
                ids += self.vocabulary.encode(_replace_all(part, back), parse_special=False)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to the text: none for control tokens and ids without a piece."""
        return self.vocabulary.pieces[token] if token < len(self.vocabulary.pieces) else b""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        def refuse(message: str) -> None:
            raise InputError(f"the model's chat template refuses this conversation: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        names = {key: _token_text(self.settings.get(key)) for key in ("bos_token", "eos_token", "unk_token")}
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, **names)
        except jinja2.TemplateError as error:
            raise InputError(f"the model's chat template fails: {error}") from None


class JsonVocabulary:
    """A ``tokenizer.json``, through the tokenizers library."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        raw = read_json(path)
        try:
            self.library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every fault of the file
            raise InputError(f"{path} is not a tokenizer the tokenizers library reads: {error}") from None
        self.library.no_truncation()
        self.library.no_padding()
        added = self.library.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        to_bytes = _byte_level_bytes if _uses_byte_level(path, raw) else _piece_bytes
        size = 1 + max(self.library.get_vocab(with_added_tokens=True).values(), default=-1)
        self.pieces = [b""] * size
        for piece, number in self.library.get_vocab(with_added_tokens=True).items():
            if number in added:
                self.pieces[number] = b"" if added[number].special else piece.encode()
            else:
                self.pieces[number] = to_bytes(piece)
        # transformers lets tokenizer_config.json overrule the file's own rule.
        wants_bos = settings.get("add_bos_token")
        self.bos = self.special.get(_token_text(settings.get("bos_token"))) if wants_bos else None
        self.own_rule = wants_bos is None

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        self.library.encode_special_tokens = not parse_special
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        if self.own_rule:
            self.library.encode_special_tokens = True
            return self.library.encode(text, add_special_tokens=True).ids
        ids = self.encode(text, parse_special=False)
        return ids if self.bos is None else [self.bos, *ids]


class SentencePieceVocabulary:
    """A ``tokenizer.model``, through the sentencepiece library."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.library = sentencepiece.SentencePieceProcessor()
        try:
            self.library.LoadFromSerializedProto(path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise InputError(f"{path} is not a sentencepiece model: {error}") from None
        pieces = [self.library.IdToPiece(number) for number in range(self.library.GetPieceSize())]
        listed = settings.get("added_tokens_decoder", {})
        marked = {entry.get("content") for entry in listed.values() if entry.get("special")}
        self.special = {
            piece: number
            for number, piece in enumerate(pieces)
            if self.library.IsControl(number) or self.library.IsUnknown(number) or piece in marked
        }
        self.pieces = [b"" if piece in self.special else _piece_bytes(piece) for piece in pieces]
        self.bos = self.library.bos_id() if settings.get("add_bos_token", True) else -1

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        names = sorted(self.special, key=len, reverse=True)
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
            if part not in self.special:
                ids += self.library.EncodeAsIds(part)
            elif parse_special:
                ids.append(self.special[part])
            else:  # sentencepiece would find the name again, so it never sees it whole
                ids += self.library.EncodeAsIds(part[0]) + self.library.EncodeAsIds(part[1:])
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.encode(text, parse_special=False)
        return ids if self.bos < 0 else [self.bos, *ids]


def _replace_all(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def _token_text(entry: Any) -> str:
    """tokenizer_config.json names a token by its text, or by an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level piece: printable ones stand for themselves, the
    others, in order, for the characters from U+0100 on (the alphabet GPT-2 introduced)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    return bytes(BYTE_OF_CHARACTER[character] for character in piece if character in BYTE_OF_CHARACTER)


def _piece_bytes(piece: str) -> bytes:
    """A sentencepiece piece: one raw byte, or text with marked spaces."""
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()


def _uses_byte_level(path: Path, raw: Any) -> bool:
    """Whether the file's decoder maps characters to bytes, or is sentencepiece's. Others are refused."""
    decoder = raw.get("decoder") if isinstance(raw, dict) else None
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    if "ByteLevel" in kinds:
        return True
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise InputError(f"{path}: decoder {'+'.join(map(str, kinds)) or 'none'} is neither byte-level nor sentencepiece")


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
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
