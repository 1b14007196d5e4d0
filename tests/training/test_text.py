"""Training text: reading files, training a tokenizer, held-out documents, rows, and wrong input."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.refusal import refusal
from training.text import Rows, read_documents, rows_of, train_tokenizer
from weights.tokenizer import Tokenizer

DOCUMENTS = [
    f"The {a} hen met {b * b} foxes.\n\nThey all went home at {b + 7} by the {c} road."
    for a in ("brown", "small", "clever", "old")
    for b in range(30)
    for c in ("red", "sly", "shy")
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("learnt")
    train_tokenizer(DOCUMENTS, 300, folder)
    return Tokenizer(folder)


def test_a_jsonl_line_is_a_text_or_a_prompt_with_its_response(tmp_path: Path) -> None:
    """Each may hold the line separators of Unicode."""
    whole, parts = '{"text": "One\u2028two\x85."}', '{"prompt": "Say two. ", "response": "\\nTwo."}'
    path = tmp_path / "a.jsonl"
    path.write_bytes(f'{whole}\r\n{parts}\n{{"text": " "}}'.encode())
    assert read_documents([path]) == ["One\u2028two\x85.", "Say two.\n\nTwo."]


def test_a_document_is_coded_as_chat_would_code_its_prompt(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_chat([{"role": "user", "content": "The hen met"}])
    whole = tokenizer.encode("The hen met\n\nThey all went home.")
    assert whole[: len(prompt)] == prompt


def test_every_document_is_trained_on_or_held_out_and_has_an_end(
    tokenizer: Tokenizer,
) -> None:
    train, held_out = (
        [*windows[:, 0].tolist(), *windows[-1, 1:].tolist()]
        for windows in (rows.windows for rows in rows_of(DOCUMENTS, tokenizer, 9))
    )
    assert len(held_out) > 0

    def documents(ids: list[int]) -> list[tuple[int, ...]]:
        ends = [0, *(at + 1 for at, token in enumerate(ids) if token == 1)]
        return [tuple(ids[start:end]) for start, end in pairwise(ends)]

    assert sorted(documents(train) + documents(held_out)) == sorted(
        (*tokenizer.encode(each), 1) for each in DOCUMENTS
    )
    assert not set(documents(train)) & set(documents(held_out))


@pytest.mark.parametrize(
    ("ids", "ending", "expected"),
    [
        (
            [5, 6, 2, 7, 8, 9, 10, 11, 12, 13, 2, 14, 2, 15, 16, 17, 2],
            [2],
            [
                [5, 6, 2, 7],
                [7, 8, 9, 10],
                [10, 11, 12, 13],
                [13, 2, 14, 2],
                [14, 2, 15, 16],
                [15, 16, 17, 2],
            ],
        ),
        ([*range(12)], [], [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]),
    ],
    ids=["documents", "no ends"],
)
def test_a_row_begins_with_a_document_or_a_whole_number_of_rows_into_a_longer_one(
    ids: list[int], ending: list[int], expected: list[list[int]]
) -> None:
    rows = Rows(np.array(ids, dtype=np.int32), ending, 4)
    picked = rows.pick(400, torch.Generator().manual_seed(0))
    assert picked.shape == (400, 4) and picked.dtype == torch.int64
    assert picked.unique(dim=0).tolist() == expected


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"text"\n', "a.jsonl, line 2 is not valid JSON"),
        (
            "a.jsonl",
            '{"prompt": "no response"}\n',
            'line 1 needs "text", or "prompt" and "response"',
        ),
        ("a.jsonl", "[1]\n", 'line 1 needs "text"'),
        ("a.jsonl", b"\xff\xfe", "cannot be read as UTF-8"),
    ],
)
def test_wrong_data_is_refused_by_name(
    tmp_path: Path, name: str, content: str | bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert complaint in refusal(read_documents, [tmp_path / name])


def test_too_little_text_is_refused_with_the_number_it_takes(
    tokenizer: Tokenizer,
) -> None:
    said = refusal(rows_of, ["One text."] * 300, tokenizer, 9)
    assert said.startswith("1 different ") and "give at least 200 documents" in said
