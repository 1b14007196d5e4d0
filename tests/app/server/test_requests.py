"""Requests: any JSON is a checked request or a refusal, and no prompt is read as another's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.exceptions import HTTPException

import generate
from app.draft_options import KINDS, DraftOptions
from app.options import make_parser
from app.server.requests import (
    MAX_GAMMA,
    ChatBody,
    CompletionBody,
    LiveBody,
    ParsedRequest,
    RequestReader,
    TextBody,
    refusal,
)
from model import InputError

NAMES = [
    *("prompt", "messages", "model", "n", "stream", "stream_options", "temperature", "top_k"),
    *("top_p", "min_p", "repetition_penalty", "seed", "coupling", "max_tokens", "stop", "ban"),
    *("max_completion_tokens", "draft", "gamma", "adaptive", "exit_layer", "beside", "plan"),
    *("min_target_confidence", "draft_model", "logprobs", "user"),
]
LIKELY = ["a", "exit", "none", "skip", "race", "x.py:C", "", 0, 1, 3, 0.5, -1, True, None, ["a"]]
MESSAGE = {"role": "user", "content": "the hen"}


def reader_of(chat_model: Path, *arguments: str, bits: int = 4) -> RequestReader:
    given = ["--serve", "0", "--model", str(chat_model), "--context", "64", *arguments]
    return RequestReader(generate.Request(make_parser().parse_args(given)), bits)


@pytest.fixture(scope="module")
def reader(chat_model: Path) -> RequestReader:
    return reader_of(chat_model)


def read(reader: RequestReader, kind: type[TextBody], **fields: Any) -> ParsedRequest:
    return reader.read(kind, json.dumps(fields).encode())


def anything() -> st.SearchStrategy[Any]:
    """Any JSON value, often one that some field takes."""
    inner = st.recursive(
        st.one_of(st.sampled_from(LIKELY), st.integers(), st.floats(), st.text(max_size=5)),
        lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(), value, max_size=3),
    )
    message = st.just(MESSAGE) | st.dictionaries(
        st.sampled_from(["role", "content", "name"]), inner
    )
    return st.one_of(inner, st.lists(message, max_size=2))


@given(
    kind=st.sampled_from([ChatBody, CompletionBody, LiveBody]),
    body=st.dictionaries(st.sampled_from(NAMES), anything(), max_size=5),
    sound=st.booleans(),
)
def test_any_fields_are_a_request_or_a_refusal(
    kind: type[TextBody], body: dict[str, Any], sound: bool, reader: RequestReader
) -> None:
    """Half of them with a prompt that is sound, so that the other fields decide."""
    if sound:
        body = {**body, **({"messages": [MESSAGE]} if kind is ChatBody else {"prompt": "the hen"})}
    try:
        _, ids, _, asked = read(reader, kind, **body)
    except (InputError, ValidationError, HTTPException) as error:
        status, told = refusal(error)
        assert status in (400, 404) and "\n" not in told["error"]["message"]
        assert told["error"]["param"] in {None, *body, "prompt", "messages"}
        return
    draft = asked.draft
    assert 0 < len(ids) < 64 and asked.rules.max_new_tokens >= 1
    assert draft.kind in KINDS and draft.plan is draft.draft_model is None
    assert (draft.gamma or 0) <= MAX_GAMMA


def test_the_system_message_of_the_command_line_is_that_of_chats_without_one(
    chat_model: Path, reader: RequestReader
) -> None:
    changed = reader_of(chat_model, "--system", "hm")
    said = {"role": "system", "content": "hm"}
    told = read(reader, ChatBody, messages=[said, MESSAGE]).ids
    assert read(changed, ChatBody, messages=[MESSAGE]).ids == told
    assert read(changed, LiveBody, prompt="the hen").ids == told
    asked = {"messages": [{"role": "developer", "content": "oh"}, MESSAGE]}
    assert read(changed, ChatBody, **asked).ids == read(reader, ChatBody, **asked).ids


def test_drafting_options_of_the_command_line_hold_for_its_own_kind_of_draft(
    chat_model: Path,
) -> None:
    """Another kind begins afresh."""
    changed = reader_of(chat_model, "--draft", "exit", "--exit-layer", "3", "--gamma", "5")
    exits = draft_of(changed, draft="exit")
    assert (exits.exit_layer, exits.gamma) == (3, 5)
    assert draft_of(changed, gamma=2) == replace(exits, gamma=2)
    for kind in ("lookup", "none"):
        assert draft_of(changed, draft=kind) == DraftOptions(kind)
    in_bits = reader_of(chat_model, "--draft", "exit", bits=8)
    assert draft_of(in_bits, draft="lowbit") == DraftOptions("lowbit", bits=8)
    model = "--draft", "model", "--draft-model", "tiny-llama", "--gamma", "2"
    assert draft_of(reader_of(chat_model, *model)).gamma == 2


def draft_of(reader: RequestReader, **fields: Any) -> DraftOptions:
    return read(reader, CompletionBody, prompt="a", **fields).options.draft


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (MESSAGE | {"tool_calls": [{"id": "1"}]}, "messages.0.tool_calls"),
        (MESSAGE | {"weight": 1}, "messages.0.weight"),
        (MESSAGE | {"content": [{"type": "text", "text": "a", "detail": "low"}]}, "detail"),
    ],
)
def test_unknown_fields_of_messages_are_refused(
    message: dict[str, Any], field: str, reader: RequestReader
) -> None:
    with pytest.raises(ValidationError) as caught:
        read(reader, ChatBody, messages=[message])
    told = refusal(caught.value)[1]["error"]["message"]
    assert field in told and told.endswith("it is not supported: leave it out")


def test_messages_are_taken_as_clients_send_them_back(reader: RequestReader) -> None:
    empty = {"refusal": None, "tool_calls": None, "annotations": [], "audio": None, "name": "fox"}
    told = read(reader, ChatBody, messages=[MESSAGE | empty]).ids
    assert told == read(reader, ChatBody, messages=[MESSAGE]).ids
