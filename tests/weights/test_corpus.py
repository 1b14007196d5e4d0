"""Text files: what is read, learnt, held out and refused."""

from __future__ import annotations

import json
import re
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from model import InputError
from weights.tokenizer import Tokenizer
from weights.training.corpus import Rows, check_held_out, read_documents, tokenized, train_tokenizer

DOCUMENTS = [
    f"The {a} hen met {b * b} foxes.\n\nThey all went home at {b + 7} by the {c} road."
    for a in ("brown", "small", "clever", "old")
    for b in range(30)
    for c in ("red", "sly", "shy")
]


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnt")
    train_tokenizer(DOCUMENTS, 320, folder)
    return folder


def test_a_jsonl_line_is_a_text_or_a_prompt_with_its_response(tmp_path: Path) -> None:
    rows = [{"text": "One."}, {"prompt": "Say two. ", "response": "\nTwo."}, {"text": " "}]
    assert read_documents([written(tmp_path / "a.jsonl", *rows)]) == ["One.", "Say two.\n\nTwo."]


@pytest.mark.parametrize(
    ("cut", "whole"),
    [('It is 3.5 km. He said "No." And th', 'It is 3.5 km. He said "No."'), ("One.", "One."), ("no end", "no end")],
)
def test_a_text_that_was_cut_off_ends_with_its_last_whole_sentence(tmp_path: Path, cut: str, whole: str) -> None:
    rows = [{"text": cut, "finished": False}, {"prompt": "Say it. Now", "response": cut, "finished": False}]
    assert read_documents([written(tmp_path / "a.jsonl", *rows)]) == [whole, f"Say it. Now\n\n{whole}"]


def test_a_jsonl_line_may_hold_the_line_separators_of_unicode(tmp_path: Path) -> None:
    row = '{"text": "one\u2028two\x85three"}'
    (tmp_path / "a.jsonl").write_bytes(f"{row}\r\n{row}".encode())
    assert read_documents([tmp_path / "a.jsonl"]) == ["one\u2028two\x85three"] * 2


def test_a_text_file_is_cut_at_line_ends_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    text = "".join(f"Line {number} of a long text.\n" for number in range(1000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = read_documents([tmp_path / "a.txt"])
    assert len(found) > 3 and "".join(found) == text


def test_a_document_is_coded_as_chat_would_code_its_prompt(learnt: Path) -> None:
    tokenizer = Tokenizer(learnt)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "The hen met"}])
    whole = tokenizer.encode("The hen met\n\nThey all went home.")
    assert whole[: len(prompt)] == prompt and tokenizer.decode(whole) == "The hen met\n\nThey all went home."


@pytest.mark.parametrize("text", ["hen", "wholly new: žluťoučký 🦊\n\ttabs  and spaces ", "a\n\n\nb"])
def test_a_learnt_tokenizer_codes_any_text_and_transformers_agrees(learnt: Path, text: str) -> None:
    tokenizer, theirs = Tokenizer(learnt), AutoTokenizer.from_pretrained(learnt)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert theirs(text).input_ids == ids
    assert theirs.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
        "input_ids"
    ] == tokenizer.encode_chat([{"role": "user", "content": text}])


def test_no_document_is_both_trained_on_and_held_out_and_none_is_lost(learnt: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(learnt)
    tokens = tokenized(DOCUMENTS, tokenizer, 320, tmp_path)
    rows = [(*tokenizer.encode(each), 2) for each in DOCUMENTS]
    train, held_out = (tuple(part.tolist()) for part in (tokens.train, tokens.held_out))
    assert len(train) + len(held_out) == sum(map(len, rows)) and len(held_out) > 0

    def documents(ids: tuple[int, ...]) -> set[tuple[int, ...]]:
        starts = [at for at, token in enumerate(ids) if token == 1] + [len(ids)]
        return {ids[start:end] for start, end in pairwise(starts)}

    assert documents(train) | documents(held_out) == set(rows)
    assert not documents(train) & documents(held_out)


def test_a_document_stays_on_its_side_when_text_is_added(learnt: Path, tmp_path: Path) -> None:
    added, tokenizer = [f"Added {number}." for number in range(77)], Tokenizer(learnt)
    before = tokenized(DOCUMENTS, tokenizer, 320, tmp_path / "before").held_out.tolist()
    after = tokenized([*added, *DOCUMENTS], tokenizer, 320, tmp_path / "after").held_out.tolist()
    assert after[-len(before) :] == before  # in front of the others, so that their numbers change


def inodes(folder: Path) -> dict[str, int]:
    """The files of a folder; one that was written again, atomically, has another number."""
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_token_files_are_made_again_only_when_the_text_changed(learnt: Path, tmp_path: Path) -> None:
    tokenized(DOCUMENTS, Tokenizer(learnt), 320, tmp_path)
    before = inodes(tmp_path)
    assert sorted(before) == ["held_out.bin", "tokens.json", "train.bin"]
    tokenized(DOCUMENTS, Tokenizer(learnt), 320, tmp_path)
    assert inodes(tmp_path) == before
    changed = [DOCUMENTS[0] + " ", *DOCUMENTS[1:]]
    tokens = tokenized(changed, Tokenizer(learnt), 320, tmp_path)
    assert inodes(tmp_path)["train.bin"] != before["train.bin"] and tokens.train.dtype == np.uint16


def test_token_files_of_which_one_is_gone_are_made_again(learnt: Path, tmp_path: Path) -> None:
    first = tokenized(DOCUMENTS, Tokenizer(learnt), 320, tmp_path)
    kept = first.train.tolist(), first.held_out.tolist()
    (tmp_path / "held_out.bin").unlink()
    again = tokenized(DOCUMENTS, Tokenizer(learnt), 320, tmp_path)
    assert (again.train.tolist(), again.held_out.tolist()) == kept


def test_text_that_is_refused_leaves_the_token_files_of_the_text_before(learnt: Path, tmp_path: Path) -> None:
    tokenized(DOCUMENTS, Tokenizer(learnt), 320, tmp_path)
    before = inodes(tmp_path)
    with pytest.raises(InputError, match="the model has 300 tokens"):
        tokenized(DOCUMENTS[:9], Tokenizer(learnt), 300, tmp_path)
    assert inodes(tmp_path) == before


def test_no_prompt_of_another_document_stands_before_a_response_without_an_end_between(
    learnt: Path, tmp_path: Path
) -> None:
    """The leak: with documents end to end, a model goes on from one story into the next one's prompt."""
    tokenizer = Tokenizer(learnt)
    documents = read_documents(
        [written(tmp_path / "a.jsonl", *({"text": f"Fox {n}. And", "finished": n % 2} for n in range(99)))]
    )
    ids = tokenized(documents, tokenizer, 320, tmp_path).train
    starts = np.flatnonzero(ids == tokenizer.vocabulary.special["<s>"])
    assert len(starts) > 90 and (ids[starts[1:] - 1] == 2).all() and ids[-1] == 2


def test_a_row_begins_with_a_document_or_a_whole_number_of_rows_into_a_longer_one() -> None:
    ids = np.array([5, 6, 2, 7, 8, 9, 10, 11, 12, 13, 2, 14, 2, 15, 16, 17, 2], dtype=np.uint16)
    rows = Rows(ids, 2, 4).pick(400, torch.Generator().manual_seed(0))
    assert rows.shape == (400, 4) and rows.dtype == torch.int64
    begins = {0: [5, 6, 2, 7], 3: [7, 8, 9, 10], 6: [10, 11, 12, 13], 9: [13, 2, 14, 2], 11: [14, 2, 15, 16]}
    assert {tuple(row) for row in rows.tolist()} == {tuple(row) for row in [*begins.values(), [15, 16, 17, 2]]}


def test_rows_of_a_text_without_ends_follow_one_another() -> None:
    rows = Rows(np.arange(40, dtype=np.uint16), None, 9).pick(200, torch.Generator().manual_seed(0))
    assert set(rows[:, 0].tolist()) == {0, 8, 16, 24}
    assert torch.equal(rows - rows[:, :1], torch.arange(9).expand(200, 9))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", "", "there is no text"),
        ("a.jsonl", "\n", "there is no text"),
        ("a.jsonl", '{"text": "fine"}\n{"text"\n', "a.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", '{"prompt": "no response"}\n', 'line 1 needs "text", or "prompt" and "response"'),
        ("a.jsonl", "[1]\n", 'line 1 needs "text"'),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1 holds half of a surrogate pair"),
        ("a.csv", "a,b", "neither .txt nor .jsonl"),
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
    ],
)
def test_wrong_data_is_refused_by_name(tmp_path: Path, name: str, content: str | bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=complaint):
        read_documents([tmp_path / name])


def test_a_vocabulary_that_the_text_does_not_support_is_lowered_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(DOCUMENTS, 30000, tmp_path)
    named = re.fullmatch(
        r"--vocab-size 30000 is too large for this text: give at most (\d+), or more text: learning (\d+)\n",
        capfd.readouterr().err,
    )
    assert named and named[1] == named[2]
    assert len(Tokenizer(tmp_path).vocabulary.pieces) == int(named[1])


def test_a_vocabulary_too_small_names_the_last_size_that_is_not(tmp_path: Path) -> None:
    complaint = r"--vocab-size {} is too small for all bytes and this text's letters: give at least (\d+)"
    with pytest.raises(InputError) as refusal:
        train_tokenizer(DOCUMENTS, 200, tmp_path)
    named = re.fullmatch(complaint.format(200), str(refusal.value))
    assert named
    train_tokenizer(DOCUMENTS, int(named[1]), tmp_path)
    assert len(Tokenizer(tmp_path).vocabulary.pieces) == int(named[1])
    with pytest.raises(InputError, match=complaint.format(int(named[1]) - 1)):
        train_tokenizer(DOCUMENTS, int(named[1]) - 1, tmp_path)


@pytest.mark.parametrize(
    ("documents", "vocab_size"),
    [
        (DOCUMENTS, 1),
        (DOCUMENTS, 1 << 40),
        ([], 300),
        (["left out for its \u2585"], 300),
    ],
    ids=["no room for control tokens", "no 32-bit number", "no text", "no line that counts"],
)
def test_no_message_of_sentencepiece_itself_reaches_the_user(
    tmp_path: Path, documents: list[str], vocab_size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=f"^no tokenizer of {vocab_size} tokens can be learnt from this text: give "):
        train_tokenizer(documents, vocab_size, tmp_path)
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_a_tokenizer_learns_from_the_whole_of_a_line_of_any_length(tmp_path: Path) -> None:
    line = "kůň " * 90000 + "žluťoučký " * 90000  # more than a megabyte, and there is no other
    train_tokenizer([line], 290, tmp_path)
    assert "žluťoučký".encode() in {piece.strip(b" ") for piece in Tokenizer(tmp_path).vocabulary.pieces}


@pytest.mark.parametrize("held_out", [False, True])
def test_documents_of_one_side_alone_are_refused(held_out: bool) -> None:
    side = [each for each in DOCUMENTS if (zlib.crc32(each.encode()) % 50 == 0) == held_out]
    with pytest.raises(InputError, match=r"hold one in 50 out: there are 3, 11997 more are duplicates of them; add"):
        check_held_out(side[:3] * 4000)
    check_held_out([*side, *DOCUMENTS])


def test_tokens_that_the_model_has_not_are_refused(learnt: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model has 10 tokens"):
        tokenized(DOCUMENTS, Tokenizer(learnt), 10, tmp_path)
    assert list(tmp_path.iterdir()) == []
