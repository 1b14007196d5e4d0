"""Vocabularies behind a tokenizer: ``tokenizer.json`` and ``tokenizer.model``, and the bytes of their tokens.

Both kinds have ``special``, the control tokens by name; ``pieces``, the bytes that each token adds to the text, none
for a control token; and ``adds_space``, whether encoding puts a space before the text. They encode a text, in which
names of control tokens are text; the parts of a conversation, control tokens given as ids; and a prompt, after the
beginning-of-text token where the model expects one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from model import InputError
from weights.cli.files import read_optional_json

SPACE_MARK = "▁"  # a space in sentencepiece's pieces
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SENTENCEPIECE_DECODERS = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
PRIVATE_USE = range(0xE000, 0xF900)  # characters without a meaning, to stand for a control token's name


class JsonVocabulary:
    """A ``tokenizer.json``, through the tokenizers library."""

    file_name = "tokenizer.json"

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.library = tokenizers.Tokenizer.from_file(str(path))
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = True  # as text
        byte_level = _uses_byte_level(path, self.library.decoder)
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        added = self.library.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        for name in sorted(_control_names(settings) & set(vocabulary) - set(self.special)):
            self.library.add_special_tokens([tokenizers.AddedToken(name, normalized=False)])
            self.special[name] = vocabulary[name]
        to_bytes = _byte_level_bytes if byte_level else _piece_bytes
        self.pieces = [b""] * (1 + max(vocabulary.values()))
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

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """All at once: a text that follows a control token may be coded differently from one that begins the whole."""
        control = (part for part in parts if isinstance(part, int))
        ids = self.encode("".join(self.gap if isinstance(part, int) else part for part in parts))
        gap = self.library.token_to_id(self.gap)
        return [next(control) if number == gap else number for number in ids]

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.library.encode(text, add_special_tokens=self.own_rule).ids
        return ids if self.bos is None else [self.bos, *ids]


class SentencePieceVocabulary:
    """A ``tokenizer.model``, through the sentencepiece library."""

    file_name = "tokenizer.model"

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.library = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        pieces = [self.library.IdToPiece(number) for number in range(self.library.GetPieceSize())]
        marked = _control_names(settings)
        control = [self.library.IsControl(number) or self.library.IsUnknown(number) for number in range(len(pieces))]
        self.special = {piece: n for n, piece in enumerate(pieces) if control[n] or piece in marked}
        # Those that sentencepiece would find in any text, since to it they are words.
        self.found_in_text = [piece for n, piece in enumerate(pieces) if piece in marked and not control[n]]
        self.pieces = [b"" if piece in self.special else _piece_bytes(piece) for piece in pieces]
        # Tokens that a fine-tune has added after those of tokenizer.model are all taken for control tokens.
        added = read_optional_json(path.with_name("added_tokens.json"))
        listed = settings.get("added_tokens_decoder") or {}
        added |= {token_text(entry): int(number) for number, entry in listed.items()}
        self.special |= {name: number for name, number in added.items() if number >= len(pieces)}
        self.pieces += [b""] * (1 + max(self.special.values(), default=0) - len(pieces))
        self.adds_space = self.library.DecodePieces([SPACE_MARK + "a"]) == "a"
        self.bos = self.library.bos_id() if settings.get("add_bos_token", True) else -1

    def encode(self, text: str) -> list[int]:
        """Names that sentencepiece would find are broken up by a character that it must spell in bytes; these are
        taken out again.
        """
        names = [name for name in self.found_in_text if name in text]
        if not names:
            return self.library.EncodeAsIds(text)
        breaker = next(chr(code) for code in reversed(PRIVATE_USE) if chr(code) not in text)
        inside = re.compile("|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names))
        spelled = [self.library.PieceToId(f"<0x{byte:02X}>") for byte in breaker.encode()]
        kept: list[int] = []
        for number in self.library.EncodeAsIds(inside.sub(breaker, text)):
            kept.append(number)
            if kept[-len(spelled) :] == spelled:
                del kept[-len(spelled) :]
        return kept

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        return [number for part in parts for number in ([part] if isinstance(part, int) else self.encode(part))]

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.encode(text)
        return ids if self.bos < 0 else [self.bos, *ids]


Vocabulary = JsonVocabulary | SentencePieceVocabulary


def _control_names(settings: dict[str, Any]) -> set[str]:
    """Every token that tokenizer_config.json calls a control token."""
    named = [settings.get(key) for key in NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        named += settings.get(key) or ()
    named += [entry for entry in (settings.get("added_tokens_decoder") or {}).values() if entry["special"]]
    return {text for text in map(token_text, named) if text}


# The byte behind each character of a byte-level piece: printable ones stand for themselves, the others, in order, for
# the characters from U+0100 on (the alphabet GPT-2 introduced).
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def _byte_level_bytes(piece: str) -> bytes:
    """Bytes of a piece in that alphabet; one with a character outside it, such as an added token, is plain text."""
    known = all(character in BYTE_OF_CHARACTER for character in piece)
    return bytes(BYTE_OF_CHARACTER[character] for character in piece) if known else piece.encode()


def _piece_bytes(piece: str) -> bytes:
    """Bytes of a sentencepiece piece: one raw byte, or text with marked spaces."""
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()


def _uses_byte_level(path: Path, decoder: tokenizers.decoders.Decoder | None) -> bool:
    """Whether the decoder maps characters to bytes, or is sentencepiece's. Raises InputError for any other."""
    kinds = set() if decoder is None else set(re.findall(r'"type":"(\w+)"', decoder.__getstate__().decode()))
    if "ByteLevel" not in kinds and (not kinds or not kinds <= SENTENCEPIECE_DECODERS):
        raise InputError(f"{path}: decoder {kinds or 'none'} is neither byte-level nor sentencepiece")
    return "ByteLevel" in kinds


def split_at(names: Iterable[str], text: str) -> list[str]:
    """The text cut before and after each of the names, the longest first where one holds another."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if longest_first else [text]


def token_text(entry: Any) -> str:
    """A token of tokenizer_config.json, which names it by its text or by an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
