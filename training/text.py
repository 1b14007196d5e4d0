"""Training text: documents from files, a tokenizer trained on them, and rows of token ids."""

import zlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import models, pre_tokenizers, trainers
from torch import Tensor

from app.common.files import read_json_lines, write_json
from model.errors import InputError
from weights.tokenizer import Tokenizer
from weights.tokenizer_files import begin_with, byte_level_tokenizer

HELD_OUT_ONE_IN = 50  # documents
BEGIN = "<s>"  # id 0
END = "</s>"  # id 1
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BEGIN,
    "eos_token": END,
    # A turn is its text and an empty line, as read_documents joins a prompt and its response.
    "chat_template": (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\\n\\n' }}{%"
        " endfor %}"
    ),
}


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Return the documents of files; a line is an object of JSON with ``text``, or with ``prompt``
    and ``response``.

    Raises InputError with file and line for unreadable input.
    """
    documents: list[str] = []
    for path in paths:
        for place, row in read_json_lines(path):
            match row:
                case {"text": str(text)}:
                    documents.append(text)
                case {"prompt": str(prompt), "response": str(response)}:
                    documents.append(f"{prompt.strip()}\n\n{response.strip()}")
                case _:
                    raise InputError(
                        f'{place} needs "text", or "prompt" and "response", each a string'
                    )
    return [document for document in documents if document.strip()]


def train_tokenizer(documents: Sequence[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer of up to ``vocab_size`` tokens, at least 258, and write it
    into ``folder``.

    It can encode any text: its first tokens are the control tokens and all bytes. A short text
    supports fewer tokens.
    """
    tokenizer = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    begin_with({BEGIN: 0}, tokenizer)
    write_json(folder / "tokenizer_config.json", TOKENIZER_SETTINGS)
    # transformers ends a text by the ids of this file
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    tokenizer.save(str(folder / "tokenizer.json"))


class Rows:
    """Rows of ``width`` tokens from token ids ``[n]``, n >= width. An id of ``ending`` ends a
    document. ``checksum`` is that of the token ids.

    A row begins where a document does, so that no response is trained on without its prompt, or a
    multiple of ``width`` - 1 tokens later in a longer document. It continues into the next
    document.
    """

    def __init__(self, tokens: np.ndarray, ending: Sequence[int], width: int) -> None:
        begins = [0, *(np.flatnonzero(np.isin(tokens, ending)) + 1).tolist(), len(tokens)]
        starts = np.concatenate([np.arange(*pair, width - 1) for pair in pairwise(begins)])
        self.starts = torch.from_numpy(starts[starts <= len(tokens) - width])
        self.windows = torch.from_numpy(tokens).unfold(0, width, 1)  # from every token on: a view
        self.checksum = f"{zlib.crc32(tokens):08x}"

    def pick(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return random rows, ``[rows, width]`` int64."""
        picked = torch.randint(len(self.starts), (rows,), generator=generator)
        return self.windows[self.starts[picked]].long()


def rows_of(documents: Sequence[str], tokenizer: Tokenizer, context: int) -> tuple[Rows, Rows]:
    """Return the rows of ``context`` + 1 tokens: of the documents to train on, and of the held-out
    documents.

    Raises InputError for too little text.
    """
    ending = sorted(tokenizer.eos_ids)[:1]
    train = array("i")
    held_out = array("i")
    for document in documents:
        # by its text alone, so that a document is held out from every run
        ids = train if zlib.crc32(document.encode()) % HELD_OUT_ONE_IN else held_out
        ids.extend(tokenizer.encode(document) + ending)
    if min(len(train), len(held_out)) <= context:
        raise InputError(
            f"{len(set(documents))} different documents, with {len(train)} tokens to train on and"
            f" {len(held_out)} held out, are too few for --context {context}: give at least"
            f" {4 * HELD_OUT_ONE_IN} documents, or lower it"
        )
    return tuple(Rows(np.asarray(ids), ending, context + 1) for ids in (train, held_out))
