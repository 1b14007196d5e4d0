"""Separate draft models, which must share the target's vocabulary."""

from __future__ import annotations

from pathlib import Path

from model import Decoder, InputError
from model.fast import accelerate
from weights.load import load_model, read_config
from weights.tokenizer import Tokenizer
from weights.vocabulary import Vocabulary


def load_draft_model(folder: Path, target: Decoder, vocabulary: Vocabulary, positions: int) -> Decoder:
    """Draft model for ``target``, loaded from ``folder`` in the target's dtype, on its device.

    ``vocabulary`` is the target's, ``positions`` the longest text in tokens. Raises InputError, before any weight is
    read, unless the vocabularies are equal and the text fits the draft model's context.
    """
    config, theirs = read_config(folder), Tokenizer(folder).vocabulary
    same = (vocabulary.pieces, vocabulary.special) == (theirs.pieces, theirs.special)
    if config.vocab_size != target.vocab_size or not same:
        raise InputError(
            f"{folder} has another vocabulary ({config.vocab_size} entries) than the target "
            f"({target.vocab_size}): a draft model must share the target's tokenizer"
        )
    if config.max_positions < positions:
        raise InputError(
            f"{folder} has a context of {config.max_positions} tokens, this text may take {positions}: "
            "lower --max-new-tokens"
        )
    return accelerate(load_model(folder, target.dtype, target.device))
