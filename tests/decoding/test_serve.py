"""The server: its texts are generate.py's, its streams a terminal's; requests neither end it nor reach each other."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from starlette.datastructures import Headers

import generate
from decoding.serve import app, worker
from decoding.serve.app import MAX_BODY, Guard
from decoding.serve.completions import write_completion
from decoding.serve.requests import Completion, Refusal, TextRequest
from decoding.serve.worker import MAX_WAITING, ClientGone, Job
from decoding.text import Text
from model import InputError
from tests.serving import CONTEXT, Served, chat_folder, events_of, serving, until
from weights.load import model_folder

PROMPT = "the hen and the"
SEEDED = {"temperature": 0.9, "seed": 3, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving("--model", str(folder), "--draft", "exit", "--max-new-tokens", "16") as running:
        yield running


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.address + "/v1", api_key="none", max_retries=0)


def generated(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """What generate.py writes."""
    capsys.readouterr()
    assert generate.main([PROMPT, "--model", str(folder), "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---- texts ----

REQUESTS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["--draft", "exit", "--max-new-tokens", "16"]),
    ({"draft": "lookup", "gamma": 3, **SEEDED}, ["--draft", "lookup", "--gamma", "3"]),
    ({"draft": "none", **SEEDED, "top_p": 0.9, "top_k": 50}, ["--draft", "none", "--top-p", "0.9", "--top-k", "50"]),
    ({"exit_layer": 3, "adaptive": True, **SEEDED}, ["--draft", "exit", "--exit-layer", "3", "--adaptive"]),
    ({"coupling": "ratio", "gamma": 2, **SEEDED}, ["--draft", "exit", "--coupling", "ratio", "--gamma", "2"]),
    ({"stop": ["e", "a"], "ban": "t", **SEEDED}, ["--draft", "exit", "--stop", "e", "--stop", "a", "--ban", "t"]),
    ({"repetition_penalty": 1.3, "min_p": 0.01, **SEEDED}, ["--repetition-penalty", "1.3", "--min-p", "0.01"]),
]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("asked", "options"), REQUESTS, ids=lambda value: " ".join(value)[:40])
def test_a_seeded_text_is_the_one_that_generate_writes(
    asked: dict[str, Any],
    options: list[str],
    stream: bool,
    chat: bool,
    client: openai.OpenAI,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seeded = ["--temperature", "0.9", "--seed", "3", "--max-new-tokens", "24"] if "seed" in asked else []
    draft = [] if "--draft" in options else ["--draft", "exit"]
    (wanted,) = generated(folder, capsys, *options, *draft, *seeded, "--chat" if chat else "--no-chat")
    text, finish, usage = asked_of(client, chat, stream, asked)
    assert text == wanted["text"] and wanted["text"]
    assert finish == {"eos": "stop"}.get(wanted["finish_reason"], wanted["finish_reason"])
    assert (usage.prompt_tokens, usage.completion_tokens) == (wanted["prompt_tokens"], len(wanted["tokens"]))


def asked_of(client: openai.OpenAI, chat: bool, stream: bool, asked: dict[str, Any]) -> tuple[str, str, Any]:
    """Text, finish reason and usage, by the real client."""
    standard = {
        name: value for name, value in asked.items() if name in ("temperature", "seed", "max_tokens", "stop", "top_p")
    }
    ours = {name: value for name, value in asked.items() if name not in standard}
    said = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    create = client.chat.completions.create if chat else client.completions.create
    if not stream:
        answer = create(model="tiny", extra_body=ours, **said, **standard)
        (choice,) = answer.choices
        return (choice.message.content if chat else choice.text), choice.finish_reason, answer.usage
    *chunks, last = create(
        model="tiny", extra_body=ours, stream=True, stream_options={"include_usage": True}, **said, **standard
    )
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    choices = [chunk.choices[0] for chunk in chunks]
    if chat:
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    pieces = [(choice.delta.content if chat else choice.text) or "" for choice in choices]
    *before, finish = [choice.finish_reason for choice in choices]
    assert set(before) <= {None}
    return "".join(pieces), finish, last.usage


def test_several_samples_are_generates_several_samples(
    client: openai.OpenAI, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--temperature", "0.9", "--seed", "3", "--max-new-tokens", "24"]
    wanted = generated(folder, capsys, "--no-chat", "--draft", "exit", "--num-samples", "3", *options)
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=3, **SEEDED)
    assert [choice.text for choice in answer.choices] == [sample["text"] for sample in wanted]
    assert len({choice.text for choice in answer.choices}) == 3
    chunks = client.completions.create(model="tiny", prompt=PROMPT, n=3, stream=True, **SEEDED)
    texts = Counter[int]()
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
        texts[chunk.choices[0].index] += 1
    assert streamed == [sample["text"] for sample in wanted] and min(texts.values()) > 1


class Terminal(io.StringIO):
    """Remembers how much had been written after each write."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = {0}

    def write(self, text: str) -> int:
        written = super().write(text)
        self.lengths.add(len(self.getvalue()))
        return written


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_shows_only_what_a_terminal_had_shown_after_some_round(
    seed: int, served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half characters, beginnings of stop strings and of banned words are held back: the model writes random bytes."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    rules = ["--max-new-tokens", "60", "--stop", "zz", "--stop", "\ufffd\ufffd\ufffd", "--ban", "th", "--ban", "he e"]
    options = ["--temperature", "1.2", "--seed", str(seed), "--draft", "lookup", "--no-chat", *rules]
    assert generate.main([PROMPT, "--model", str(folder), *options]) == 0
    monkeypatch.undo()
    asked = {"prompt": PROMPT, "seed": seed, "temperature": 1.2, "max_tokens": 60, "draft": "lookup", "stream": True}
    status, stream = served.ask(
        "/v1/completions", {**asked, "stop": ["zz", "\ufffd\ufffd\ufffd"], "ban": ["th", "he e"]}
    )
    *chunks, done = events_of(stream)
    assert (status, done) == (200, "[DONE]")
    shown = ""
    for chunk in chunks:
        shown += chunk["choices"][0]["text"]
        assert len(shown) in terminal.lengths, "the terminal never had just this much"
    assert shown + "\n" == terminal.getvalue() and len(chunks) > 3


def test_what_speculation_did_stands_beside_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, **SEEDED)
    told = answer.choices[0].model_extra["speculation"]
    assert told["repeat_with"] == "--seed 3 --coupling race"
    assert told["accepted"] <= told["drafted"] and told["drafted"] > 0 and told["tokens_per_round"] >= 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_text_of_no_characters_has_a_choice_too(stream: bool, client: openai.OpenAI) -> None:
    """The first token completes the stop string; it is to be a whole character."""
    firsts = [asked_of(client, True, False, {**SEEDED, "seed": seed, "max_tokens": 1})[0] for seed in range(9)]
    seed = next(seed for seed, first in enumerate(firsts) if first.isascii())
    text, finish, usage = asked_of(client, True, stream, {**SEEDED, "seed": seed, "stop": [firsts[seed]]})
    assert (text, finish, usage.completion_tokens) == ("", "stop", 1)


def test_the_model_is_listed_by_its_folders_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-5' does not exist here: there is tiny") as refused:
        client.models.retrieve("gpt-5")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_roles_parts_and_the_limits_of_the_context(client: openai.OpenAI, served: Served) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "hen"}]
    system = {"role": "developer", "content": "be brief"}
    whole = client.chat.completions.create(model="tiny", messages=[system, {"role": "user", "content": "the hen"}])
    split = client.chat.completions.create(model="tiny", messages=[system, {"role": "user", "content": parts}])
    assert whole.choices[0].message.content == split.choices[0].message.content
    ids = "x" * (CONTEXT - 3)  # three tokens are left
    status, answer = served.ask("/v1/completions", {"prompt": ids, "max_tokens": 1000, "draft": "lookup"})
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 3
    with pytest.raises(openai.BadRequestError, match=f"has {CONTEXT} tokens, the context {CONTEXT}") as refused:
        client.completions.create(model="tiny", prompt="x" * CONTEXT)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"


# ---- what is refused ----


def texts(**fields: Any) -> tuple[str, Any]:
    return "completions", {"prompt": "a", **fields}


def chats(*messages: Any, **fields: Any) -> tuple[str, Any]:
    return "chat/completions", {"messages": [*messages], **fields}


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# What is asked for, and the status, the field and a part of the message of the error.
WRONG: dict[str, tuple[tuple[str, Any], int, str | None, str]] = {
    "no messages": (("chat/completions", {}), 400, "messages", "messages is missing"),
    "a message that is text": (chats("hello"), 400, "messages[0]", "messages[0] must be an object"),
    "a tool": (chats({"role": "tool", "content": "a"}), 400, "messages[0].role", "found 'tool'"),
    "no content": (chats(said("a"), {"role": "assistant"}), 400, "messages[1].content", "is missing"),
    "content that is null": (chats(said(None)), 400, "messages[0].content", "is missing"),
    "content of no parts": (chats(said([])), 400, "messages[0].content", "at least 1 item"),
    "an image": (chats(said([{"type": "image_url"}])), 400, "messages[0].content[0].type", "must be 'text'"),
    "no prompt": (("completions", {}), 400, "prompt", "prompt is missing"),
    "an empty prompt": (("completions", {"prompt": " "}), 400, "prompt", "prompt is empty"),
    "two prompts": (("completions", {"prompt": ["a", "b"]}), 400, "prompt", "prompt must be a valid string"),
    "half a surrogate": (("completions", b'{"prompt": "\\ud800"}'), 400, None, "not valid JSON"),
    "another model": (texts(model="gpt-5"), 404, "model", "there is tiny"),
    "temperature in words": (texts(temperature="hot"), 400, "temperature", "temperature must be a valid number"),
    "temperature below 0": (texts(temperature=-1), 400, "temperature", "must be greater than or equal to 0, found -1"),
    "temperature NaN": (("completions", b'{"prompt": "a", "temperature": NaN}'), 400, "temperature", "finite"),
    "top_p 0": (texts(top_p=0), 400, "top_p", "top_p must be greater than 0"),
    "no tokens": (texts(max_tokens=0), 400, "max_tokens", "max_tokens must be greater than or equal to 1"),
    "a seed of 65 bits": (texts(seed=2**64), 400, "seed", "seed must be less than"),
    "no samples": (texts(n=0), 400, "n", "n must be greater than or equal to 1"),
    "too many stops": (texts(stop=["a"] * 17), 400, "stop", "stop must have at most 16 items"),
    "an empty stop": (texts(stop=""), 400, "stop[0]", "must have at least 1 character"),
    "a file of code": (texts(draft="evil.py:Drafter"), 400, "draft", "draft must be one of"),
    "a draft model": (texts(draft="model"), 400, "draft", "draft must be one of"),
    "a draft by plan": (texts(draft="skip"), 400, "draft", "draft must be one of"),
    "a plan's path": (texts(plan="/etc/passwd"), 400, "plan", "plan is not served here"),
    "a long draft": (texts(gamma=33), 400, "gamma", "gamma must be less than or equal to 32"),
    "no such exit": (texts(exit_layer=5), 400, "exit_layer", "exit_layer must be from 1 to 4, found 5"),
    "an exit of no use": (texts(draft="none", exit_layer=2), 400, "exit_layer", "no effect with draft none"),
    "bits of no use": (texts(draft="lookup", bits=4), 400, "bits", "bits has no effect with draft lookup"),
    "no such bits": (texts(bits=5), 400, "bits", "bits must be 4"),
    "a second width": (texts(draft="lowbit", bits=8), 400, "bits", "a second width needs another server"),
    "no such coupling": (texts(coupling="love"), 400, "coupling", "coupling must be 'ratio' or 'race'"),
    "probabilities": (texts(logprobs=3), 400, "logprobs", "logprobs is not served here"),
    "two best of": (texts(best_of=2), 400, "best_of", "best_of is not served here"),
    "JSON": (texts(response_format={"type": "json_object"}), 400, "response_format", "not served here"),
    "tools": (texts(tools=[{}]), 400, "tools", "tools is not served here"),
    "a list": (("completions", []), 400, None, "the body must be an object"),
    "no JSON": (("completions", b"{'a': 1}"), 400, None, "not valid JSON"),
    "a deep nest": (("completions", b"[" * 100_000), 400, None, "not valid JSON"),
    "too much": (texts(suffix="a" * MAX_BODY), 413, None, "more than 1048576 bytes"),
    "another page": (("nowhere", {}), 404, None, "Not Found"),
}


@pytest.mark.parametrize(("asked", "status", "param", "part"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_one_sentence_in_openais_shape(
    asked: tuple[str, Any], status: int, param: str | None, part: str, served: Served
) -> None:
    """Also of a stream: it does not begin before all is known to be well."""
    path, body = asked
    found, answer = served.ask(f"/v1/{path}", {**body, "stream": True} if isinstance(body, dict) else body)
    error = json.loads(answer)["error"]
    assert found == status and part in error["message"] and error["param"] == param
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and "--" not in error["message"]


def test_bits_without_kernels_are_refused_in_the_words_of_requests(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known only where the draft is made, which is when the request's turn has come."""
    monkeypatch.setattr(type(served.worker.setting.model), "fast_bits", (8,))
    status, answer = served.ask("/v1/completions", {"prompt": "a", "draft": "lowbit", "bits": 4, "stream": True})
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "bits") and "kernels for 8 bits only" in error["message"]


def test_low_bits_of_requests_are_those_of_the_command_line(folder: Path) -> None:
    with serving("--model", str(folder), "--draft", "exit", "--bits", "8") as running:
        assert running.worker.bits == 8
        assert running.ask("/v1/completions", {"prompt": "a", "draft": "lowbit", "max_tokens": 2})[0] == 200
        status, answer = running.ask("/v1/completions", {"prompt": "a", "draft": "lowbit", "bits": 4})
        assert status == 400 and b"bits must be 8: a second width needs another server" in answer


def test_options_that_say_nothing_are_let_pass(served: Served) -> None:
    idle = {"frequency_penalty": 0, "logit_bias": {}, "logprobs": None, "echo": False, "user": "me", "best_of": 1}
    idle |= {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    assert served.text(prompt=PROMPT, **idle) == served.text(prompt=PROMPT)


def test_the_methods_and_kinds_of_content_that_are_served(served: Served) -> None:
    assert served.ask("/v1/completions", method="GET")[0] == 405
    assert served.ask("/v1/models", {})[0] == 405
    form = {"Content-Type": "text/plain"}  # what a form of another site can send
    status, answer = served.ask("/v1/completions", {"prompt": "a"}, headers=form)
    assert status == 415 and "application/json" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "localhost:8000"}, None),
        ({"host": "127.0.0.1:1234"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "192.168.1.7:8000"}, None),
        ({"host": "My-Laptop:8000"}, None),
        ({"host": "evil.example:8000"}, "host"),
        ({"host": "localhost.evil.example"}, "host"),
        ({"host": "127.0.0.1.evil.example"}, "host"),
        ({"host": "localhost:8000@evil.example"}, "host"),
        ({"host": ""}, "host"),
        ({}, "host"),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, None),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, "origin"),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, "origin"),
        ({"host": "localhost:8000", "origin": "null"}, "origin"),
        ({"host": "localhost:8000", "sec-fetch-site": "same-origin"}, None),
        ({"host": "localhost:8000", "sec-fetch-site": "none"}, None),
        ({"host": "localhost:8000", "sec-fetch-site": "cross-site"}, "origin"),
        ({"host": "localhost:8000", "sec-fetch-site": "same-site"}, "origin"),
    ],
)
def test_no_page_of_another_site_may_use_the_server(headers: dict[str, str], code: str | None) -> None:
    refusal = Guard(lambda *_: None, "my-laptop").refusal(Headers(headers), "/v1/models")
    assert (refusal and refusal.code) == code


def test_a_page_of_another_site_may_link_to_the_page_but_not_read_it(served: Served) -> None:
    other = {"Sec-Fetch-Site": "cross-site"}
    assert served.ask("/", method="GET", headers=other)[0] == 200
    assert served.ask("/", method="GET", headers={**other, "Origin": "https://evil.example"})[0] == 403
    assert served.ask("/v1/models", method="GET", headers=other)[0] == 403
    assert served.ask("/", method="GET", headers={"Host": "evil.example"})[0] == 403
    assert served.ask("/v1/completions", {"prompt": "a"}, headers={"Origin": "https://evil.example"})[0] == 403


def test_a_body_that_breaks_off_ends_its_request_alone(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
    assert served.text(prompt=PROMPT) and capsys.readouterr().err == ""


# ---- the queue ----


@pytest.fixture
def gate(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, nothing is written."""
    opened, outcome = threading.Event(), served.worker._outcome

    def wait(job: Job) -> InputError | None:
        opened.wait(60)
        return outcome(job)

    monkeypatch.setattr(served.worker, "_outcome", wait)
    yield opened
    opened.set()
    until(lambda: served.idle)


def test_requests_wait_in_order_and_a_full_queue_answers_429(
    served: Served, gate: threading.Event, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, order = served.worker.writer.begin, []
    monkeypatch.setattr(served.worker.writer, "begin", lambda ids: (order.append(len(ids)), begin(ids)))
    with ThreadPoolExecutor(MAX_WAITING + 1) as pool:
        asking = []
        for number in range(MAX_WAITING + 1):
            asking.append(pool.submit(served.text, prompt="x" * (number + 1)))
            until(lambda: len(served.worker.jobs) == len(asking))
        with pytest.raises(openai.RateLimitError, match="16 requests wait already"):
            client.completions.create(model="tiny", prompt=PROMPT)
        gate.set()
        assert all(each.result() for each in asking)
    assert order == [number + 1 for number in range(MAX_WAITING + 1)]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_the_queue_frees_its_place(
    stream: bool, served: Served, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING", 1)
    connections = []
    for number in (1, 2):
        connections.append(served.begin("/v1/completions", {"prompt": PROMPT, "stream": stream}))
        until(lambda: len(served.worker.jobs) == number)  # noqa: B023
    assert served.ask("/v1/completions", {"prompt": PROMPT})[0] == 429
    jobs = [*served.worker.jobs]
    for connection, job in zip(connections, jobs, strict=True):
        connection.close()
        until(job.gone.is_set)
    with ThreadPoolExecutor() as pool:
        text = pool.submit(served.text, prompt=PROMPT)
        until(lambda: len(served.worker.jobs) == 3)
        gate.set()
        assert text.result()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/live"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_the_text_of_a_client_that_went_away_ends(path: str, stream: bool, served: Served) -> None:
    asked = {"prompt": PROMPT, "messages": [{"role": "user", "content": "a"}], "max_tokens": CONTEXT, "stream": stream}
    asked |= {"temperature": 1, "ban": "q"}  # q would end the text
    del asked["prompt" if "chat" in path else "messages"]
    if path == "/live":
        del asked["stream"]
    connection = served.begin(path, asked)
    until(lambda: served.worker.jobs)
    if stream or path == "/live":
        assert connection.recv(10)
    (job,) = served.worker.jobs
    connection.close()
    until(lambda: served.idle)
    assert job.gone.is_set()
    assert served.text(prompt=PROMPT)


def test_a_text_ends_with_the_round_in_which_its_client_left(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, over, check = [], threading.Event(), Job.check

    def leave_after_five(job: Job) -> None:
        rounds.append(job)
        if len(rounds) == 5:
            job.gone.set()
        try:
            check(job)
        except ClientGone:
            over.set()
            raise

    connection = served.begin(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": CONTEXT, "temperature": 1, "ban": "q"}
    )
    monkeypatch.setattr(Job, "check", leave_after_five)
    assert over.wait(60)
    until(lambda: served.idle)
    connection.close()
    assert len(rounds) == 5


def job_of(**fields: Any) -> Job:
    return Job(TextRequest(Completion(prompt="a", **fields), [1], 1, None), write_completion)  # type: ignore[arg-type]


def test_whatever_fails_in_writing_is_told_and_the_next_text_is_written(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a /secret/path\nand more")

    monkeypatch.setattr(served.worker.writer, "begin", fail)
    status, answer = served.ask("/v1/completions", {"prompt": PROMPT, "stream": True})
    monkeypatch.undo()
    assert status == 500 and b"secret" not in answer
    assert json.loads(answer)["error"]["type"] == "server_error"
    assert capsys.readouterr().err == "[a text could not be written: RuntimeError: a /secret/path and more]\n"
    assert served.text(prompt=PROMPT)


def test_what_fails_in_the_middle_of_a_stream_is_told_in_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write = served.worker.writer.write

    def fail(*positional: Any, **named: Any) -> Any:
        write(*positional, **named)
        raise InputError("the model went wrong")

    monkeypatch.setattr(served.worker.writer, "write", fail)
    with pytest.raises(openai.APIError, match="the model went wrong"):
        list(openai_stream(served))


def openai_stream(served: Served) -> Iterator[Any]:
    client = openai.OpenAI(base_url=served.address + "/v1", api_key="none", max_retries=0)
    yield from client.completions.create(model="tiny", prompt=PROMPT, stream=True, **SEEDED)


# ---- many at once ----


def test_of_a_hundred_requests_of_four_clients_none_is_lost_or_mixed_up_and_nothing_is_kept(served: Served) -> None:
    """Short, long, aborted, malformed and huge ones, at random; each text is what the same request got alone."""
    asked = [
        {"prompt": f"the {word} and", "seed": seed, "temperature": 1.0, "max_tokens": budget, "draft": draft}
        for seed, (word, budget, draft) in enumerate(
            (word, budget, draft)
            for word in ("hen", "fox")
            for budget in (3, 60)
            for draft in ("none", "lookup", "exit")
        )
    ]
    alone = [served.text(**each) for each in asked]
    before = None
    for half in range(2):
        with ThreadPoolExecutor(4) as pool:
            outcomes = [
                each for done in pool.map(lambda number: client_of(number, served, asked), range(4)) for each in done
            ]
        for kind, number, text in outcomes:
            if kind in ("whole", "stream"):
                assert text == alone[number]
        kinds = Counter(kind for kind, _, _ in outcomes)
        assert kinds.total() == 52 and len(kinds) == 5
        until(lambda: served.idle)
        assert served.text(**asked[0]) == alone[0]
        kept = held()
        if half:
            assert kept == before
        before = kept


def client_of(number: int, served: Served, asked: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    """Thirteen requests of one client, one after another: (kind, which was asked, the text)."""
    chance, outcomes = random.Random(number), []
    kinds = ["whole", "stream", "aborted", "malformed", "huge"]
    for kind in [*kinds, *chance.choices(kinds, k=8)]:
        which, text = chance.randrange(len(asked)), ""
        if kind == "whole":
            text = served.text(**asked[which])
        elif kind == "stream":
            status, stream = served.ask("/v1/completions", {**asked[which], "stream": True})
            assert status == 200
            *chunks, done = events_of(stream)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert done == "[DONE]"
        elif kind == "aborted":
            path = chance.choice(["/v1/completions", "/live"])
            extra = {} if path == "/live" else {"stream": chance.random() < 0.5}
            connection = served.begin(path, {**asked[which], "max_tokens": CONTEXT, "ban": "q", **extra})
            if extra.get("stream", True) and chance.random() < 0.7:
                connection.recv(1000)
            connection.close()
        elif kind == "malformed":
            assert served.ask("/v1/completions", b'{"prompt": ' * chance.randrange(1, 99))[0] == 400
        else:
            sizes = {2 * CONTEXT: 400, MAX_BODY: 413}
            size = chance.choice(list(sizes))
            assert served.ask("/v1/completions", {"prompt": "x" * size})[0] == sizes[size]
        outcomes.append((kind, which, text))
    return outcomes


def held() -> dict[str, int]:
    """How many objects there are of what could pile up."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    return dict(Counter(kind.__name__ for kind in kinds if issubclass(kind, (Job, Text, torch.Tensor))))


# ---- the live page's events ----


def test_the_page_is_told_every_round_and_its_two_texts(served: Served) -> None:
    asked = {"prompt": PROMPT, **SEEDED, "draft": "exit", "beside": True}
    status, stream = served.ask("/live", asked)
    events = events_of(stream)
    begin = events[0]
    assert status == 200 and begin["kind"] == "begin" and begin["race"] and not begin["greedy"]
    assert begin["columns"] == ["exit at layer 2 of 4", "plain"]
    labels: dict[str, str] = {}
    texts: list[list[int]] = [[], []]
    drafts: list[list[int]] = []
    clocks = [0.0, 0.0]
    finished = [None, None]
    for event in events[1:]:
        labels |= event["labels"]
        side = event["column"]
        if event["kind"] == "draft":
            assert side == 0
            drafts.append(event["tokens"])
        elif event["kind"] == "round":
            tokens = event["round"]["tokens"]
            drafted = [token["id"] for token in tokens if token["verdict"] != "own"]
            assert drafted == (drafts.pop() if drafted else []), "a draft is shown before its verdict"
            texts[side] += [token["id"] for token in tokens if token["verdict"] in ("accepted", "own")]
            assert all(str(token["id"]) in labels for token in tokens)
            assert all(0 <= token["p"] <= 1 and len(token["target_top"]) >= 5 for token in tokens)
            assert event["seconds"] >= clocks[side]
            clocks[side] = event["seconds"]
            finished[side] = event["finish"]
    assert finished[0] == finished[1] and finished[0] in ("length", "eos")
    assert texts[0] == texts[1] and len(texts[0]) >= 10
    answer = json.loads(served.ask("/v1/chat/completions", chat_of(asked))[1])
    written = b"".join(map(served.worker.writer.token_bytes, texts[0])).decode(errors="replace")
    assert written == answer["choices"][0]["message"]["content"]


def chat_of(asked: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked["prompt"]}]
    return {"messages": messages, **{name: asked[name] for name in asked if name not in ("prompt", "beside")}}


def test_the_page_is_told_what_goes_wrong(served: Served) -> None:
    for wrong in ({"exit_layer": 9}, {"n": 2}, {"stream": False}):
        status, answer = served.ask("/live", {"prompt": PROMPT, **wrong})
        assert status == 400 and json.loads(answer)["error"]["param"] == next(iter(wrong))


# ---- what the command line says ----


def test_what_a_request_does_not_say_is_as_on_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a drafter of the reader's own, which no request can name."""
    own = tmp_path / "own.py"
    own.write_text(
        "from decoding.drafters import NoDraft\n\n\ndef Mine(target, cache):\n    return NoDraft(target.vocab_size)\n"
    )
    said = ["--draft", f"{own}:Mine", "--temperature", "0.8", "--seed", "5", "--max-new-tokens", "9", "--stop", "zz"]
    (wanted,) = generated(folder, capsys, *said, "--no-chat")
    with serving("--model", str(folder), *said) as running:
        assert running.text(prompt=PROMPT) == wanted["text"]
        assert running.text(prompt=PROMPT, draft="none") == wanted["text"], "under the race the draft does not matter"
        status, answer = running.ask("/v1/completions", {"prompt": PROMPT, "draft": f"{own}:Mine"})
        assert status == 400 and b"draft must be one of" in answer


def test_a_draft_model_and_a_plan_of_the_command_line_serve_their_names(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"attn": [1], "mlp": [2], "gamma": 2}')
    with serving("--model", str(folder), "--draft", "skip", "--plan", str(plan)) as running:
        plain = running.text(prompt=PROMPT, draft="none", **SEEDED)
        assert running.text(prompt=PROMPT, draft="skip", **SEEDED) == plain
    with serving("--model", str(folder), "--draft", "model", "--draft-model", str(folder)) as running:
        made = [running.text(prompt=PROMPT, draft="model", gamma=gamma, **SEEDED) for gamma in (1, 2, 3)]
        assert made == [plain] * 3 and len(running.worker.made) == 1, "the draft model was loaded once"
        assert running.ask("/live", {"prompt": PROMPT})[0] == 200


def test_a_shipped_model_writes_what_generate_writes_whatever_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    model, prompt = model_folder("tiny-llama"), "Write a short story about a fox."
    options = ["--temperature", "0.8", "--seed", "1", "--max-new-tokens", "40", "--model", str(model)]
    assert generate.main([prompt, "--draft", "none", *options]) == 0
    wanted = capsys.readouterr().out
    with serving("--draft", "exit", *options) as running:
        for draft in ("none", "lookup", "exit", "skip"):
            asked = {"messages": [{"role": "user", "content": prompt}], "draft": draft}
            answer = json.loads(running.ask("/v1/chat/completions", asked)[1])
            assert answer["choices"][0]["message"]["content"] + "\n" == wanted


def test_the_context_is_what_there_is_memory_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = generate.Request(generate.parse_arguments(["--serve", "0", "--model", str(folder)]))
    assert app.context_length(request) == CONTEXT and not capsys.readouterr().err
    monkeypatch.setattr(app, "free_bytes", lambda device: 4_000_000)
    monkeypatch.setattr(app, "check_fits", lambda memory, device: None)
    positions = app.context_length(request)
    assert 1024 <= positions < CONTEXT
    assert capsys.readouterr().err == f"[context: {positions} of the model's {CONTEXT} tokens]\n"


def test_after_the_server_has_stopped_nothing_is_taken_on(folder: Path) -> None:
    with serving("--model", str(folder), "--draft", "none") as running:
        connection = running.begin(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": CONTEXT, "ban": "q", "stream": True}
        )
        assert connection.recv(10)
        running.server.should_exit = True
        rest = b""
        while part := connection.recv(1 << 16):
            rest += part
        connection.close()
        assert b"the server is stopping" in rest
        until(lambda: not running.worker.open and running.idle)

        async def late() -> None:
            with pytest.raises(Refusal, match="stopping"):
                running.worker.submit(job_of())

        asyncio.run(late())
