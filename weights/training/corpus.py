"""Text files -> a tokenizer, and a memory-mapped file of token ids to train on."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from torch import Tensor

from model import InputError
from weights.cli.files import atomic_path, one_line, read_optional_json, write_json
from weights.tokenizer import Tokenizer

PIECE_CHARACTERS = 4000  # a .txt file is cut at line ends into documents of about this length
LINE_CHARACTERS = 1 << 18  # a tokenizer learns from a longer line in parts: sentencepiece would leave it out
HELD_OUT_SHARE = 50  # one document in so many is held out
TOKEN_FILES = TRAIN, HELD_OUT, INDEX = "train.bin", "held_out.bin", "tokens.json"
BOS, EOS = "<s>", "</s>"
# A turn is its text and an empty line: what read_documents makes of a prompt and its response.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\\n\\n' }}{% endfor %}"


SENTENCE_END = re.compile(r"[.!?][\"'”’)]*(?=\s|$)")


def read_documents(paths: Sequence[Path]) -> list[str]:
    """The documents of ``.txt`` and ``.jsonl`` files; a jsonl line holds ``text``, or ``prompt`` and ``response``.

    A line may say ``"finished": false``: its text was cut off, and is cut back to its last whole sentence. Raises
    InputError naming file and line for what cannot be read, and when there is no text at all.
    """
    documents = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read as UTF-8 text: {one_line(error)}") from None
        if path.suffix == ".jsonl":
            lines = enumerate(text.split("\n"), start=1)  # splitlines would cut at U+2028 too
            found = [_parse_line(f"{path}, line {number}", line) for number, line in lines if line.strip()]
        elif path.suffix == ".txt":
            found = list(_pieces(text))
        else:
            raise InputError(f"{path} is neither .txt nor .jsonl")
        documents += [document for document in found if document.strip()]
    if not documents:
        raise InputError(f"{', '.join(map(str, paths)) or 'the data'}: there is no text to train on")
    return documents


def _parse_line(place: str, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not valid JSON: {one_line(error)}") from None
    fields = [row.get(key) for key in ("text", "prompt", "response")] if isinstance(row, dict) else [None] * 3
    finished = isinstance(row, dict) and row.get("finished", True) is not False
    match fields:
        case [str(text), _, _]:
            text = text if finished else _whole_sentences(text)
        case [_, str(prompt), str(response)]:
            text = f"{prompt.strip()}\n\n{(response if finished else _whole_sentences(response)).strip()}"
        case _:
            raise InputError(f'{place} needs "text", or "prompt" and "response", each a string')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{place} holds half of a surrogate pair, which is no text") from None
    return text


def _whole_sentences(text: str) -> str:
    """A text that was cut off, up to the end of its last whole sentence; all of it if there is none."""
    *_, last = 0, *(match.end() for match in SENTENCE_END.finditer(text))
    return text[: last or None]


def _pieces(text: str) -> Iterator[str]:
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE_CHARACTERS:
            yield piece
            piece = ""
    yield piece


def _is_held_out(document: str) -> bool:
    """It depends on the text alone, so more data moves no document from one side to the other."""
    return zlib.crc32(document.encode()) % HELD_OUT_SHARE == 0


def check_held_out(documents: Sequence[str]) -> None:
    """Raises InputError when all documents, or none, would be held out."""
    if len({_is_held_out(document) for document in documents}) < 2:
        different = len(set(documents))
        duplicates = f", {len(documents) - different} more are duplicates of them" * (different < len(documents))
        raise InputError(
            f"too few different documents to hold one in {HELD_OUT_SHARE} out: there are {different}{duplicates}; "
            "add other text"
        )


def train_tokenizer(documents: Sequence[str], vocab_size: int, folder: Path) -> None:
    """Learn ``vocab_size`` sentencepiece BPE tokens, every byte among them, and write a tokenizer into ``folder``.

    Any text can be encoded: a rare character falls back to its bytes, as in Llama 2. Where the documents support
    fewer tokens, so many are learnt, and a line on standard error says so. Raises InputError when the size is too
    small or nothing can be learnt, OSError when the folder cannot be written.
    """
    lines = [
        line[start : start + LINE_CHARACTERS]
        for document in documents
        for line in document.splitlines()
        for start in range(0, len(line), LINE_CHARACTERS)
    ]
    try:
        learned = _learn(lines, vocab_size)
    except InputError as error:
        most = re.search(r"give at most (\d+)", str(error))
        if most is None:
            raise
        print(f"{error}: learning {most[1]}", file=sys.stderr)
        learned = _learn(lines, int(most[1]))
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": True,  # transformers then codes a chat as we do: a text after a control token begins with a space
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    with atomic_path(folder / "tokenizer.model") as temporary:  # last: where it is, the others are
        temporary.write_bytes(learned)


def _learn(lines: Sequence[str], vocab_size: int) -> bytes:
    """A sentencepiece model. Raises InputError that says which ``--vocab-size`` to give."""
    learned = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=learned,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            max_sentence_length=4 * LINE_CHARACTERS,  # in bytes
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(_unlearnable(vocab_size, str(error))) from None
    return learned.getvalue()


def _unlearnable(vocab_size: int, said: str) -> str:
    """What to change, by the number in sentencepiece's complaint; some name nothing but a line of its source."""
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", said):
        return f"--vocab-size {vocab_size} is too small for all bytes and this text's letters: give at least {least[1]}"
    if most := re.search(r"set it to a value <= (\d+)", said):
        return f"--vocab-size {vocab_size} is too large for this text: give at most {most[1]}, or more text"
    remedy = "give a --vocab-size from some hundred to some ten thousand, or more text"
    return f"no tokenizer of {vocab_size} tokens can be learnt from this text: {remedy}"


@dataclass(frozen=True)
class Tokens:
    """Token ids ``[n]`` uint16 or uint32, mapped from disk: what to train on, and what to judge by.

    Every document is followed by the token ``end``; None where the tokenizer has none.
    """

    train: np.ndarray
    held_out: np.ndarray
    end: int | None
    fingerprint: str


class Rows:
    """The rows of ``width`` tokens that may be picked from a token file.

    A row begins where a document does, so that no response is learnt without its prompt, or a whole number of
    rows into a longer one. It goes on into the next document.
    """

    def __init__(self, tokens: np.ndarray, end: int | None, width: int) -> None:
        self.tokens, self.width = tokens, width
        begins = [0, *(np.flatnonzero(tokens == end) + 1).tolist(), len(tokens)]
        starts = np.concatenate([np.arange(*pair, width - 1) for pair in pairwise(begins)])
        self.starts = starts[starts <= len(tokens) - width]

    def pick(self, rows: int, generator: torch.Generator) -> Tensor:
        """``[rows, width]`` int64."""
        starts = self.starts[torch.randint(len(self.starts), (rows,), generator=generator)]
        return torch.from_numpy(self.tokens[starts[:, None] + np.arange(self.width)].astype(np.int64))


def tokenized(documents: Sequence[str], tokenizer: Tokenizer, vocab_size: int, folder: Path) -> Tokens:
    """The documents as two files of ids in ``folder``, written once and found again by their fingerprint.

    Raises InputError when a token is not among the model's ``vocab_size``, OSError when the folder cannot be written.
    """
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    made_by = [dtype.name, tokenizer.settings, sorted(tokenizer.eos_ids)]
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode())
    digest.update(b"".join(tokenizer.vocabulary.pieces))
    for document in documents:
        digest.update(document.encode() + b"\0")
    fingerprint = digest.hexdigest()
    known = read_optional_json(folder / INDEX).get("fingerprint") == fingerprint
    if not (known and all((folder / name).exists() for name in (TRAIN, HELD_OUT))):
        rows = _encode(documents, tokenizer, vocab_size, dtype)
        (folder / INDEX).unlink(missing_ok=True)  # a kill from here on leaves no index to files of another text
        for name, part in rows.items():
            with atomic_path(folder / name) as temporary:
                np.concatenate(part).tofile(temporary)
        write_json(folder / INDEX, {"fingerprint": fingerprint})
    train, held_out = (np.memmap(folder / name, dtype=dtype, mode="r") for name in (TRAIN, HELD_OUT))
    return Tokens(train, held_out, next(iter(sorted(tokenizer.eos_ids)), None), fingerprint)


def _encode(
    documents: Sequence[str], tokenizer: Tokenizer, vocab_size: int, dtype: np.dtype
) -> dict[str, list[np.ndarray]]:
    """The ids of every document, under the name of the file that they belong in."""
    ids: dict[str, list[np.ndarray]] = {TRAIN: [], HELD_OUT: []}
    end = sorted(tokenizer.eos_ids)[:1]
    for document in documents:
        row = tokenizer.encode(document) + end
        if max(row, default=0) >= vocab_size:
            raise InputError(f"the tokenizer gives id {max(row)}, but the model has {vocab_size} tokens")
        ids[HELD_OUT if _is_held_out(document) else TRAIN].append(np.asarray(row, dtype=dtype))
    return ids
