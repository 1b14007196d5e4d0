"""The server: its texts are generate.py's, its streams a terminal's; requests neither end it nor
reach each other.
"""

import gc
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import generate
from app import request
from app.chooser import Drafting
from app.options import make_parser
from app.server import app, worker
from app.server.app import MAX_BODY, MAX_CONNECTIONS
from app.server.worker import MAX_WAITING, Job
from decoding.text import Text
from tests.calls import recorded
from tests.commands import Run
from tests.serving import CONTEXT, Served, events_of, serving, until
from weights.memory import CPU_BUFFERS

PROMPT = "the hen and the"
SEEDED = {"temperature": 0.9, "seed": 3, "max_tokens": 24}
# q would end the text
ENDLESS = {"prompt": PROMPT, "max_tokens": CONTEXT, "temperature": 1, "ban": "q"}


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[Served]:
    with serving(
        "--model", str(chat_model), "--draft", "exit", "--max-new-tokens", "16"
    ) as running:
        yield running


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.address + "/v1", api_key="none", max_retries=0)


# ---- texts ----

# Fields of a request, the same on the command line, and whether it is a chat and a stream.
REQUESTS: list[tuple[dict[str, Any], str, bool, bool]] = [
    ({}, "--max-new-tokens 16", True, True),
    ({"draft": "lookup", "gamma": 3, **SEEDED}, "--draft lookup --gamma 3", True, False),
    (
        {"draft": "none", "top_p": 0.9, "top_k": 50, **SEEDED},
        "--draft none --top-p 0.9 --top-k 50",
        False,
        True,
    ),
    ({"exit_layer": 3, "adaptive": True, **SEEDED}, "--exit-layer 3 --adaptive", False, False),
    ({"coupling": "ratio", "gamma": 2, **SEEDED}, "--coupling ratio --gamma 2", True, True),
    ({"stop": ["e", "a"], "ban": "t", **SEEDED}, "--stop e --stop a --ban t", True, False),
    (
        {"repetition_penalty": 1.3, "min_p": 0.01, **SEEDED},
        "--repetition-penalty 1.3 --min-p 0.01",
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
    seeded = "--temperature 0.9 --seed 3 --max-new-tokens 24 " if "seed" in asked else ""
    given = f"--draft exit {seeded}{options} {'--chat' if chat else '--no-chat'}".split()
    wanted = run(PROMPT, "--model", chat_model, "--json", *given).result
    text, finish, usage = asked_of(client, chat, stream, asked)
    assert text == wanted["text"] and wanted["text"]
    assert finish == {"eos": "stop"}.get(wanted["finish_reason"], wanted["finish_reason"])
    assert usage.prompt_tokens == wanted["prompt_tokens"]
    assert usage.completion_tokens == len(wanted["tokens"])


def asked_of(
    client: openai.OpenAI, chat: bool, stream: bool, asked: dict[str, Any]
) -> tuple[str, str, Any]:
    """Text, finish reason and usage, by the real client."""
    said = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    create = client.chat.completions.create if chat else client.completions.create
    if not stream:
        answer = create(model="tiny", extra_body=asked, **said)
        (choice,) = answer.choices
        return (choice.message.content if chat else choice.text), choice.finish_reason, answer.usage
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = create(model="tiny", extra_body=asked, **usage, **said)
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    choices = [chunk.choices[0] for chunk in chunks]
    told = choices[-1].model_extra["speculation"]
    assert told["tokens_per_round"] >= 1
    assert told["repeat_with"].startswith("--seed 3" if "seed" in asked else "")
    if chat:
        roles = [choice.delta.role for choice in choices]
        assert roles == ["assistant"] + [None] * (len(choices) - 1)
    assert all(choice.finish_reason is None for choice in choices[:-1])
    pieces = [(choice.delta.content if chat else choice.text) or "" for choice in choices]
    return "".join(pieces), choices[-1].finish_reason, last.usage


def test_the_model_is_listed_by_its_folders_name(client: openai.OpenAI) -> None:
    (listed,) = client.models.list()
    assert listed.id == client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt-5' does not exist here: there is tiny"):
        client.models.retrieve("gpt-5")


def test_a_message_in_parts_is_read_as_the_whole_one(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "hen"}]
    system = {"role": "developer", "content": "be brief"}
    whole, split = (
        client.chat.completions.create(model="tiny", messages=[system, said(content)])
        for content in ("the hen", parts)
    )
    assert whole.choices[0].message.content == split.choices[0].message.content


# ---- refusals ----


def texts(**fields: Any) -> tuple[str, Any]:
    return "completions", {"prompt": "a", **fields}


def chats(*messages: Any, **fields: Any) -> tuple[str, Any]:
    return "chat/completions", {"messages": [*messages], **fields}


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# The request, and the status, the field and a part of the message of the error.
WRONG: dict[str, tuple[tuple[str, Any], int, str | None, str]] = {
    "no messages": (("chat/completions", {}), 400, "messages", "messages: Field required"),
    "a tool": (chats({"role": "tool", "content": "a"}), 400, "messages", "should be 'system'"),
    "an image": (chats(said([{"type": "image_url"}])), 400, "messages", "should be 'text'"),
    "an empty prompt": (("completions", {"prompt": ""}), 400, "prompt", "at least 1 character"),
    "another model": (texts(model="gpt-5"), 404, "model", "there is tiny"),
    "temperature NaN": (
        ("completions", b'{"prompt": "a", "temperature": NaN}'),
        400,
        "temperature",
        "at least 0",
    ),
    "an empty stop": (texts(stop=["a", ""]), 400, "stop", "give stop strings and banned words as"),
    "an empty ban": (texts(ban=[""]), 400, "ban", "give stop strings and banned words as lists"),
    "a file of code": (texts(draft="evil.py:Drafter"), 400, "draft", "draft must be one of none, "),
    "a draft model": (texts(draft="model"), 400, "draft", "found 'model'"),
    "costs to be measured": (
        texts(draft="auto"),
        400,
        "draft",
        "found 'auto'",
    ),
    "no such exit": (texts(exit_layer=5), 400, None, "exit layer 5 is not in 1..4"),
    "no effect": (
        texts(draft="lookup", exit_layer=4),
        400,
        "exit_layer",
        "exit_layer has no effect with draft lookup",
    ),
    "bits": (texts(draft="lowbit", bits=8), 400, "bits", "bits: it is not supported"),
    "a number as a string": (
        texts(temperature="0.7"),
        400,
        "temperature",
        "temperature must be a number, found '0.7'",
    ),
    "no list of strings": (texts(stop=["a", 3]), 400, "stop", "stop must be a list of strings"),
    "too long bans": (texts(ban=["a", "b" * 8192]), 400, "ban", "ban must have at most 8192 char"),
    "too long a draft": (texts(gamma=33), 400, "gamma", "gamma must be at most 32, found 33"),
    "no file of the server": (texts(plan="p.json"), 400, "plan", "plan: it is not supported"),
    "probabilities": (
        texts(logprobs=3),
        400,
        "logprobs",
        "logprobs: it is not supported: leave it out",
    ),
    "the likeliest token's probability": (
        texts(logprobs=0),
        400,
        "logprobs",
        "logprobs: it is not supported: leave it out",
    ),
    "no texts": (texts(n=0), 400, "n", "n: it is not supported"),
    "a chat's broken schema": (
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "structured_outputs": {"json": "{"},
            },
        ),
        400,
        None,
        "json_schema is no JSON",
    ),
    "two grammars": (
        texts(structured_outputs={"regex": "a", "choice": ["b"]}),
        400,
        "structured_outputs",
        "give one of json, regex, choice and grammar",
    ),
    "two formats": (
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
        ),
        400,
        "structured_outputs",
        "give one of json, regex, choice and grammar",
    ),
    "no share": (texts(top_p=2.0), 400, "top_p", "top-p must be above 0"),
    "a field without a name": (texts(**{"": 1}), 400, "", "'': it is not supported"),
    "a list": (("completions", []), 400, None, "the body: Input should be an object"),
    "too much": (texts(suffix="a" * MAX_BODY), 413, None, "up to 1048576 bytes"),
    "another page": (("nowhere", {}), 404, None, "Not Found"),
}


@pytest.mark.parametrize(("asked", "status", "param", "part"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_one_sentence_in_openais_shape(
    asked: tuple[str, Any], status: int, param: str | None, part: str, served: Served
) -> None:
    """Also of a stream: it does not begin before all is known to be well."""
    path, body = asked
    sent = {**body, "stream": True} if isinstance(body, dict) else body
    found, error = served.refusal(f"/v1/{path}", sent)
    assert (found, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"} and part in error["message"]
    assert "\n" not in error["message"] and "--" not in error["message"]


def test_options_that_say_nothing_are_let_pass(served: Served) -> None:
    idle = {
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": None,
        "echo": False,
        "user": "me",
        "best_of": 1,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
    }
    assert served.text(prompt=PROMPT, **idle) == served.text(prompt=PROMPT)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "192.168.1.7:8000"}, 200),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost:8000@evil.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://evil.localhost:8000"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
    ],
)
def test_no_page_of_another_site_may_use_the_server(
    headers: dict[str, str], status: int, served: Served
) -> None:
    assert served.ask("/v1/models", method="GET", headers=headers)[0] == status


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


def half_sent(served: Served, count: int) -> list[socket.socket]:
    """Connections of requests whose bodies have not ended."""
    address = "127.0.0.1", served.port
    connections = [socket.create_connection(address, timeout=60) for _ in range(count)]
    for connection in connections:
        connection.sendall(HALF)
    return connections


def test_a_body_that_breaks_off_ends_its_request_alone(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    half_sent(served, 1)[0].close()
    assert served.text(prompt=PROMPT) and capsys.readouterr().err == ""


def test_the_bytes_of_a_body_are_counted_as_they_come(served: Served) -> None:
    """However its length is told."""
    path, chunked = "/v1/completions", {"Transfer-Encoding": "chunked"}
    good = json.dumps({"prompt": PROMPT}).encode()
    assert served.ask(path, chunks(good), headers=chunked)[0] == 200
    status, answer = served.ask(path, chunks(good + b" " * MAX_BODY), headers=chunked)
    assert status == 413 and b"up to 1048576 bytes" in answer
    status, answer = served.ask(path, chunks(good), headers=chunked | {"Content-Length": "5"})
    assert status == 400 and b"not both" in answer


def chunks(body: bytes) -> bytes:
    """A body in chunks of up to 64 KiB."""
    parts = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


def test_half_sent_bodies_keep_nobody_out_and_are_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.5)
    connections = half_sent(served, 150)
    assert served.text(prompt=PROMPT)
    for connection in connections:
        assert b"408" in connection.recv(100)
        connection.close()


def test_a_prompt_of_too_many_bytes_is_refused_unread(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splitting it into tokens would take seconds, in which nobody is answered."""
    monkeypatch.delattr(type(served.worker.session.tokenizer), "encode_parts")
    monkeypatch.delattr(type(served.worker.session.tokenizer), "encode")
    for path, body in (texts(prompt=" " * 500_000), chats(said(" " * 500_000))):
        status, error = served.refusal(f"/v1/{path}", body)
        assert status == 400 and "the prompt has 500000 bytes" in error["message"]


# ---- the queue ----


@pytest.fixture
def gate(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no text begins."""
    setting = served.worker.session.setting
    opened, drafting = threading.Event(), setting.drafting

    def wait(*options: Any) -> Drafting:
        opened.wait(60)
        return drafting(*options)

    monkeypatch.setattr(setting, "drafting", wait)
    yield opened
    opened.set()
    until(lambda: served.idle)


def test_requests_wait_in_order_and_a_full_queue_answers_429(
    served: Served, gate: threading.Event, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = MAX_WAITING + 4
    order = recorded(
        monkeypatch, served.worker.scheduler, "submit", lambda entry: len(entry.task.text)
    )
    with ThreadPoolExecutor(most) as pool:
        asking = []
        for length in range(1, most + 1):
            asking.append(pool.submit(served.text, prompt="x" * length))
            until(lambda: len(served.worker.jobs) == len(asking))
        with pytest.raises(openai.RateLimitError, match="16 requests wait already"):
            client.completions.create(model="tiny", prompt=PROMPT)
        gate.set()
        assert all(each.result() for each in asking)
    assert order == [*range(1, most + 1)]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_the_queue_frees_its_place(
    stream: bool, served: Served, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING", -2)
    asked = {"prompt": PROMPT, "stream": stream}
    connections = [served.begin("/v1/completions", asked) for _ in range(2)]
    until(lambda: len(served.worker.jobs) == 2)
    assert served.ask("/v1/completions", {"prompt": PROMPT})[0] == 429
    jobs = [*served.worker.jobs]
    for connection in connections:
        connection.close()
    until(lambda: all(job.is_abandoned for job in jobs))
    with ThreadPoolExecutor() as pool:
        text = pool.submit(served.text, prompt=PROMPT)
        until(lambda: len(served.worker.jobs) == 3)
        gate.set()
        assert text.result()


def test_above_the_number_of_connections_the_answer_is_503(served: Served) -> None:
    connections = half_sent(served, MAX_CONNECTIONS)
    until(lambda: served.ask("/v1/models", method="GET")[0] == 503)
    for connection in connections:
        connection.close()
    until(lambda: served.ask("/v1/models", method="GET")[0] == 200)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/live"])
def test_the_text_of_a_client_that_went_away_ends_alone(path: str, served: Served) -> None:
    """Within a step, while another is written."""
    asked = {**ENDLESS, "stream": path != "/v1/completions"}
    if "chat" in path:
        asked["messages"] = [said(asked.pop("prompt"))]
    other = served.begin("/v1/completions", {**ENDLESS, "stream": True})
    assert other.recv(10)
    connection = served.begin(path, asked)
    until(lambda: len(served.worker.jobs) == 2 and len(served.worker.scheduler.active) == 2)
    _, job = served.worker.jobs
    connection.close()
    until(lambda: len(served.worker.jobs) == len(served.worker.scheduler.active) == 1)
    assert job.is_abandoned and job.entry.ended and other.recv(10)
    other.close()
    until(lambda: served.idle)


def test_what_fails_in_writing_is_told_and_the_next_text_is_written(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a /secret/path\nand more")

    monkeypatch.setattr(served.worker.session.setting, "drafting", fail)
    status, error = served.refusal("/v1/completions", {"prompt": PROMPT, "stream": True})
    monkeypatch.undo()
    assert (status, error["type"]) == (500, "server_error") and "secret" not in str(error)
    told = "[a request could not be answered: RuntimeError: a /secret/path and more]\n"
    assert capsys.readouterr().err == told
    assert served.text(prompt=PROMPT)


# ---- many at once ----

COMPANY = [
    {"prompt": PROMPT, "seed": 4, "temperature": 1.0, "max_tokens": 3},
    {"prompt": "the hen", "draft": "exit", "seed": 1, "temperature": 0.9, "max_tokens": 60},
    {
        "prompt": "the hen",
        "draft": "lookup",
        "seed": 1,
        "temperature": 0.9,
        "coupling": "ratio",
        "max_tokens": 50,
    },
    {
        "prompt": "a fox and " * 20,
        "draft": "none",
        "seed": 2,
        "temperature": 1.1,
        "ban": ["e", "th"],
        "max_tokens": 40,
    },
    {
        "prompt": "in an inn",
        "draft": "exit",
        "exit_layer": 3,
        "adaptive": True,
        "coupling": "ratio",
        "max_tokens": 70,
    }
    | {"seed": 3, "temperature": 0.7, "repetition_penalty": 1.2},
]


def test_of_eighty_requests_of_four_clients_none_is_lost_or_mixed_up_and_nothing_is_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short, long, aborted, malformed and huge ones, at random; each text is the same request's
    when it was alone.
    """
    alone = [served.text(**each) for each in COMPANY]
    model = served.worker.session.model
    widths = recorded(monkeypatch, model, "together", lambda calls, *plan: len(calls))

    def client_of(number: int) -> None:
        chance = random.Random(number)
        for kind in ["whole", "stream", "aborted", "malformed", "huge"] * 2:
            which = chance.randrange(len(COMPANY))
            if kind == "whole":
                assert served.text(**COMPANY[which]) == alone[which]
            elif kind == "stream":
                _, stream = served.ask("/v1/completions", {**COMPANY[which], "stream": True})
                *chunks, done = events_of(stream)
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                assert (text, done) == (alone[which], "[DONE]")
            elif kind == "aborted":
                path, streams = chance.choice(
                    [("/v1/completions", True), ("/v1/completions", False), ("/live", True)]
                )
                with served.begin(path, {**ENDLESS, "stream": streams}) as connection:
                    if streams and chance.random() < 0.7:
                        connection.recv(1000)
            else:
                huge = {"prompt": "x" * chance.choice([MAX_BODY, 2 * CONTEXT])}
                broken = b'{"prompt": ' * chance.randrange(1, 99)
                body = broken if kind == "malformed" else huge
                assert served.ask("/v1/completions", body)[0] in (400, 413)

    def forty_requests() -> tuple[int, ...]:
        """Numbers of tensors, texts, parameters and jobs in memory after them."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(client_of, range(4)))
        assert served.text(**COMPANY[0]) == alone[0]
        until(lambda: served.idle and held()[-1] == 0)  # threads let go of jobs a little later
        return held()

    (tensors, texts, *others), (more_tensors, more_texts, *same) = (
        forty_requests(),
        forty_requests(),
    )
    assert others == same and max(widths) > 1 and len({*alone}) == len(COMPANY)
    # a row keeps its last text, once it had one; forty requests would leak forty
    assert more_tensors < tensors + 20 and more_texts < texts + 20


def held() -> tuple[int, ...]:
    """Numbers of tensors, texts, parameters and jobs in memory."""
    gc.collect()
    counts = Counter(type(each) for each in gc.get_objects())
    return counts[torch.Tensor], counts[Text], counts[torch.nn.Parameter], counts[Job]


# ---- the live page's events ----


def test_the_page_is_told_every_round_and_its_two_texts(served: Served) -> None:
    asked = {"prompt": PROMPT, **SEEDED, "draft": "exit", "beside": True}
    begin, *events = events_of(served.ask("/live", asked)[1])
    assert begin["kind"] == "begin" and begin["race"] and not begin["greedy"]
    assert begin["columns"] == ["exit at layer 2 of 4", "plain"]
    columns: tuple[list[Any], list[Any]] = [], []
    for before, event in pairwise([begin, *events]):
        if event["kind"] == "round":
            tokens = event["round"]["tokens"]
            drafted = [each["text"] for each in tokens if each["verdict"] != "own"]
            assert drafted == before.get("tokens", []), "a draft is shown before its verdict"
            columns[event["column"]].append(event)
    texts = [
        [
            token["id"]
            for each in rounds
            for token in each["round"]["tokens"]
            if token["verdict"] in ("accepted", "own")
        ]
        for rounds in columns
    ]
    assert texts[0] == texts[1] and len(texts[0]) >= 10
    assert columns[0][-1]["finish"] == columns[1][-1]["finish"] in ("length", "eos")
    seconds = [[each["seconds"] for each in rounds] for rounds in columns]
    assert seconds == [*map(sorted, seconds)]
    written = b"".join(map(served.worker.session.tokenizer.token_bytes, texts[0]))
    _, answer = served.ask("/v1/chat/completions", {**chats(said(PROMPT))[1], **SEEDED})
    told = json.loads(answer)["choices"][0]["message"]["content"]
    assert written.decode(errors="replace") == told


# ---- the command line's part ----


def test_what_a_request_does_not_say_is_as_on_the_command_line(
    chat_model: Path, tmp_path: Path, run: Run
) -> None:
    """Also a drafter of the reader's own, which no request can name."""
    own = tmp_path / "own.py"
    own.write_text(
        "from decoding.drafters import NoDraft\n\n\ndef Mine(target, cache):\n    return"
        " NoDraft(target.vocab_size)\n"
    )
    sampling = ["--temperature", "0.8", "--seed", "5", "--max-new-tokens", "9", "--stop", "zz"]
    said = ["--draft", f"{own}:Mine", *sampling]
    wanted = run(PROMPT, "--model", chat_model, "--json", "--no-chat", *said).result
    with serving("--model", str(chat_model), *said) as running:
        assert running.text(prompt=PROMPT) == wanted["text"]
        other = running.text(prompt=PROMPT, draft="none")
        assert other == wanted["text"], "under the race the draft does not matter"


def test_plans_draft_models_and_bits_of_the_command_line_serve_their_names(
    chat_model: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"attn": [1], "mlp": [2], "gamma": 2}')
    model, asked = ["--model", str(chat_model)], {"prompt": PROMPT, **SEEDED}
    with serving(*model, "--draft", "skip", "--bits", "8", "--plan", str(plan)) as running:
        plain = running.text(draft="none", **asked)
        assert all(running.text(draft=draft, **asked) == plain for draft in ("skip", "lowbit"))
        assert running.worker.bits == 8
    with serving(*model, "--draft", "model", "--draft-model", str(chat_model)) as running:
        made = [running.text(draft="model", gamma=gamma, **asked) for gamma in (1, 2, 3)]
        assert made == [plain] * 3
        loaded = [options.kind for options in running.worker.session.setting.made]
        assert loaded.count("model") == 1, "the draft model was loaded once"


def context(chat_model: Path, *options: str, places: int = 1) -> int:
    """The length that a server with these options gives to each of its texts."""
    given = ["--serve", "0", "--model", str(chat_model), *options]
    return worker.context_length(generate.Request(make_parser().parse_args(given)), places)


def test_the_context_is_8192_tokens_unless_asked_for_and_a_longer_prompt_is_told_so(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with a longer one: a step on a GPU attends over the whole cache."""
    monkeypatch.setattr(request, "CONTEXT", 100)
    assert context(chat_model) == 100 and context(chat_model, "--context", "150") == 150
    assert context(chat_model, "--context", str(10 * CONTEXT)) == CONTEXT
    with serving("--model", str(chat_model), "--context", "20") as running:
        status, error = running.refusal("/v1/completions", {"prompt": "the hen " * 30})
        assert status == 400
        assert "of which 20 are used" in error["message"] and "raise context" in error["message"]


def test_the_context_is_what_there_is_memory_for(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert context(chat_model, places=4) == CONTEXT and not capsys.readouterr().err
    monkeypatch.setattr(worker, "check_fits", lambda memory, device: None)
    monkeypatch.setattr(worker, "free_bytes", lambda device: 16_000_000 + CPU_BUFFERS)
    four = context(chat_model, places=4)
    assert 1024 <= four < context(chat_model) <= CONTEXT
    told = f"context: {four} of the model's {CONTEXT} tokens, for each of 4 texts at once"
    assert told in capsys.readouterr().err
