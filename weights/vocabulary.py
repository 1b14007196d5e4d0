"""Vocabularies of tokenizers, from ``tokenizer.json`` or ``tokenizer.model``, and the bytes of their tokens."""

import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from model import InputError

SPACE_MARK = "▁"  # a space in sentencepiece's pieces
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Vocabulary:
    """Vocabulary of a tokenizer file, by the tokenizers library. Names of control tokens in a text are text.

    ``special`` holds the ids of control tokens by name; ``pieces`` the bytes that each token adds to the text, none for
    a control token; ``adds_space`` says whether encoding puts a space before the text.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Read the file at ``path``; ``settings`` are those of tokenizer_config.json. Raises errors of any kind."""
        self.normalise: Callable[[str], str] = str  # the library normalises, but for sentencepiece
        if path.suffix == ".json":
            self.library = tokenizers.Tokenizer.from_file(str(path))
        else:
            self.library, self.normalise = _read_sentencepiece(path)
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = True  # as text
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        added = self.library.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        for name in sorted(_control_names(settings) & set(vocabulary) - set(self.special)):
            self.library.add_special_tokens([AddedToken(name, normalized=False)])
            self.special[name] = vocabulary[name]
        # Tokens that a fine-tune added beyond those of the file are control tokens.
        last, listed = max(vocabulary.values()), settings.get("added_tokens_decoder") or {}
        self.special |= {token_text(entry): int(number) for number, entry in listed.items() if int(number) > last}
        byte_level = b"ByteLevel" in self.library.decoder.__getstate__()
        to_bytes = _byte_level_bytes if byte_level else _piece_bytes
        self.pieces = [b""] * (1 + max(last, *self.special.values()))
        for piece in vocabulary.keys() - self.special.keys():
            self.pieces[vocabulary[piece]] = to_bytes(piece)
        self.adds_space = not byte_level and self.library.decoder.decode([SPACE_MARK + "a"]) == "a"
        # A random word, which no text contains. Added after the vocabulary was read: its id is not the model's.
        self.gap = f"\ue000{secrets.token_hex(16)}"
        self.library.add_tokens([AddedToken(self.gap, normalized=False)])
        # As in transformers, tokenizer_config.json overrides the rule of the tokenizer file.
        wants_bos = settings.get("add_bos_token")
        self.bos = self.special.get(token_text(settings.get("bos_token"))) if wants_bos else None
        self.by_file = wants_bos is None  # whether the file decides

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.encode_parts([text])

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """Token ids of texts and, given as ids, control tokens between them.

        All are encoded in one text: a text after a control token may be encoded differently from one at the beginning.
        """
        control = (part for part in parts if isinstance(part, int))
        text = "".join(self.gap if isinstance(part, int) else self.normalise(part) for part in parts)
        ids, gap = self.library.encode(text, add_special_tokens=False).ids, self.library.token_to_id(self.gap)
        return [next(control) if number == gap else number for number in ids]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text, after the beginning-of-text token where the model expects one."""
        ids = self.library.encode(self.normalise(text), add_special_tokens=self.by_file).ids
        return ids if self.bos is None else [self.bos, *ids]


def _read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, Callable[[str], str]]:
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
        rule = {"single": f"{pieces[bos]} $A", "special_tokens": [(pieces[bos], bos)]}
        tokenizer.post_processor = processors.TemplateProcessing(**rule)
    return tokenizer, library.Normalize


def byte_level_tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    """Tokenizer that splits a text into words and single digits, and encodes the bytes of each by ``model``."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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
OTHERS = sorted(set(range(256)).difference(PRINTABLE))
BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def _byte_level_bytes(piece: str) -> bytes:
    """Bytes of a piece in that alphabet; a piece with another character, such as an added token, is plain text."""
    known = all(character in BYTE_OF_CHARACTER for character in piece)
    return bytes(BYTE_OF_CHARACTER[character] for character in piece) if known else piece.encode()


def _piece_bytes(piece: str) -> bytes:
    """Bytes of a sentencepiece piece: one raw byte, or text with marked spaces."""
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()


def token_text(entry: Any) -> str:
    """Text of a token in tokenizer_config.json, which is a string or an object with a ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
