"""The server: its texts are generate.py's, any request is served or refused, and requests neither
end it nor reach each other.
"""

import asyncio
import gc
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from heapq import heappop, heappush
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.options import GRAMMARS, KINDS, Options, types_of
from app.server.network import MAX_BODY, respond
from app.server.requests import (
    OF_A_CALL,
    ChatBody,
    CompletionBody,
    TextBody,
    complaint,
    sample_of,
)
from app.server.worker import Job, Returns
from model.decoder import PREFILL_CHUNK, Decoder
from model.errors import InputError
from tests.calls import recorded, until
from tests.commands import Run
from tests.serving import CONTEXT, Served, events_of, serving

PROMPT = "the hen and the"
QUEUE = 16
OF_TEXTS = ["--draft", "exit", "--max-new-tokens", "16", "--stop", "zz"]
OF_CHATS = ["--system", "hm", "--chat-template-kwargs", '{"tone": "mild"}']
SEEDED = {"temperature": 0.9, "seed": 3, "max_tokens": 24}
# q would end the text, and so would the server's own stop string, which a random text may have
ENDLESS = {"prompt": PROMPT, "max_tokens": CONTEXT, "temperature": 1, "ban": "q", "stop": []}
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[Served]:
    given = *OF_TEXTS, *OF_CHATS, "--queue", str(QUEUE), "--allow-host", "aibox"
    with serving("--model", str(chat_model), *given) as running:
        yield running


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.address + "/v1", api_key="none", max_retries=0)


# ---- texts ----

# Fields of a request, the same on the command line, and whether it is a chat.
REQUESTS: list[tuple[dict[str, Any], str, bool]] = [
    ({}, "", True),
    ({"max_tokens": 24}, "--max-new-tokens 24", True),
    ({"draft": "lookup", "gamma": 3, **SEEDED}, "--draft lookup --gamma 3", True),
    ({"draft": "none", "top_p": 0.9, **SEEDED}, "--draft none --top-p 0.9", False),
    ({"adaptive": True, **SEEDED}, "--adaptive", False),
    ({"coupling": "ratio", "gamma": 2, **SEEDED}, "--coupling ratio --gamma 2", True),
    ({"stop": ["e", "a"], "ban": "t", **SEEDED}, "--stop e --stop a --ban t", True),
    (
        {"repetition_penalty": 1.3, "min_p": 0.01, "frequency_penalty": 0.4, **SEEDED},
        "--repetition-penalty 1.3 --min-p 0.01 --frequency-penalty 0.4",
        False,
    ),
]


@pytest.mark.parametrize(("asked", "options", "chat"), REQUESTS)
def test_a_streamed_text_is_the_one_that_generate_writes(
    asked: dict[str, Any],
    options: str,
    chat: bool,
    client: openai.OpenAI,
    chat_model: Path,
    run: Run,
) -> None:
    """What the request does not say is as on the server's own command line."""
    seeded = "--temperature 0.9 --seed 3 --max-new-tokens 24" if "seed" in asked else ""
    given = [*OF_TEXTS, *(OF_CHATS if chat else ["--no-chat"]), *seeded.split(), *options.split()]
    wanted = run(PROMPT, "--model", chat_model, "--json", *given).result
    prompt = {"messages": [said(PROMPT)]} if chat else {"prompt": PROMPT}
    create = client.chat.completions.create if chat else client.completions.create
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = create(model="tiny", extra_body=asked, **stream, **prompt)
    choices = [chunk.choices[0] for chunk in chunks]
    finish = "length" if wanted["finish_reason"] == "length" else "stop"
    text = "".join((choice.delta.content if chat else choice.text) or "" for choice in choices)
    assert text == wanted["text"] and wanted["text"]
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [finish]
    assert last.choices == [] and last.id.startswith("chatcmpl-" if chat else "cmpl-")
    assert last.usage.prompt_tokens == wanted["prompt_tokens"]
    assert last.usage.model_extra["speculation"]["rounds"] == wanted["rounds"]


def test_the_model_is_listed_by_its_folders_name(served: Served, client: openai.OpenAI) -> None:
    (listed,) = client.models.list()
    assert served.ask("/health") == (200, {"status": "ok"})
    assert listed.id == client.models.retrieve("tiny").id == "tiny"


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
JSON = r'\{"kind": "(cat|dog)"\}'
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON),
    ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*"),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "grammar": None}}, JSON),
    ({"structured_outputs": {"regex": "x[0-9]{2}y"}}, "x[0-9]{2}y"),
    ({"structured_outputs": {"choice": ["a.b", "c|d", "e f"]}}, r"a\.b|c\|d|e f"),
    ({"structured_outputs": {"grammar": 'start: "x" | "y" start'}}, "y*x"),
]


@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_structured_output_is_written_as_asked_for(
    form: dict[str, Any], expected: str, served: Served
) -> None:
    """The letter q ends this model's texts."""
    text = served.text(**form, prompt=PROMPT, temperature=0.8, seed=2, max_tokens=64)
    assert re.fullmatch(f"({expected})q?", text)


# "r&" takes back a token of an earlier round too
BANNING = {"prompt": PROMPT, **SEEDED, "max_tokens": 99, "ban": ["in", "r&"], "logprobs": 2}


@pytest.fixture(scope="module")
def streamed(served: Served) -> tuple[list[Any], list[int]]:
    """The choices of a traced stream whose bans take tokens back, and the tokens that it keeps."""
    traced = {**BANNING, "stream": True, "trace": True}
    choices = [event["choices"][0] for event in events_of(served.ask(TEXT, traced)[1])]
    kept: list[int] = []
    for round in [choice["trace"] for choice in choices[:-1]]:
        kept += [each["id"] for each in round["tokens"] if each["verdict"] in ("accepted", "own")]
        del kept[len(kept) - round["retracted"] :]
    return choices, kept


def test_a_traced_stream_tells_the_tokens_of_its_text(
    streamed: tuple[list[Any], list[int]], served: Served
) -> None:
    choices, kept = streamed
    assert any(choice["trace"]["retracted"] for choice in choices[:-1])
    written = b"".join(map(served.worker.session.tokenizer.token_bytes, kept))
    text = "".join(choice["text"] for choice in choices)
    assert written.decode(errors="replace") == text == served.text(**BANNING)


@torch.inference_mode()
def test_log_probabilities_are_the_targets_own_with_any_draft(
    streamed: tuple[list[Any], list[int]], served: Served
) -> None:
    """Streamed or whole, also where tokens are taken back."""
    plain, drafted = (
        served.ask(TEXT, {**BANNING, "draft": draft})[1]["choices"][0] for draft in ("none", "exit")
    )
    assert plain == drafted
    choices, kept = streamed
    whole = plain["logprobs"]
    for name, told in whole.items():
        assert told == [each for choice in choices for each in choice["logprobs"][name]]
    session = served.worker.session
    prompt = session.tokenizer.encode(PROMPT)
    logits = session.model.model(torch.tensor([[*prompt, *kept]]))[0, len(prompt) - 1 : -1]
    wanted = logits.double().log_softmax(-1)
    own = wanted[torch.arange(len(kept)), kept].tolist()
    assert whole["token_logprobs"] == pytest.approx(own, abs=1e-4)
    likeliest = [max(each.values()) for each in whole["top_logprobs"]]
    assert likeliest == pytest.approx(wanted.amax(-1).tolist(), abs=1e-4)
    assert plain["text"][whole["text_offset"][-1] :] == whole["tokens"][-1]


@pytest.mark.parametrize("top", [{"top_logprobs": 3}, {}], ids=str)
def test_a_whole_chat_has_the_form_of_openais_client(
    top: dict[str, int], client: openai.OpenAI
) -> None:
    """With log probabilities of its tokens, and of the likeliest ones where they are asked for."""
    asked = {"messages": [said(PROMPT)], "max_tokens": 9, "extra_body": {"ban": "q"}}
    answer = client.chat.completions.create(model="tiny", logprobs=True, **top, **asked)
    (choice,) = answer.choices
    tokens = choice.logprobs.content
    text = bytes(byte for token in tokens for byte in token.bytes)
    assert text.decode(errors="replace") == choice.message.content
    assert [len(token.top_logprobs) for token in tokens] == [top.get("top_logprobs", 0)] * 9
    assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 9)


def test_a_conversation_goes_on_where_its_cache_is(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every other cache holds a longer text."""
    for letter in "wxyz":
        served.text(prompt=letter * 600, max_tokens=1)
    talks = [[said(f"{name} and the hen " * 9)] for name in ("ann", "bob")]
    read = recorded(
        monkeypatch, type(served.worker.together), "prefill", lambda _, ids, *at: ids.shape[1]
    )
    for talk in talks * 2:
        _, answer = served.ask(CHAT, {"messages": talk, "max_tokens": 4})
        talk += [answer["choices"][0]["message"], said("why")]
    assert len(read) == 4 and max(read[2:]) < 40, "of the second turn only what is new"


# ---- requests ----

# Path, body, and the status, the field and a part of the message of the error.
WRONG: list[tuple[str, Any, int, str | None, str]] = [
    (CHAT, {}, 400, "messages", "messages: Field required"),
    (CHAT, {"messages": [said("a", role="tool")]}, 400, "messages.0.role", "be 'system', 'dev"),
    (CHAT, {"messages": [said([{"type": "image_url"}])]}, 400, "messages.0.content.0.type", "'te"),
    (CHAT, {"messages": [said("a", weight=1)]}, 400, "messages.0.weight", "leave it out"),
    (CHAT, {"messages": [said("a", tool_calls=[1])]}, 400, "messages.0.tool_calls", "leave it out"),
    (CHAT, {"messages": [said(" " * CONTEXT)]}, 400, None, "shorten the prompt"),
    (CHAT, {"messages": [said("a")], "logprobs": 2}, 400, "logprobs", "valid boolean"),
    (CHAT, {"messages": [said("a")], "chat_template_kwargs": {"loud": True}}, 400,
     "chat_template_kwargs", "has no variable 'loud'"),
    (TEXT, {"prompt": ["a", "b"]}, 400, "prompt", "give one text"),
    (TEXT, {"prompt": [5, 1 << 20]}, 400, None, "some outside 0 to"),
    (TEXT, {"prompt": ""}, 400, "prompt", "give one text that is not"),
    (TEXT, {"model": "gpt-5"}, 404, None, "there is tiny"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "temperature", "at least 0"),
    (TEXT, {"temperature": "0.7"}, 400, "temperature", "must be a number, found '0.7'"),
    (TEXT, {"top_p": 2.0}, 400, "top_p", "top_p must be above 0"),
    (TEXT, {"frequency_penalty": 3.0}, 400, "frequency_penalty", "penalty must be from -2 to 2"),
    (TEXT, {"stream_options": {"usage": True}}, 400, "stream_options.usage.[key]", "'include_us"),
    (TEXT, {"logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
    (TEXT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "equal to 1"),
    (TEXT, {"max_tokens": ""}, 400, "max_tokens", "valid integer"),
    (TEXT, {"max_tokens": []}, 400, "max_tokens", "valid integer"),
    (TEXT, {"logprobs": ""}, 400, "logprobs", "valid integer"),
    (TEXT, {"n": True}, 400, "n", "leave it out"),
    (TEXT, {"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
    (TEXT, {"stop": ["a", ""]}, 400, "stop", "give stop strings and banned words as"),
    (TEXT, {"stop": ["a", 3]}, 400, "stop.1", "valid string"),
    (TEXT, {"ban": ["b" * 257]}, 400, "ban.0", "at most 256 characters"),
    (TEXT, {"draft": "evil.py:Drafter"}, 400, "draft", "should be 'auto', 'none'"),
    *((TEXT, {"draft": kind}, 400, "draft", "one of auto, none, lookup, exit, lowbit here") for kind
      in ("model", "skip")),
    (TEXT, {"draft": "lookup", "adaptive": True}, 400, "adaptive", "has no effect with draft loo"),
    (TEXT, {"gamma": 33}, 400, "gamma", "less than or equal to 32"),
    *((TEXT, {name: 3}, 400, name, f"{name}: it is not supported, or") for name in (
        "n", "plan", "bits", "exit_layer", "draft_model", "tools", "json_schema", "suffix"
    )),
    *((TEXT, {name: False}, 400, name, "leave it out") for name in (
        "add_generation_prompt", "skip_special_tokens", "do_sample", "enable_thinking"
    )),
    (TEXT, {"response_format": {"type": "json_schema"}}, 400, "response_format", "with a schema"),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
     400, None, "JSON schema: Unimplemented keys"),
    (TEXT, {"structured_outputs": {"json": "{"}}, 400,
     "structured_outputs.json.json[dict[str,any]]", "Invalid JSON"),
    (TEXT, {"structured_outputs": {"json": {"not": {}}}}, 400, None, "Unimplemented keys"),
    (TEXT, {"structured_outputs": {"regex": "("}}, 400, None, "regular expression: unclosed group"),
    (TEXT, {"structured_outputs": {"regex": "a", "json": {}}}, 400, None, "give one of"),
    (TEXT, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400,
     "response_format", "another field says the same: leave it out"),
    (TEXT, {"structured_outputs": {"grammar": 'start : "a'}}, 400, None, "the Lark grammar: "),
    (TEXT, {"structured_outputs": {"grammar": "a.lark"}}, 400, "structured_outputs.grammar", "st"),
    (TEXT, [], 400, None, "the body: Input should be an object"),
    (TEXT, b"{" + b" " * MAX_BODY, 400, None, "at most 1048576 bytes"),
    ("/v1/nowhere", {}, 404, None, "Not Found"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "part"), WRONG)
def test_what_is_wrong_is_one_sentence_in_openais_shape(
    path: str, body: Any, status: int, param: str | None, part: str, served: Served
) -> None:
    """Also of a stream: it does not begin before all is known to be well."""
    if isinstance(body, dict):
        body = {**({"prompt": "a"} if path == TEXT else {}), **body, "stream": True}
    found, answer = served.ask(path, body)
    error = answer["error"]
    assert found == status and error["param"] == param
    assert error["type"] == "invalid_request_error" and part in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and "--" not in error["message"]


def test_a_body_in_chunks_is_refused_whatever_length_is_stated(served: Served) -> None:
    _, answer = served.ask(
        TEXT,
        b"2\r\n{}\r\n0\r\n\r\n",
        **{"Transfer-Encoding": "chunked", "Content-Length": "7"},
    )
    assert "no Transfer-Encoding" in answer["error"]["message"]


def test_an_error_names_options_as_a_request_does_and_quotes_it_as_it_is() -> None:
    assert complaint(InputError("top-p and --exit-layer: found '--own-word' and 'top-p'")) == (
        "top_p and exit_layer: found '--own-word' and 'top-p'",
        None,
    )


def test_a_request_gives_every_option_of_a_call_but_those_that_are_the_servers_own() -> None:
    own = OF_A_CALL - ChatBody.model_fields.keys()
    servers = {"chat", "system", "bits", "window", "plan", "exit_layer", "draft_model"}
    assert own == servers | {*GRAMMARS}


IDLE = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": None,
    "echo": False,
    "best_of": 1,
    "user": "me",
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "auto",
    "top_k": -1,
    "max_tokens": -1,
    "min_tokens": 0,
    "prompt_cache_key": "a",
    "trace": None,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
}


def test_prompts_in_other_forms_and_fields_that_ask_for_nothing_change_no_text(
    served: Served,
) -> None:
    ids = served.worker.session.tokenizer.encode(PROMPT)
    bodies = [{"prompt": prompt} for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert len({served.text(**body) for body in [*bodies, {"prompt": PROMPT, **IDLE}]}) == 1


def test_messages_may_be_in_parts_and_with_the_fields_of_answers(served: Served) -> None:
    cached = {"type": "text", "text": "the ", "cache_control": {"type": "ephemeral"}}
    parts = [cached, {"type": "text", "text": "hen"}]
    other = said(parts, refusal=None, tool_calls=None, annotations=[], name="fox")
    first, second = (
        sample_of(served.worker.session, ChatBody(messages=messages)).source.tokens
        for messages in (
            [said("be brief", "system"), said("the hen")],
            [said("be brief", "developer"), other],
        )
    )
    assert first == second


# that ``Options`` checks
UNCHECKED = [name for name, field in TextBody.model_fields.items() if field.annotation is Any]


def test_no_option_of_a_request_names_a_file() -> None:
    """Each is a number, a switch or one of a few words."""
    options = [each for each in fields(Options) if each.name in UNCHECKED]
    assert len(options) == len(UNCHECKED) and all(
        str not in types_of(each) or each.metadata["choices"] for each in options
    )


VALUES = st.recursive(
    st.sampled_from(["a", "exit", "none", "race", "x.py:C", "", 0, 1, 0.5, -1, True, None, ["a"]])
    | st.integers()
    | st.floats()
    | st.text(max_size=5),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(), value, max_size=3),
)
NAMES = [*UNCHECKED, "model", "n", "stream", "stop", "ban", "max_tokens", "draft", "gamma", "plan"]


@given(
    kind=st.sampled_from([ChatBody, CompletionBody]),
    body=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
)
def test_any_fields_are_a_text_or_a_refusal(
    kind: type[ChatBody | CompletionBody], body: dict[str, Any], served: Served
) -> None:
    prompt = {"messages": [said("the hen")]} if kind is ChatBody else {"prompt": "the hen"}
    try:
        body = kind.model_validate_json(json.dumps(body | prompt))
        sample = sample_of(served.worker.session, body)
    except (InputError, ValidationError) as error:
        message, _ = complaint(error)
        assert message and "\n" not in message
    else:
        assert sample.options.draft in KINDS and (sample.options.gamma or 0) <= 32
        assert sample.options.draft_model is sample.options.plan is None


@pytest.mark.parametrize(
    ("host", "more", "status"),
    [
        ("localhost:8000", {}, 200),
        ("192.168.1.7:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("aibox:8000", {}, 200),
        ("evil.example:8000", {}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("localhost:8000@evil.example", {}, 403),
        ("localhost:8000", {"Origin": "http://localhost:8000"}, 200),
        ("localhost:8000", {"Origin": "http://localhost:3000"}, 403),
        ("localhost:8000", {"Origin": "http://evil.localhost:8000"}, 403),
        ("localhost:8000", {"Origin": "null"}, 403),
    ],
)
def test_no_page_of_another_site_may_use_the_server(
    host: str, more: dict[str, str], status: int, served: Served
) -> None:
    assert served.ask("/v1/models", Host=host, **more)[0] == status


def test_a_text_without_a_limit_goes_on_to_the_context(chat_model: Path) -> None:
    """Here at an IPv6 address, with a context of its own."""
    with serving("--model", str(chat_model), "--serve", "[::1]:0", "--context", "4000") as running:
        assert running.address.startswith("http://[::1]:")
        with closing(running.begin(TEXT, {**ENDLESS, "max_tokens": -1})):
            until(lambda: running.worker.jobs)
            assert running.worker.jobs[0].sample.source.longest == 4000


# ---- the queue ----


def test_requests_wait_in_order_and_a_full_queue_answers_429(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves frees its place; one that was still waiting has no text written."""
    jobs = served.worker.jobs
    gate = threading.Event()
    begun = recorded(
        monkeypatch,
        served.worker.session,
        "rounds",
        lambda sample, *_: gate.wait(60) and sample.prompt_tokens,
    )
    asking: list[HTTPConnection] = []
    for length in range(1, QUEUE + 5):
        asking.append(served.begin(TEXT, {"prompt": "x" * length}))
        until(lambda: len(jobs) == len(asking))
    with pytest.raises(openai.RateLimitError, match="the queue is full: try again") as refused:
        client.completions.create(model="tiny", prompt=PROMPT)
    assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
    asking[9].close()
    until(lambda: jobs[9].is_abandoned)
    asking.append(served.begin(TEXT, {"prompt": "x" * 99}))
    until(lambda: len(jobs) == len(asking))
    gate.set()
    until(lambda: not jobs)
    assert begun == sorted(begun) and len(begun) == len(asking) - 1


def test_the_pace_is_the_time_of_the_last_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which refused clients are told when to come back. Here it was the pace of a slow one."""
    monkeypatch.setattr(served.worker.returns, "pace", 1000.0)
    served.text(prompt=PROMPT, max_tokens=1)
    until(lambda: 0 < served.worker.returns.pace < 100)


@pytest.mark.parametrize(("pace", "seconds"), [(0.05, 0.05), (1.0, 6.0)])
def test_of_sixty_requests_at_once_two_retries_lose_none(pace: float, seconds: float) -> None:
    """Where four are written and twelve wait. Each text takes ``seconds``, and the one before them
    took ``pace``. OpenAI's client retries twice, when it is told to.
    """
    returns = Returns(slots=4, places=16, pace=pace)
    begun: list[float] = []  # of each text
    coming = [(0.0, client, 2) for client in range(60)]
    while coming:
        now, client, retries = heappop(coming)
        ahead = [each for each in begun if each + seconds > now]
        if len(ahead) < len(begun):
            returns.pace = seconds
        if len(ahead) < returns.places:
            begun.append(max([now, *(each + seconds for each in begun[-4:-3])]))
        else:
            assert retries, f"client {client} is lost"
            wait = returns.wait(now, len(ahead), ahead[0])
            heappush(coming, (now + wait, client, retries - 1))


def test_a_client_that_leaves_while_its_prompt_is_read_ends_between_two_chunks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = recorded(monkeypatch, Decoder, "prefill", lambda *_: time.sleep(0.1))
    prompt = [*range(40, 50)] * (CONTEXT // 20)
    with closing(served.begin(TEXT, {"prompt": prompt})):
        until(lambda: chunks)
    until(lambda: not served.worker.jobs)
    assert len(chunks) < len(prompt) // PREFILL_CHUNK


def test_a_client_that_leaves_before_its_stream_begins_ends_its_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the request ends with a response that was never sent."""
    samples = recorded(monkeypatch, served.worker.session, "rounds", lambda sample, *_: sample)
    request = Mock(
        headers={"content-length": 1},
        body=AsyncMock(return_value=json.dumps({**ENDLESS, "stream": True})),
        is_disconnected=AsyncMock(return_value=False),
    )
    asyncio.run(respond(served.worker, CompletionBody, request))
    until(lambda: not served.worker.jobs)
    assert samples[0].finish == "interrupted"


def test_what_fails_in_writing_is_printed_and_the_next_text_is_written(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client is told nothing of the failure."""
    with monkeypatch.context() as patch:
        patch.setattr(served.worker.session, "rounds", Mock(side_effect=IndexError("secret")))
        status, answer = served.ask(TEXT, {"prompt": PROMPT, "stream": True})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert re.search(r"Traceback(.|\n)*IndexError: secret", capsys.readouterr().err)
    assert answer["error"]["message"] == "the request could not be answered"
    assert served.text(prompt=PROMPT)


COMPANY: list[dict[str, Any]] = [
    {"prompt": PROMPT, "seed": 4, "temperature": 1.0, "max_tokens": 3},
    {"prompt": "the hen", "draft": "exit", "seed": 1, "temperature": 0.9, "max_tokens": 60},
    {"prompt": "the hen", "draft": "lookup", "seed": 1, "temperature": 0.9, "coupling": "ratio"},
    {"prompt": "a fox and " * 20, "draft": "none", "seed": 2, "temperature": 1.1, "ban": "e"},
    {"prompt": "in an inn", "adaptive": True, "coupling": "ratio", "seed": 3}
    | {"temperature": 0.7, "repetition_penalty": 1.2, "max_tokens": 70},
]


def test_of_many_requests_none_is_lost_or_mixed_up_and_nothing_is_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, streamed, aborted and malformed ones of four clients, in a random order. Each text is
    the same request's when it was alone; one whose client leaves ends early.
    """
    alone = [served.text(**each) for each in COMPANY]
    widths = recorded(
        monkeypatch, served.worker.session.model, "together", lambda calls, *plan: len(calls)
    )
    samples = recorded(monkeypatch, served.worker.session, "rounds", lambda sample, *_: sample)

    def ask(kind: str, which: int) -> None:
        if kind == "whole":
            assert served.text(**COMPANY[which]) == alone[which]
        elif kind == "streamed":
            events = events_of(served.ask(TEXT, {**COMPANY[which], "stream": True})[1])
            assert "".join(each["choices"][0]["text"] for each in events) == alone[which]
        elif kind == "malformed":
            assert served.ask(TEXT, b'{"prompt": ' * which)[0] == 400
        else:
            with closing(served.begin(TEXT, {**ENDLESS, "stream": which % 2 == 0})):
                time.sleep(0.05 * which)

    asked = [*product(["whole", "streamed", "aborted", "malformed"], range(len(COMPANY)))] * 2
    random.Random(0).shuffle(asked)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, *zip(*asked, strict=True)))
    assert max(widths) > 1 and len({*alone}) == len(COMPANY)
    until(lambda: not served.worker.jobs)
    assert {each.finish for each in samples if each.source.longest == CONTEXT} == {"interrupted"}
    # a thread may keep the last one
    until(lambda: gc.collect() >= 0 and sum(type(each) is Job for each in gc.get_objects()) <= 1)
