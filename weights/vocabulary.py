"""Vocabularies of tokenizers, from ``tokenizer.json`` or ``tokenizer.model``, and the bytes of their tokens.

Both kinds have these attributes: ``special``, the ids of control tokens by name; ``pieces``, the bytes that each token
adds to the text, none for a control token; and ``adds_space``, whether encoding puts a space before the text.

Both have these methods: ``encode`` for a text, in which names of control tokens are text; ``encode_parts`` for parts of
a conversation, with control tokens given as ids; and ``encode_prompt`` for a text after the beginning-of-text token,
where the model expects one.
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
PRIVATE_USE = range(0xE000, 0xF900)  # characters without a meaning, which can stand for the name of a control token


class JsonVocabulary:
    """Vocabulary of a ``tokenizer.json``, by the tokenizers library."""

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
        # A random word, which no text contains. Added after the vocabulary was read: its id is not the model's.
        self.gap = f"\ue000{secrets.token_hex(16)}"
        self.library.add_tokens([tokenizers.AddedToken(self.gap, normalized=False)])
        # As in transformers, tokenizer_config.json overrides the rule of tokenizer.json.
        wants_bos = settings.get("add_bos_token")
        self.bos = self.special.get(token_text(settings.get("bos_token"))) if wants_bos else None
        self.by_file = wants_bos is None  # whether tokenizer.json decides

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """All parts in one text: a part after a control token may be encoded differently from one at the beginning."""
        control = (part for part in parts if isinstance(part, int))
        ids = self.encode("".join(self.gap if isinstance(part, int) else part for part in parts))
        gap = self.library.token_to_id(self.gap)
        return [next(control) if number == gap else number for number in ids]

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.library.encode(text, add_special_tokens=self.by_file).ids
        return ids if self.bos is None else [self.bos, *ids]


class SentencePieceVocabulary:
    """Vocabulary of a ``tokenizer.model``, by the sentencepiece library."""

    file_name = "tokenizer.model"

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.library = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        pieces = [self.library.IdToPiece(number) for number in range(self.library.GetPieceSize())]
        marked = _control_names(settings)
        control = [self.library.IsControl(number) or self.library.IsUnknown(number) for number in range(len(pieces))]
        self.special = {piece: n for n, piece in enumerate(pieces) if control[n] or piece in marked}
        # Control tokens that are words to sentencepiece, which would find them in any text.
        self.found_in_text = [piece for n, piece in enumerate(pieces) if piece in marked and not control[n]]
        self.pieces = [b"" if piece in self.special else _piece_bytes(piece) for piece in pieces]
        # Tokens that a fine-tune added after those of tokenizer.model are control tokens.
        added = read_optional_json(path.with_name("added_tokens.json"))
        listed = settings.get("added_tokens_decoder") or {}
        added |= {token_text(entry): int(number) for number, entry in listed.items()}
        self.special |= {name: number for name, number in added.items() if number >= len(pieces)}
        self.pieces += [b""] * (1 + max(self.special.values(), default=0) - len(pieces))
        self.adds_space = self.library.DecodePieces([SPACE_MARK + "a"]) == "a"
        self.bos = self.library.bos_id() if settings.get("add_bos_token", True) else -1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. An unused character in each name that sentencepiece would find breaks the name up.

        Sentencepiece spells that character in bytes, which are removed afterwards.
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
    """Names of all control tokens in tokenizer_config.json."""
    named = [settings.get(key) for key in NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        named += settings.get(key) or ()
    named += [entry for entry in (settings.get("added_tokens_decoder") or {}).values() if entry["special"]]
    return {text for text in map(token_text, named) if text}


# Byte of each character of a byte-level piece, in the alphabet of GPT-2: printable bytes are themselves, the others
# are, in order, the characters from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def _byte_level_bytes(piece: str) -> bytes:
    """Bytes of a piece in that alphabet; a piece with another character, such as an added token, is plain text."""
    known = all(character in BYTE_OF_CHARACTER for character in piece)
    return bytes(BYTE_OF_CHARACTER[character] for character in piece) if known else piece.encode()


def _piece_bytes(piece: str) -> bytes:
    """Bytes of a sentencepiece piece: one raw byte, or text with marked spaces."""
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()


def _uses_byte_level(path: Path, decoder: tokenizers.decoders.Decoder | None) -> bool:
    """Whether the decoder is byte-level rather than sentencepiece's. Raises InputError for any other kind."""
    kinds = set() if decoder is None else set(re.findall(r'"type":"(\w+)"', decoder.__getstate__().decode()))
    if "ByteLevel" not in kinds and (not kinds or not kinds <= SENTENCEPIECE_DECODERS):
        raise InputError(f"{path}: decoder {kinds or 'none'} is neither byte-level nor sentencepiece")
    return "ByteLevel" in kinds


def split_at(names: Iterable[str], text: str) -> list[str]:
    """Parts of a text that is split before and after each name; of overlapping names the longest counts."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if longest_first else [text]


def token_text(entry: Any) -> str:
    """Text of a token in tokenizer_config.json, which is a string or an object with a ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
