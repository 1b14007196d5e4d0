"""Vocabularies of tokenizers: reading of ``tokenizer.model``, byte-level encoding, and the bytes of a piece."""

import re
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from model import InputError

SPACE_MARK = "▁"  # a space in sentencepiece's pieces
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Byte of each character of a byte-level piece, in the alphabet of GPT-2: printable bytes are themselves, the others
# are, in order, the characters from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = sorted(set(range(256)).difference(PRINTABLE))
BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, Callable[[str], str]]:
    """Byte-pair encoding of a ``tokenizer.model``, and its normalisation of a text. Raises InputError for a unigram.

    A piece is merged from any two pieces, the higher its score the earlier. User-defined pieces are found before any
    merge: they score 0, and stay whole under a dropout of 1, by which sentencepiece leaves all merges out.
    """
    library = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    pieces = [library.IdToPiece(number) for number in range(library.GetPieceSize())]
    control = [piece for n, piece in enumerate(pieces) if library.IsControl(n) or library.IsUnknown(n)]
    ranks = {piece: -library.GetScore(n) for n, piece in enumerate(pieces) if not library.IsByte(n)}
    if any(rank % 1 for rank in ranks.values()):
        raise InputError(f"{path} is no byte-pair encoding: no other kind is read")
    whole = [each for each, rank in ranks.items() if rank == 0 and each in library.SampleEncodeAsPieces(each, -1, 1.0)]
    words = {piece: ranks[piece] for piece in ranks.keys() - {*whole, *control}}
    splits = ((rank, word[:cut], word[cut:]) for word, rank in words.items() for cut in range(1, len(word)))
    merges = [(left, right) for _, left, right in sorted(splits) if left in words and right in words]
    ids, unknown = {piece: number for number, piece in enumerate(pieces)}, pieces[library.unk_id()]
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    adds_space = library.DecodePieces([SPACE_MARK + "a"]) == "a"
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always" if adds_space else "never")
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in whole])
    if (bos := library.bos_id()) >= 0:
        first = [(pieces[bos], bos)]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{pieces[bos]} $A", special_tokens=first)
    return tokenizer, library.Normalize


def byte_level_tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    """Tokenizer that splits a text into words and single digits, and encodes the bytes of each by ``model``."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """Bytes of a piece: in that alphabet where the tokenizer is byte-level, else by the rules of sentencepiece.

    Another character, as in an added token, makes a piece plain text. Sentencepiece marks spaces, and writes a raw byte
    as ``<0x0A>``.
    """
    if byte_level:
        known = all(character in BYTE_OF_CHARACTER for character in piece)
        return bytes(BYTE_OF_CHARACTER[character] for character in piece) if known else piece.encode()
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()
