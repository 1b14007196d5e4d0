"""Orders: whatever JSON comes, it is an order or a refusal, and no prompt is read as another's."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import generate
from decoding.serve import Defaults
from decoding.serve.orders import LONGEST_GAMMA, MOST_SAMPLES, Fields, Order, Orders, parse_body
from model import InputError
from tests.folders import END
from tests.serving import chat_folder
from weights.tokenizer import Tokenizer

NAMES = [
    *("prompt", "messages", "model", "n", "stream", "stream_options", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "seed", "coupling", "max_tokens", "max_completion_tokens", "stop", "ban", "draft", "gamma"),
    *("adaptive", "exit_layer", "min_target_confidence", "beside", "plan", "draft_model", "logprobs", "user"),
]
LIKELY = [
    "a",
    "exit",
    "none",
    "skip",
    "race",
    "x.py:C",
    "",
    0,
    1,
    3,
    0.5,
    -1,
    True,
    None,
    ["a"],
    {"include_usage": True},
]
MESSAGE = {"role": "user", "content": "the hen"}


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    folder = chat_folder(tmp_path_factory.mktemp("models") / "tiny")
    request = generate.Request(generate.parse_arguments(["--serve", "0", "--model", str(folder)]))
    return Orders(Defaults.of(request), Tokenizer(folder), 64)


def anything() -> st.SearchStrategy[Any]:
    """Any JSON value, often one that some field takes."""
    simple = st.one_of(st.sampled_from(LIKELY), st.integers(), st.floats(), st.text(max_size=5))
    inner = st.recursive(
        simple, lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(), value, max_size=3)
    )
    messages = st.lists(
        st.just(MESSAGE) | st.dictionaries(st.sampled_from(["role", "content", "name"]), inner), max_size=2
    )
    return st.one_of(inner, messages)


@given(
    endpoint=st.sampled_from(["chat", "completion", "live"]),
    body=st.dictionaries(st.sampled_from(NAMES), anything(), max_size=5),
    sound=st.booleans(),
)
def test_whatever_the_fields_hold_it_is_an_order_or_a_refusal(
    endpoint: str, body: dict[str, Any], sound: bool, orders: Orders
) -> None:
    """Half of them with a prompt that is sound, so that the other fields decide."""
    if sound:
        body = {**body, **({"messages": [MESSAGE]} if endpoint == "chat" else {"prompt": "the hen"})}
    try:
        order = getattr(orders, endpoint)(fields_of(**body))
    except InputError as refusal:
        assert str(refusal)
        return
    assert isinstance(order, Order) and 0 < len(order.ids) < 64
    assert 1 <= order.rules.max_new_tokens <= 64 - len(order.ids)
    assert order.draft.kind in orders.defaults.drafts and order.draft.plan is order.draft.draft_model is None
    assert (order.draft.gamma or 0) <= LONGEST_GAMMA and 1 <= order.samples <= MOST_SAMPLES


@given(st.binary(max_size=40))
def test_whatever_the_bytes_it_is_an_object_or_a_refusal(body: bytes) -> None:
    try:
        assert isinstance(parse_body(body).left, dict)
    except InputError as refusal:
        assert str(refusal)


def test_prompts_are_encoded_one_at_a_time(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is typed must not be read as control tokens because a chat is being encoded at the same time."""
    at_once, encode = [], orders.tokenizer.vocabulary.encode
    inside = threading.Semaphore(1)

    def watched(text: str, *, parse_special: bool) -> list[int]:
        at_once.append(not inside.acquire(blocking=False))
        time.sleep(0.001)
        ids = encode(text, parse_special=parse_special)
        inside.release()
        return ids

    monkeypatch.setattr(orders.tokenizer.vocabulary, "encode", watched)
    typed = {**MESSAGE, "content": f"the {END} hen"}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(orders.chat, fields_of(messages=[each])) for _ in range(8) for each in (MESSAGE, typed)]
        ids = [each.result().ids for each in asked]
    end = orders.tokenizer.vocabulary.special[END]
    assert not any(end in each for each in ids) and len(at_once) == 16 and not any(at_once)


def test_the_system_message_of_the_command_line_is_that_of_chats_without_one(orders: Orders) -> None:
    changed = Orders(replace(orders.defaults, system="hm"), orders.tokenizer, 64)
    said, other = ({"role": "system", "content": content} for content in ("hm", "oh"))
    assert changed.chat(fields_of(messages=[MESSAGE])).ids == orders.chat(fields_of(messages=[said, MESSAGE])).ids
    asked = {"messages": [other, MESSAGE]}
    assert changed.chat(fields_of(**asked)).ids == orders.chat(fields_of(**asked)).ids
    assert changed.live(fields_of(prompt="the hen")).ids == changed.chat(fields_of(messages=[MESSAGE])).ids


def fields_of(**body: Any) -> Fields:
    return parse_body(json.dumps(body).encode())


def test_the_options_of_the_command_line_hold_for_the_draft_they_were_given_with(orders: Orders) -> None:
    """Another draft takes on what is not the first one's own."""
    ours = replace(orders.defaults.draft, kind="exit", exit_layer=3, gamma=5)
    changed = Orders(replace(orders.defaults, draft=ours), orders.tokenizer, 64)
    exits, lookup, none = (
        changed.completion(fields_of(prompt="a", draft=name)).draft for name in ("exit", "lookup", "none")
    )
    assert (exits.exit_layer, exits.gamma) == (3, 5)
    assert (lookup.exit_layer, lookup.gamma) == (None, 5)
    assert none == replace(ours, kind="none", exit_layer=None, gamma=None)
