"""Sentencepiece's ``tokenizer.model``, read into the tokenizers library.

Knows nothing of the other files of a folder. Only folders without a ``tokenizer.json`` need it.
"""

from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models

from model.errors import InputError
from weights.tokenizer_files import SPACE_MARK, begin_with


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
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=pieces[source.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = source.DecodePieces([SPACE_MARK + "a"]) == "a"
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", int(adds_space), 0),
        ]
    )
    library.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    library.add_tokens([AddedToken(piece, normalized=False) for piece in whole])
    if (bos := source.bos_id()) >= 0:
        begin_with({pieces[bos]: bos}, library)
    return library, source.Normalize
