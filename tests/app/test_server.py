"""The server: its texts are generate.py's, any request is served or refused, and requests neither
end it nor reach each other.
"""

import gc
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.options import KINDS
from app.server.network import MAX_BODY
from app.server.requests import OPTIONS, ChatBody, CompletionBody, begin, complaint
from app.server.worker import Job
from model.decoder import PREFILL_CHUNK, Decoder
from model.errors import InputError
from tests.calls import recorded
from tests.commands import Run
from tests.serving import CONTEXT, Served, events_of, serving, until

PROMPT = "the hen and the"
QUEUE = 16
SEEDED = {"temperature": 0.9, "seed": 3, "max_tokens": 24}
# q would end the text
ENDLESS = {"prompt": PROMPT, "max_tokens": CONTEXT, "temperature": 1, "ban": "q"}
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[Served]:
    given = "--draft", "exit", "--max-new-tokens", "16", "--queue", str(QUEUE)
    given += "--allow-host", "aibox"
    with serving("--model", str(chat_model), *given) as running:
        yield running


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.address + "/v1", api_key="none", max_retries=0)


# ---- texts ----

# Fields of a request, the same on the command line, and whether it is a chat and a stream.
REQUESTS: list[tuple[dict[str, Any], str, bool, bool]] = [
    ({"max_tokens": 24}, "", True, True),
    ({"draft": "lookup", "gamma": 3, **SEEDED}, "--draft lookup --gamma 3", True, False),
    ({"draft": "none", "top_p": 0.9, **SEEDED}, "--draft none --top-p 0.9", False, True),
    ({"exit_layer": 3, "adaptive": True, **SEEDED}, "--exit-layer 3 --adaptive", False, False),
    ({"coupling": "ratio", "gamma": 2, **SEEDED}, "--coupling ratio --gamma 2", True, True),
    ({"stop": ["e", "a"], "ban": "t", **SEEDED}, "--stop e --stop a --ban t", True, False),
    (
        {"repetition_penalty": 1.3, "min_p": 0.01, "frequency_penalty": 0.4, **SEEDED},
        "--repetition-penalty 1.3 --min-p 0.01 --frequency-penalty 0.4",
        False,
        True,
    ),
]


@pytest.mark.parametrize(("asked", "options", "chat", "stream"), REQUESTS)
def test_a_seeded_text_is_the_one_that_generate_writes(
    asked: dict[str, Any],
    options: str,
    chat: bool,
    stream: bool,
    client: openai.OpenAI,
    chat_model: Path,
    run: Run,
) -> None:
    seeded = "--temperature 0.9 --seed 3" if "seed" in asked else ""
    given = f"--draft exit --max-new-tokens 24 {seeded} {options} --{'' if chat else 'no-'}chat"
    wanted = run(PROMPT, "--model", chat_model, "--json", *given.split()).result
    text, finish, usage = asked_of(client, chat, stream, asked)
    assert text == wanted["text"] and wanted["text"]
    assert finish == {"eos": "stop"}.get(wanted["finish_reason"], wanted["finish_reason"])
    counts = wanted["prompt_tokens"], len(wanted["tokens"])
    assert (usage.prompt_tokens, usage.completion_tokens) == counts


def asked_of(
    client: openai.OpenAI, chat: bool, stream: bool, asked: dict[str, Any]
) -> tuple[str, str, Any]:
    """Text, finish reason and usage, by the real client."""
    prompt = {"messages": [said(PROMPT)]} if chat else {"prompt": PROMPT}
    create = client.chat.completions.create if chat else client.completions.create
    if not stream:
        answer = create(model="tiny", extra_body=asked, **prompt)
        (choice,) = answer.choices
        return (choice.message.content if chat else choice.text), choice.finish_reason, answer.usage
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = create(model="tiny", extra_body=asked, **usage, **prompt)
    choices = [chunk.choices[0] for chunk in chunks]
    assert last.id.startswith("chatcmpl-" if chat else "cmpl-")
    assert last.choices == [] and all(choice.finish_reason is None for choice in choices[:-1])
    assert last.usage.model_extra["speculation"]["tokens_per_round"] >= 1
    pieces = [(choice.delta.content if chat else choice.text) or "" for choice in choices]
    return "".join(pieces), choices[-1].finish_reason, last.usage


def test_the_model_is_listed_by_its_folders_name(served: Served, client: openai.OpenAI) -> None:
    (listed,) = client.models.list()
    assert served.ask("/health") == (200, {"status": "ok"})
    assert listed.id == client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt-5' does not exist here: there is tiny"):
        client.models.retrieve("gpt-5")


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
    asked = {**form, "temperature": 0.8, "seed": 2, "max_tokens": 64}
    expected = f"({expected})q?"
    assert re.fullmatch(expected, served.text(prompt=PROMPT, **asked))
    _, answer = served.ask(CHAT, {"messages": [said(PROMPT)], **asked})
    assert re.fullmatch(expected, answer["choices"][0]["message"]["content"])


def test_masks_that_take_too_long_end_the_text_as_an_error_and_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.worker.session, "mask_seconds", 0.002)
    slow = {"prompt": PROMPT, "structured_outputs": {"regex": "(a|b|c|d){400}"}, "max_tokens": 450}
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(served.text, prompt=PROMPT)
        status, answer = served.ask(TEXT, slow)
    assert status == 400 and "masks took more than 0.002 s" in answer["error"]["message"]
    assert beside.result() == served.text(prompt=PROMPT)


def test_a_traced_stream_tells_the_tokens_of_its_text(served: Served) -> None:
    asked = {"prompt": PROMPT, **SEEDED, "max_tokens": 99, "ban": ["e", "a", "o", "n"]}
    text = served.text(**asked)
    asked |= {"stream": True, "trace": True}
    *rounds, _ = [event["choices"][0] for event in events_of(served.ask(TEXT, asked)[1])]
    assert any(each["trace"]["retracted"] for each in rounds)
    kept = kept_in(rounds)
    written = b"".join(map(served.worker.session.tokenizer.token_bytes, kept))
    assert written.decode(errors="replace") == text == "".join(each["text"] for each in rounds)


def kept_in(rounds: list[Any]) -> list[int]:
    """The tokens of a text, by the trace of its rounds."""
    kept: list[int] = []
    for each in rounds:
        tokens = each["trace"]["tokens"]
        kept += [token["id"] for token in tokens if token["verdict"] in ("accepted", "own")]
        del kept[len(kept) - each["trace"]["retracted"] :]
    return kept


@torch.inference_mode()
def test_log_probabilities_are_the_targets_own_with_any_draft(served: Served) -> None:
    """Streamed or whole, also where tokens are taken back."""
    asked = {"prompt": PROMPT, **SEEDED, "max_tokens": 60, "ban": ["e", "a"], "logprobs": 2}
    plain, drafted = (
        served.ask(TEXT, {**asked, "draft": draft})[1]["choices"][0] for draft in ("none", "exit")
    )
    assert plain == drafted
    whole = plain["logprobs"]
    traced = {**asked, "stream": True, "trace": True}
    rounds = [event["choices"][0] for event in events_of(served.ask(TEXT, traced)[1])]
    for name, told in whole.items():
        assert told == [each for part in rounds for each in part["logprobs"][name]]
    session = served.worker.session
    prompt, kept = session.tokenizer.encode(PROMPT), kept_in(rounds[:-1])
    logits = session.model.model(torch.tensor([[*prompt, *kept]]))[0, len(prompt) - 1 : -1]
    wanted = logits.double().log_softmax(-1)
    own = wanted[torch.arange(len(kept)), kept].tolist()
    assert whole["token_logprobs"] == pytest.approx(own, abs=1e-4)
    likeliest = [max(each.values()) for each in whole["top_logprobs"]]
    assert likeliest == pytest.approx(wanted.amax(-1).tolist(), abs=1e-4)
    assert plain["text"][whole["text_offset"][-1] :] == whole["tokens"][-1]


def test_log_probabilities_have_the_forms_of_openais_client(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "max_tokens": 9, "extra_body": {"ban": "q"}}
    chat = client.chat.completions.create(
        messages=[said(PROMPT)], logprobs=True, top_logprobs=3, **asked
    )
    content = chat.choices[0].logprobs.content
    assert bytes(byte for each in content for byte in each.bytes).decode(errors="replace") == (
        chat.choices[0].message.content
    )
    assert [len(each.top_logprobs) for each in content] == [3] * 9
    text = client.completions.create(prompt=PROMPT, logprobs=0, **asked).choices[0].logprobs
    assert len(text.token_logprobs) == 9 and text.text_offset[0] == 0


def test_a_conversation_goes_on_where_its_cache_is(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = [[said(f"{name} and the hen " * 9)] for name in ("ann", "bob")]
    for _ in range(2):
        read = recorded(
            monkeypatch, type(served.worker.together), "prefill", lambda _, ids, *at: ids.shape[1]
        )
        for talk in talks:
            _, answer = served.ask(CHAT, {"messages": talk, "max_tokens": 4})
            talk += [answer["choices"][0]["message"], said("why")]
        monkeypatch.undo()
    assert max(read) < 40, "of the second turn only what is new"


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
    (TEXT, {"prompt": [5, -1]}, 400, "prompt", "list of token ids"),
    (TEXT, {"prompt": [5, 1 << 20]}, 400, None, "some outside 0 to"),
    (TEXT, {"prompt": ""}, 400, "prompt", "give one text that is not"),
    (TEXT, {"model": "gpt-5"}, 404, None, "there is tiny"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "temperature", "at least 0"),
    (TEXT, {"temperature": "0.7"}, 400, "temperature", "must be a number, found '0.7'"),
    (TEXT, {"top_p": 2.0}, 400, "top_p", "top_p must be above 0"),
    (TEXT, {"frequency_penalty": 3.0}, 400, "frequency_penalty", "penalty must be from -2 to 2"),
    (TEXT, {"stream_options": {"usage": True}}, 400, None, "stream_options.usage"),
    (TEXT, {"logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
    (TEXT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "equal to 1"),
    (TEXT, {"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
    (TEXT, {"stop": ["a", ""]}, 400, "stop", "give stop strings and banned words as"),
    (TEXT, {"stop": ["a", 3]}, 400, "stop.1", "valid string"),
    (TEXT, {"ban": ["b" * 257]}, 400, "ban.0", "at most 256 characters"),
    (TEXT, {"draft": "evil.py:Drafter"}, 400, "draft", "should be 'auto', 'none'"),
    (TEXT, {"draft": "model"}, 400, "draft_model", "needs draft_model"),
    (TEXT, {"exit_layer": 5}, 400, None, "exit layer 5 is not in 1..4"),
    (TEXT, {"draft": "lookup", "exit_layer": 4}, 400, "exit_layer", "has no effect with draft loo"),
    (TEXT, {"gamma": 33}, 400, "gamma", "less than or equal to 32"),
    *((TEXT, {name: 3}, 400, name, f"{name}: it is not supported: leave it out") for name in (
        "n", "plan", "bits", "draft_model", "tools", "json_schema", "suffix"
    )),
    *((TEXT, {name: False}, 400, name, "leave it out") for name in (
        "add_generation_prompt", "skip_special_tokens", "do_sample", "enable_thinking"
    )),
    (TEXT, {"response_format": {"type": "json_schema"}}, 400, "response_format", "with a schema"),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
     400, None, "JSON schema: Unimplemented keys"),
    (TEXT, {"structured_outputs": {"json": "{"}}, 400, None, "Invalid JSON"),
    (TEXT, {"structured_outputs": {"json": {"not": {}}}}, 400, None, "Unimplemented keys"),
    (TEXT, {"structured_outputs": {"regex": "("}}, 400, None, "regular expression: unclosed group"),
    (TEXT, {"structured_outputs": {"regex": "a", "json": {}}}, 400, None, "give one of"),
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
    assert found == status and (param is None or error["param"] == param)
    assert error["type"] == "invalid_request_error" and part in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and "--" not in error["message"]


def test_fields_that_say_nothing_are_let_pass(served: Served) -> None:
    """Also those of answers that clients send back, and contents in parts."""
    idle = {"frequency_penalty": 0, "logit_bias": {}, "logprobs": None, "echo": False, "best_of": 1}
    idle |= {"user": "me", "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"}
    idle |= {"top_k": -1, "max_tokens": -1, "min_tokens": 0, "prompt_cache_key": "a"}
    idle |= {"skip_special_tokens": True, "add_generation_prompt": True}
    assert served.text(prompt=PROMPT, **idle) == served.text(prompt=PROMPT)
    parts = [{"type": "text", "text": "the ", "cache_control": {"type": "ephemeral"}}]
    parts += [{"type": "text", "text": "hen"}]
    null = {"stream": None, "trace": None, "logprobs": None, "top_logprobs": 0}
    empty = {"refusal": None, "tool_calls": None, "annotations": [], "name": "fox"}
    plain, other = (
        ChatBody(messages=messages, **more)
        for messages, more in (
            ([said("be brief", role="system"), said("the hen")], {}),
            ([said("be brief", role="developer"), said(parts, **empty)], null),
        )
    )
    session = served.worker.session
    assert begin(session, plain).source.tokens == begin(session, other).source.tokens


def test_a_prompt_may_be_a_text_or_token_ids_alone_or_in_a_list(served: Served) -> None:
    ids = served.worker.session.tokenizer.encode(PROMPT)
    assert len({served.text(prompt=prompt) for prompt in (PROMPT, [PROMPT], ids, [ids])}) == 1


def test_variables_reach_the_chat_template(served: Served) -> None:
    body = ChatBody(messages=[said("the hen")], chat_template_kwargs={"tone": "mild"})
    session = served.worker.session
    prompt = session.tokenizer.decode(begin(session, body).source.tokens)
    assert prompt.endswith("assistant: (mild)")


def test_a_request_without_a_limit_goes_on_to_the_end_of_the_context(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = served.worker.session
    monkeypatch.setattr(session, "options", replace(session.options, max_new_tokens=None))
    assert begin(session, CompletionBody(prompt="a")).source.longest == CONTEXT


LIKELY = ["a", "exit", "none", "race", "x.py:C", "", 0, 1, 3, 0.5, -1, True, None, ["a"]]
VALUES = st.recursive(
    st.one_of(st.sampled_from(LIKELY), st.integers(), st.floats(), st.text(max_size=5)),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(), value, max_size=3),
)
NAMES = [*OPTIONS, "model", "n", "stream", "stop", "ban", "max_tokens", "draft", "gamma", "plan"]


@given(
    kind=st.sampled_from([ChatBody, CompletionBody]),
    body=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
)
def test_any_fields_are_a_text_or_a_refusal(
    kind: type[ChatBody | CompletionBody], body: dict[str, Any], served: Served
) -> None:
    prompt = {"messages": [said("the hen")]} if kind is ChatBody else {"prompt": "the hen"}
    try:
        sample = begin(served.worker.session, kind.model_validate_json(json.dumps(body | prompt)))
    except (InputError, ValidationError) as error:
        message, _ = complaint(error)
        assert message and "\n" not in message
    else:
        assert sample.options.draft in KINDS and (sample.options.gamma or 0) <= 32
        assert sample.options.draft_model is sample.options.plan is None


def test_an_ipv6_address_can_be_served(chat_model: Path) -> None:
    with serving("--model", str(chat_model), "--serve", "[::1]:0") as running:
        assert running.address.startswith("http://[::1]:")
        assert running.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", None, 200),
        ("192.168.1.7:8000", None, 200),
        ("[::1]:8000", None, 200),
        ("aibox:8000", None, 200),
        ("evil.example:8000", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("localhost:8000@evil.example", None, 403),
        ("localhost:8000", "http://localhost:8000", 200),
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "http://evil.localhost:8000", 403),
        ("localhost:8000", "null", 403),
    ],
)
def test_no_page_of_another_site_may_use_the_server(
    host: str, origin: str | None, status: int, served: Served
) -> None:
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    found, answer = served.ask("/v1/models", **headers)
    assert found == status
    assert status == 200 or "start it with --allow-host NAME" in answer["error"]["message"]


def test_what_a_request_does_not_say_is_as_on_the_command_line(
    chat_model: Path, tmp_path: Path, run: Run
) -> None:
    """Also a drafter of the reader's own, which no request can name, and a system message."""
    own = tmp_path / "own.py"
    own.write_text(
        "from decoding.drafters import NoDraft\n\n\ndef Mine(target, cache):\n    return"
        " NoDraft()\n"
    )
    sampling = ["--temperature", "0.8", "--seed", "5", "--max-new-tokens", "9", "--stop", "zz"]
    options = ["--draft", f"{own}:Mine", *sampling, "--system", "hm", "--context", "64"]
    wanted = run(PROMPT, "--model", chat_model, "--json", *options).result
    with serving("--model", str(chat_model), *options) as running:
        for more in ({}, {"draft": "none"}):
            _, answer = running.ask(CHAT, {"messages": [said(PROMPT)], **more})
            assert answer["choices"][0]["message"]["content"] == wanted["text"]
        _, answer = running.ask(TEXT, {"prompt": "the hen " * 30})
        assert "64 are used" in answer["error"]["message"]


# ---- the queue ----


def test_requests_wait_in_order_and_a_full_queue_answers_429(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves frees its place; one that was still waiting has no text written."""
    gate = threading.Event()
    order = recorded(
        monkeypatch,
        served.worker.session,
        "rounds",
        lambda sample, *_: gate.wait(60) and len(sample.source.tokens),
    )
    leaving = served.begin(TEXT, {"prompt": "a"})
    until(lambda: len(served.worker.jobs) == 1)
    with served.begin(TEXT, {"prompt": "x" * 99}):
        until(lambda: len(served.worker.jobs) == 2)
    until(lambda: served.worker.jobs[1].is_abandoned)
    with ThreadPoolExecutor(QUEUE + 4) as pool:
        asking = []
        for length in range(2, QUEUE + 6):
            if length == QUEUE + 5:
                refused = pytest.raises(openai.RateLimitError, match="the queue is full: try again")
                with refused as told:
                    client.completions.create(model="tiny", prompt=PROMPT)
                assert int(told.value.response.headers["Retry-After"]) >= 1
                leaving.close()
                until(lambda: served.worker.jobs[0].is_abandoned)
            asking.append(pool.submit(served.text, prompt="x" * length))
            until(lambda: len(served.worker.jobs) == 2 + len(asking))
        gate.set()
        assert all(each.result() for each in asking)
    assert order == sorted(order) and len(order) == 1 + len(asking)


def test_the_clients_own_retries_lose_no_request(
    chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve at once, where four are written and none waits."""
    given = "--queue", "0", "--max-new-tokens", "8"
    with serving("--model", str(chat_model), *given) as running, ThreadPoolExecutor(12) as pool:
        client = openai.OpenAI(base_url=running.address + "/v1", api_key="none")
        create = partial(client.completions.create, model="tiny", prompt=PROMPT)
        answers = [pool.submit(create, seed=seed) for seed in range(12)]
        assert all(answer.result().usage.completion_tokens for answer in answers)
    assert any(line.endswith(" 429") for line in caplog.messages)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_the_text_of_a_client_that_went_away_ends_alone(path: str, served: Served) -> None:
    """While another is written."""
    asked = {**ENDLESS, "stream": path == CHAT}
    if path == CHAT:
        asked["messages"] = [said(asked.pop("prompt"))]
    with served.begin(TEXT, {**ENDLESS, "stream": True}) as other:
        assert other.recv(10)
        with served.begin(path, asked):
            until(lambda: len(served.worker.jobs) == 2 and served.worker.jobs[1].writing)
            job = served.worker.jobs[1]
        until(lambda: job.writing.dead)
        assert served.worker.together.loops == [served.worker.jobs[0].writing]
        assert job.is_abandoned and other.recv(10)
    until(lambda: not served.worker.jobs)


def test_a_client_that_leaves_while_its_prompt_is_read_ends_between_two_chunks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = recorded(monkeypatch, Decoder, "prefill", lambda *_: time.sleep(0.1))
    prompt = [*range(40, 50)] * (CONTEXT // 20)
    with served.begin(TEXT, {"prompt": prompt}):
        until(lambda: chunks)
    until(lambda: not served.worker.jobs)
    assert len(chunks) < len(prompt) // PREFILL_CHUNK


def test_what_fails_in_writing_is_logged_and_the_next_text_is_written(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a /secret/path\nand more")

    monkeypatch.setattr(served.worker.session, "rounds", fail)
    status, answer = served.ask(TEXT, {"prompt": PROMPT, "stream": True})
    monkeypatch.undo()
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in str(answer)
    told = "[a request could not be answered: RuntimeError: a /secret/path and more]\n"
    assert capsys.readouterr().err.startswith(told)
    assert served.text(prompt=PROMPT)
    logged = [line.rpartition(" - ")[2] for line in caplog.messages]
    assert logged == [f'"POST {TEXT} HTTP/1.1" {status}' for status in (500, 200)]


COMPANY: list[dict[str, Any]] = [
    {"prompt": PROMPT, "seed": 4, "temperature": 1.0, "max_tokens": 3},
    {"prompt": "the hen", "draft": "exit", "seed": 1, "temperature": 0.9, "max_tokens": 60},
    {"prompt": "the hen", "draft": "lookup", "seed": 1, "temperature": 0.9, "coupling": "ratio"},
    {"prompt": "a fox and " * 20, "draft": "none", "seed": 2, "temperature": 1.1, "ban": "e"},
    {"prompt": "in an inn", "exit_layer": 3, "adaptive": True, "coupling": "ratio", "seed": 3}
    | {"temperature": 0.7, "repetition_penalty": 1.2, "max_tokens": 70},
]


def test_of_many_requests_none_is_lost_or_mixed_up_and_nothing_is_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, streamed, aborted and malformed ones of four clients, at random; each text is the same
    request's when it was alone.
    """
    alone = [served.text(**each) for each in COMPANY]
    widths = recorded(
        monkeypatch, served.worker.session.model, "together", lambda calls, *plan: len(calls)
    )

    def client_of(number: int) -> None:
        chance = random.Random(number)
        for kind in ["whole", "stream", "aborted", "malformed"] * 2:
            which = chance.randrange(len(COMPANY))
            if kind == "whole":
                assert served.text(**COMPANY[which]) == alone[which]
            elif kind == "stream":
                events = events_of(served.ask(TEXT, {**COMPANY[which], "stream": True})[1])
                assert "".join(each["choices"][0]["text"] for each in events) == alone[which]
            elif kind == "malformed":
                assert served.ask(TEXT, b'{"prompt": ' * chance.randrange(1, 99))[0] == 400
            else:
                with served.begin(TEXT, {**ENDLESS, "stream": chance.random() < 0.5}):
                    time.sleep(chance.choice([0, 0.1]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client_of, range(8)))
    assert max(widths) > 1 and len({*alone}) == len(COMPANY)
    # a thread may keep the last one
    until(lambda: gc.collect() >= 0 and sum(type(each) is Job for each in gc.get_objects()) <= 1)
