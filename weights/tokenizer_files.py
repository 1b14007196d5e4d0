"""Tokenizer files: two kinds, read into the tokenizers library, and the bytes of their pieces.

``tokenizer.json`` is the library's own file, ``tokenizer.model`` sentencepiece's. Others say which
tokens are control tokens and which end a text. A piece is a token as the file spells it. A third
kind of pieces is a class like ``ByteLevel`` and ``Sentencepiece``, with a place in ``SPELLINGS``.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from app.common.files import check_is_fetched, read_optional_json
from model.errors import InputError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# of an added token: whether blanks before and after belong to it, and whether it may touch letters
FLAGS = ("lstrip", "rstrip", "single_word")
SPACE_MARK = "▁"  # a space in sentencepiece's pieces
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Byte of each character of a byte-level piece, in the alphabet of GPT-2: printable bytes are
# themselves, the others are, in order, the characters from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}


class ByteLevel:
    """Pieces with a character per byte. An added token is plain text."""

    space = "Ġ"

    def bytes_of(self, piece: str, is_added: bool) -> bytes:
        """Return the bytes of a piece."""
        if is_added:
            return piece.encode()
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)

    def encode_continuation(self, library: tokenizers.Tokenizer, text: str) -> list[int]:
        """Return the token ids of a text that continues another one, with nothing before it."""
        return library.encode(text, add_special_tokens=False).ids


class Sentencepiece:
    """Pieces with a mark for a space, and with ``<0x0A>`` for a raw byte."""

    space = SPACE_MARK

    def bytes_of(self, piece: str, is_added: bool) -> bytes:
        """Return the bytes of a piece, by the same rules for an added token."""
        byte = BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()

    def encode_continuation(self, library: tokenizers.Tokenizer, text: str) -> list[int]:
        """Return the token ids of a text that continues another one, with nothing before it."""
        return [piece.id for piece in library.model.tokenize(text.replace(" ", SPACE_MARK))]


Spelling = ByteLevel | Sentencepiece
SPELLINGS: tuple[Spelling, ...] = (ByteLevel(), Sentencepiece())


def spelling_of(decoder: Any) -> Spelling:
    """Return the spelling whose space a decoder reads, or else the last one: the caller compares a
    text.
    """
    fitting = (each for each in SPELLINGS if decoder.decode(["a", each.space]) == "a ")
    return next(fitting, SPELLINGS[-1])


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

    Sentencepiece's normalisation is such a function; the other kind normalises by itself. The
    tokenizer encodes the name of a control token as text. Raises errors of any kind.
    """
    library, normalise = (
        (tokenizers.Tokenizer.from_file(str(path)), str)
        if path.suffix == ".json"
        else read_sentencepiece(path)
    )
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # as text
    return library, normalise


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, Callable[[str], str]]:
    """Return the byte-pair encoding of a ``tokenizer.model``, and its normalisation of a text.
    Raises InputError for a unigram model.

    The file has a score per piece in place of merges. A piece is merged from any two pieces, and
    pieces of higher scores earlier. User-defined pieces are found before any merge: those of score
    0 that sentencepiece keeps whole under a dropout of 1, which allows no merge.
    """
    source = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    pieces = [source.IdToPiece(number) for number in range(source.GetPieceSize())]
    control = [
        piece for n, piece in enumerate(pieces) if source.IsControl(n) or source.IsUnknown(n)
    ]
    ranks = {
        piece: -source.GetScore(n)
        for n, piece in enumerate(pieces)
        if piece not in control and not source.IsByte(n)
    }
    if any(rank % 1 for rank in ranks.values()):
        raise InputError(f"{path} is no byte-pair encoding: give the model a tokenizer.json")
    whole = [
        each
        for each, rank in ranks.items()
        if rank == 0 and each in source.SampleEncodeAsPieces(each, -1, 1.0)
    ]
    words = ranks.keys() - {*whole}
    merges = [
        (word[:cut], word[cut:])
        for word in sorted(words, key=lambda word: (ranks[word], word))
        for cut in range(1, len(word))
        if word[:cut] in words and word[cut:] in words
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            merges,
            unk_token=pieces[source.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = source.DecodePieces([SPACE_MARK + "a"]) == "a"
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", int(adds_space), 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in whole])
    if (bos := source.bos_id()) >= 0:
        begin_with({pieces[bos]: bos}, tokenizer)
    return tokenizer, source.Normalize


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
    names = {
        role: name["content"] if isinstance(name, dict) else name for role, name in given.items()
    }
    listed = {
        int(number): AddedToken(
            entry["content"], special=True, **{flag: entry.get(flag, False) for flag in FLAGS}
        )
        for number, entry in (settings.get("added_tokens_decoder") or {}).items()
        if entry["special"]
    }
    return names, listed


def ending_ids(folder: Path, named: frozenset[int]) -> frozenset[int]:
    """Return the ids that end a text: those of generation_config.json, or else of config.json, or
    else the ``named`` ones. An empty list is none. Raises InputError for what is no id.
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
    return named


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
    more = {*given, *names} & vocabulary.keys() - own.keys()
    library.add_special_tokens([AddedToken(each, normalized=False) for each in sorted(more)])
    return {**given, **{each: vocabulary[each] for each in more}, **own}


def pieces_of(
    vocabulary: Mapping[str, int],
    added: Container[int],
    special: Mapping[str, int],
    spelling: Spelling,
) -> list[bytes]:
    """Return the bytes of each token by its id: none for control tokens and for ids without a
    token.
    """
    pieces = [b""] * (1 + max(*vocabulary.values(), *special.values()))
    for piece in vocabulary.keys() - special.keys():
        number = vocabulary[piece]
        pieces[number] = spelling.bytes_of(piece, number in added)
    return pieces
