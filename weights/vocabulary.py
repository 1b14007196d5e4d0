"""The vocabularies behind a tokenizer: ``tokenizer.json`` and ``tokenizer.model``, and the bytes of their tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from model import InputError
from weights.cli.files import read_json, read_optional_json

SPACE_MARK = "▁"  # sentencepiece writes a space so
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MOST_TOKENS = 2**24  # more than any published vocabulary; keeps a damaged file from asking for a billion
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Characters that no text means anything by, to hold the place of what must not be read as a control token.
PRIVATE_USE = range(0xE000, 0xF900)


class Vocabulary(Protocol):
    """What a tokenizer library must supply."""

    special: dict[str, int]  # control tokens by name; they are not text
    pieces: list[bytes]  # the bytes each token adds to the text; b"" for control tokens
    adds_space: bool  # whether encode puts a space before the text, which is none of the text's

    def encode(self, text: str, *, parse_special: bool) -> list[int]: ...

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """Control tokens by their ids, and between them texts, in which the names of control tokens are text."""

    def encode_prompt(self, text: str) -> list[int]: ...


class JsonVocabulary:
    """A ``tokenizer.json``, through the tokenizers library."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        raw = read_json(path)
        try:
            self.library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every fault of the file
            raise InputError(f"{path} is not a tokenizer that can be read: {first_line(error)}") from None
        byte_level = _uses_byte_level(path, raw)
        self.library.no_truncation()
        self.library.no_padding()
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        size = 1 + max(vocabulary.values(), default=-1)
        if size > MOST_TOKENS:
            raise InputError(f"{path} holds token id {size - 1}, which no model has")
        added = self.library.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        for name in sorted(_control_names(settings) & set(vocabulary) - set(self.special)):
            self.library.add_special_tokens([tokenizers.AddedToken(name, normalized=False)])
            self.special[name] = vocabulary[name]
        to_bytes = _byte_level_bytes if byte_level else _piece_bytes
        self.pieces = [b""] * size
        for piece, number in vocabulary.items():
            self.pieces[number] = b"" if piece in self.special else to_bytes(piece)
        self.adds_space = not byte_level and self.library.decoder.decode([SPACE_MARK + "a"]) == "a"
        # A word that nobody can type. Added after the vocabulary was read: its id is none of the model's.
        self.gap = f"\ue000{secrets.token_hex(16)}"
        self.library.add_tokens([tokenizers.AddedToken(self.gap, normalized=False)])
        # transformers lets tokenizer_config.json overrule the file's own rule.
        wants_bos = settings.get("add_bos_token")
        self.bos = self.special.get(token_text(settings.get("bos_token"))) if wants_bos else None
        self.own_rule = wants_bos is None

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        self.library.encode_special_tokens = not parse_special
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """All at once: a text that follows a control token may be coded differently from one that begins the whole."""
        control = (part for part in parts if isinstance(part, int))
        ids = self.encode("".join(self.gap if isinstance(part, int) else part for part in parts), parse_special=False)
        gap = self.library.token_to_id(self.gap)
        return [next(control) if number == gap else number for number in ids]

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
            pieces = [self.library.IdToPiece(number) for number in range(self.library.GetPieceSize())]
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a sentencepiece model: {first_line(error)}") from None
        marked = _control_names(settings)
        control = [self.library.IsControl(number) or self.library.IsUnknown(number) for number in range(len(pieces))]
        self.special = {piece: n for n, piece in enumerate(pieces) if control[n] or piece in marked}
        # Those that sentencepiece would find in any text, since to it they are words.
        self.found_in_text = [piece for n, piece in enumerate(pieces) if piece in marked and not control[n]]
        self.pieces = [b"" if piece in self.special else _piece_bytes(piece) for piece in pieces]
        for name, number in _added_after(path, settings, len(pieces)).items():
            self.special[name] = number
            self.pieces += [b""] * (number + 1 - len(self.pieces))
        self.adds_space = self.library.DecodePieces([SPACE_MARK + "a"]) == "a"
        self.bos = self.library.bos_id() if settings.get("add_bos_token", True) else -1

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        if not parse_special:
            return self._encode_text(text)
        return self.encode_parts([self.special.get(part, part) for part in split_at(self.special, text)])

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        return [number for part in parts for number in ([part] if isinstance(part, int) else self._encode_text(part))]

    def encode_prompt(self, text: str) -> list[int]:
        ids = self._encode_text(text)
        return ids if self.bos < 0 else [self.bos, *ids]

    def _encode_text(self, text: str) -> list[int]:
        """Ids of a text in which the names of control tokens are text.

        Names that sentencepiece would find are broken up by a character that it must spell in bytes; these
        are taken out again.
        """
        names = [name for name in self.found_in_text if name in text]
        if not names:
            return self.library.EncodeAsIds(text)
        breaker = next(chr(code) for code in reversed(PRIVATE_USE) if chr(code) not in text)
        inside = re.compile("|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names))
        ids = self.library.EncodeAsIds(inside.sub(breaker, text))
        spelled = [self.library.PieceToId(f"<0x{byte:02X}>") for byte in breaker.encode()]
        kept: list[int] = []
        for number in ids:
            kept.append(number)
            if kept[-len(spelled) :] == spelled:
                del kept[-len(spelled) :]
        return kept


def _control_names(settings: dict[str, Any]) -> set[str]:
    """Every token that tokenizer_config.json calls a control token."""
    named = [settings.get(key) for key in NAMED_TOKENS]
    more = [settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    named += [entry for entries in more if isinstance(entries, list) for entry in entries]
    listed = settings.get("added_tokens_decoder")
    listed = listed.values() if isinstance(listed, dict) else ()
    named += [entry for entry in listed if isinstance(entry, dict) and entry.get("special") is True]
    return {text for text in map(token_text, named) if text}


def _added_after(path: Path, settings: dict[str, Any], size: int) -> dict[str, int]:
    """Tokens that a fine-tune has added after the ``size`` of tokenizer.model: all taken for control tokens."""
    listed = settings.get("added_tokens_decoder")
    named = dict(read_optional_json(path.with_name("added_tokens.json")))
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        named[token_text(entry)] = int(number) if number.isdecimal() else number
    for name, number in named.items():
        if type(number) is not int or not 0 <= number < MOST_TOKENS:
            raise InputError(f"{path.parent}: added token {name!r:.80} has id {number!r:.80}, which no model has")
    return {name: number for name, number in named.items() if number >= size and name}


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level piece: printable ones stand for themselves, the
    others, in order, for the characters from U+0100 on (the alphabet GPT-2 introduced)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    """A piece in that alphabet; one with a character outside it, such as an added token, is plain text."""
    if all(character in BYTE_OF_CHARACTER for character in piece):
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    return piece.encode()


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


def split_at(names: Iterable[str], text: str) -> list[str]:
    """The text cut before and after each of the names, the longest first where one holds another."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if longest_first else [text]


def token_text(entry: Any) -> str:
    """tokenizer_config.json names a token by its text, or by an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
