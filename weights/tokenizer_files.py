"""Tokenizer files: what they say of pieces, of control tokens and of the end of a text.

A piece is a token as the file spells it. There are two spellings. Byte-level pieces have
a character per byte. Those of sentencepiece have a mark for a space, and ``<0x0A>`` for a raw byte.
Knows nothing of texts.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from app.common.files import check_is_fetched, read_optional_json
from model.errors import InputError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# a space in the pieces of each spelling
SPACE_MARK = "▁"
BYTE_LEVEL_SPACE = "Ġ"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Byte of each character of a byte-level piece, in the alphabet of GPT-2: printable bytes are
# themselves, the others are, in order, the characters from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}


def tokenizer_file(folder: Path) -> Path:
    """Return the tokenizer file of a folder. Raises InputError where there is none."""
    for path in (folder / "tokenizer.json", folder / "tokenizer.model"):
        if path.is_file():
            check_is_fetched(path)
            return path
    raise InputError(
        f"{folder} holds no tokenizer.json and no tokenizer.model: fetch it again with one"
    )


def read_library(path: Path) -> tuple[tokenizers.Tokenizer, Callable[[str], str]]:
    """Return the tokenizer of a file, and the function that normalises a text before it.

    The tokenizer encodes the name of a control token as text. One of a ``tokenizer.json``
    normalises by itself. Raises errors of any kind for a damaged file.
    """
    if path.suffix == ".model":
        # here, since it imports this module
        from weights.sentencepiece_file import read_sentencepiece

        library, normalise = read_sentencepiece(path)
    else:
        library = tokenizers.Tokenizer.from_file(str(path))
        normalise = str
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # as text
    return library, normalise


def begin_with(control: Mapping[str, int], library: tokenizers.Tokenizer) -> None:
    """Let a text begin with these control tokens (ids by name) where the library encodes it."""
    library.post_processor = processors.TemplateProcessing(
        single=[*control, "$A"], special_tokens=[*control.items()]
    )


def byte_level_tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits a text into words and digits, and encodes their bytes by
    ``model``.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def named_tokens(settings: dict[str, Any]) -> tuple[dict[str, str], dict[int, AddedToken]]:
    """Return the names of tokens by role, and control tokens by id, from tokenizer_config.json.

    Raises errors of several kinds for a form that transformers does not write.
    """
    given = {role: settings.get(role) or "" for role in NAMED_TOKENS}
    names = {  # AddedToken raises TypeError for what is no text
        role: AddedToken(name["content"] if isinstance(name, dict) else name).content
        for role, name in given.items()
    }
    listed = {
        int(number): AddedToken(**entry)
        for number, entry in (settings.get("added_tokens_decoder") or {}).items()
        if entry["special"]
    }
    return names, listed


def ending_ids(folder: Path, named: int | None) -> frozenset[int]:
    """Return the ids that end a text: those of generation_config.json, or else of config.json, or
    else the ``named`` one. An empty list is none. Raises InputError for what is no id.
    """
    for path in (folder / "generation_config.json", folder / "config.json"):
        found = read_optional_json(path).get("eos_token_id")
        if found is not None and found != []:
            ids = found if isinstance(found, list) else [found]
            if not all(type(each) is int and each >= 0 for each in ids):
                raise InputError(
                    f"{path}: eos_token_id must be a token id or a list of them, found"
                    f" {found!r:.80}"
                )
            return frozenset(ids)
    return frozenset() if named is None else frozenset({named})


def control_tokens(
    library: tokenizers.Tokenizer,
    vocabulary: Mapping[str, int],
    listed: Mapping[int, AddedToken],
    names: Iterable[str],
) -> dict[str, int]:
    """Return the ids of control tokens by name: those of the tokenizer file, those that
    tokenizer_config.json has ``listed`` with ids, and those that it only names.

    The settings' tokens that are in the file's vocabulary become control tokens of the library
    too. The ids of the others are beyond the vocabulary.
    """
    own = {
        token.content: number
        for number, token in library.get_added_tokens_decoder().items()
        if token.special
    }
    given = {token.content: number for number, token in listed.items()}
    more = {*given, *names} & (vocabulary.keys() - own.keys())
    library.add_special_tokens([AddedToken(each, normalized=False) for each in sorted(more)])
    return {**given, **{each: vocabulary[each] for each in more}, **own}


def pieces_of(
    vocabulary: Mapping[str, int],
    added: Container[int],
    special: Mapping[str, int],
    is_byte_level: bool,
) -> list[bytes]:
    """Return the bytes of each token by its id: none for control tokens and for ids without a
    token.
    """
    pieces = [b""] * (1 + max(*vocabulary.values(), *special.values()))
    for piece in vocabulary.keys() - special.keys():
        number = vocabulary[piece]
        if not is_byte_level:
            pieces[number] = sentencepiece_bytes(piece)
        elif number in added:  # as plain text
            pieces[number] = piece.encode()
        else:
            pieces[number] = bytes(BYTE_OF_CHARACTER[character] for character in piece)
    return pieces


def sentencepiece_bytes(piece: str) -> bytes:
    """Return the bytes of a piece in sentencepiece's spelling."""
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()
