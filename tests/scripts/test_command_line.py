"""``generate.py`` as a user meets it: refusals in one line, JSON, seeds, plans, Ctrl-C; and
``--serve`` as a process: its address, and what it refuses to start with.
"""

import io
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import generate
from app.common import device
from tests.commands import Run
from tests.folders import END, LLAMA, write_folder
from tests.refusal import refusal
from weights.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
KEYS = [
    "text",
    "tokens",
    "prompt_tokens",
    "finish_reason",
    "prompt_seconds",
    "first_token_seconds",
    "seconds",
    "tokens_per_second",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_rate",
    "acceptance_by_position",
    "tokens_per_round",
    "accepted_histogram",
    "repeat_with",
]


def test_the_cpu_is_used_with_a_line_where_torch_cannot_use_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "NVIDIA", tmp_path)
    for version, wanted in (
        (None, "is built for CPUs"),
        ("13.0", "13.0, which wants a newer"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert device.pick_device(None).type == "cpu"
        assert wanted in capsys.readouterr().err
    assert device.pick_device("cpu").type == "cpu" and not capsys.readouterr().err


def test_a_gpu_that_runs_no_kernel_is_refused_with_the_wheels_that_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError("no kernel image")))
    said = refusal(device.pick_device, None)
    assert "cannot compute on cuda (no kernel image): give --device cpu" in said
    assert "try pip install torch --index-url" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the prompt must be a string that is not empty"),
        (["a", "--prompt-file", "b"], "give one prompt"),
        (["--prompt-file", "/no/such/file"], "/no/such/file cannot be read"),
        ([""], "the prompt must be a string that is not empty"),
        (["\udcff"], "prompt is not UTF-8 text"),
        (["a", "--stop", "\udcff"], "not UTF-8"),
        (["a", "--temperature", "-1"], "temperature must be at least 0"),
        (["a", "--top-p", "0"], "top-p must be above 0"),
        (["a", "--top-k", "-2"], "top-k must be at least 0"),
        (["a", "--min-p", "2"], "min-p must be from 0 to 1"),
        (["a", "--repetition-penalty", "0"], "repetition-penalty must be from 1e-6"),
        (["a", "--max-new-tokens", "0"], "max-new-tokens must be at least 1"),
        (["a", "--num-samples", "9" * 20], "--num-samples must be from 1 to 65536, found 9"),
        (["a", "--stop", ""], "give stop strings and banned words as lists"),
        (["a", "--draft", "lookup", "--gamma", "-1"], "gamma must be at least 0"),
        (["a", "--min-target-confidence", "1.2"], "min-target-confidence must be from 0 to 1"),
        (["a", "--draft", "exit", "--exit-layer", "5"], "exit layer 5 is not in 1..4"),
        (["a", "--draft", "lowbit", "--bits", "5"], "argument --bits: invalid choice: 5"),
        (["a", "--draft", "none", "--gamma", "3"], "--gamma has no effect with --draft none"),
        (["a", "--exit-layer", "2"], "--exit-layer has no effect with --draft auto"),
        (["a", "--draft", "exit", "--plan", "p"], "--plan has no effect with --draft exit"),
        (["a", "--draft", "skip"], "has no plan.json, and no --plan is given"),
        (["a", "--draft", "skip", "--plan", "/no/plan"], "/no/plan cannot be read"),
        (["a", "--json-schema", "nowhere.json"], "nowhere.json cannot be read"),
        (["a", "--json-schema", ""], "--json-schema is empty: give a file"),
        (["a", "--grammar", ""], "--grammar is empty: give a file"),
        (["a", "--regex", "\udcff"], "regex is not UTF-8 text"),
        (["a", "--draft", "own.py:"], "no draft is called 'own.py:': give auto, "),
        (["a", "--draft", "/no/own.py:Class"], "FileNotFoundError"),
        (["a", "--draft", "model"], "--draft model needs --draft-model DIR"),
        (["a", "--draft", "model", "--draft-model", "/no/model"], "no folder '/no/model'"),
        (["a", "--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["a", "--device", ""], "device '' is not there"),
        (["a", "--device", "meta"], "device 'meta' is not there"),
        (["a", "--device", "mps"], "mps cannot compute in float64: give --device cpu"),
        (["a", "--chat"], "no chat template"),
        (["a", "--system", "s"], "--system needs a chat"),
        (["a", "--chat-template-kwargs", "{}"], "--chat-template-kwargs needs a chat"),
        (["a " * 300], "shorten the prompt"),
        (["a " * 30, "--context", "20"], "the context 20 (the model's 256): shorten"),
        (["a", "--context", "-1"], "--context must be at least 2"),
        (["--serve", "0", "--trace"], "--trace has no effect with --serve"),
        (["--interactive", "--json"], "--json has no effect with --serve or --interactive"),
        (["--serve", "0", "--interactive"], "--serve or --interactive, not both"),
        (["a", "--serve", "0"], "prompt has no effect with --serve"),
        (["--interactive", "--num-samples", "2"], "--num-samples has no effect"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_wrong_input_is_one_clear_line_and_status_2(
    arguments: list[str],
    complaint: str,
    run: Run,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert complaint in run(*arguments, "--model", model).complaint


def test_a_budget_beyond_the_context_is_cut_with_a_line(run: Run, model: str) -> None:
    cut = run("abcd", "--model", model, "--draft", "none", "--max-new-tokens", "100000")
    assert cut.status == 0 and "256 tokens is full, so the text has 252 of" in cut.err
    assert "context" not in run("a", "--model", model, "--max-new-tokens", "9").err


def test_a_draft_model_of_another_size_context_and_reserved_names_changes_no_text(
    run: Run, model: str, tmp_path: Path
) -> None:
    """A draft model of other tokens is refused."""
    vocab_size = LLAMA["vocab_size"] + 8
    other = write_folder(
        tmp_path / "other", {**LLAMA, "vocab_size": vocab_size, "max_position_embeddings": 8}
    )
    tokens = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokens.replace(END, "<|reserved|>"))
    ways = ["abcdef", "--max-new-tokens", "12", "--draft", "model", "--model"]
    assert run(*ways, other, "--draft-model", model).status == 0  # of fewer tokens
    drafted = run(*ways, model, "--draft-model", other)
    assert drafted.out == run(*ways, model, "--draft", "none").out
    assert ", up to its context of 8 tokens" in drafted.err
    (other / "tokenizer.json").write_text(tokens.translate(str.maketrans("QZ", "ZQ")))
    assert "must share the target's" in run(*ways, model, "--draft-model", other).complaint


def test_json_is_one_object_a_sample_and_alone_on_standard_output(run: Run, model: str) -> None:
    outcome = run(
        *["the hen", "--model", model, "--draft", "exit", "--temperature", "1", "--seed", "4"],
        *["--num-samples", "3", "--max-new-tokens", "12", "--json"],
    )
    assert outcome.status == 0 and len(outcome.objects) == 3 and outcome.out.isascii()
    tokenizer = Tokenizer(Path(model))
    last_of = ("", " --num-samples 2", " --num-samples 3")
    for count, result in zip(last_of, outcome.objects, strict=True):
        assert list(result) == KEYS and len(result["tokens"]) == 12
        assert result["text"] in outcome.err
        assert result == result | {
            "text": tokenizer.decode(result["tokens"]),
            "prompt_tokens": len(tokenizer.encode("the hen")),
            "finish_reason": "length",
            "tokens_per_second": pytest.approx(12 / result["seconds"]),
            "accepted": sum(n * times for n, times in enumerate(result["accepted_histogram"])),
            "acceptance_rate": result["accepted"] / result["drafted"]
            if result["drafted"]
            else None,
            "tokens_per_round": 12 / result["rounds"],
            "repeat_with": f"--seed 4 --coupling race{count}",
        }
    assert len({result["text"] for result in outcome.objects}) == 3


def test_without_a_seed_the_seed_is_shown_and_repeats_the_text(run: Run, model: str) -> None:
    common = ["the", "--model", model, "--temperature", "1", "--max-new-tokens", "9"]
    first = run(*common, "--draft", "none")
    (flags,) = re.findall(r"(--seed \d+ --coupling race)\]", first.err)
    other, again = run(*common), run(*common, "--draft", "none", *flags.split())
    assert again.out == first.out != other.out


def test_what_is_complete_is_printed_when_the_rest_is_broken_off(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while --compare decodes plainly: the finished sample's object is not lost."""

    monkeypatch.setattr(generate, "comparison", Mock(side_effect=KeyboardInterrupt))
    common = ["the", "--model", model, "--draft", "exit", "--max-new-tokens", "6"]
    outcome = run(*common, "--compare", "--json")
    assert (outcome.status, [len(each["tokens"]) for each in outcome.objects]) == (130, [6])


def test_a_dry_run_says_what_it_would_take_and_loads_nothing(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("app.loaded.load_model")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    whole = run("--model", model, "--dry-run")
    assert whole.status == 0 and re.fullmatch(
        r"weights: .+, KV cache at 256 tokens: .+, workspace: .+, total: .+,"
        r" low-bit copies \(at most, if they fit\): .+, free: .+ GB\n",
        whole.out,
    )
    assert "low-bit" not in run("--model", model, "--dry-run", "--draft", "lookup").out
    monkeypatch.setattr("sys.stdin", io.StringIO("the"))
    for given in (["the"], []):
        short = run(*given, "--model", model, "--dry-run", "--max-new-tokens", "5")
        assert f"KV cache at {len(Tokenizer(Path(model)).encode('the')) + 5} tokens" in short.out
    monkeypatch.setattr("weights.memory.free_bytes", lambda device: 1000)
    assert "does not fit" in run("--model", model, "--dry-run").complaint


def test_a_plan_that_says_no_draft_pays_is_obeyed_and_another_models_is_refused(
    run: Run, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path)
    (folder / "plan.json").write_text('{"attn": [1, 2], "mlp": [2], "gamma": 0}')
    options = ["the", "--model", folder, "--max-new-tokens", "6"]
    assert "plain: by the plan, no draft pays" in run(*options, "--draft", "skip").err
    assert "tokens/s; auto" in run(*options, "--draft", "auto").err
    assert "skipping 2 attention" in run(*options, "--draft", "skip", "--gamma", "2").err
    (folder / "plan.json").write_text('{"attn": [1], "model": "of another"}')
    assert "made for another model than" in run(*options, "--draft", "skip").complaint


def test_a_prompt_is_an_argument_a_file_or_else_the_piped_standard_input(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["-m", model, "--draft", "none", "-n", "5"]
    given = run("the hen", *common).out
    for encoding in ("utf-8", "utf-8-sig"):  # without and with a byte order mark
        (tmp_path / "prompt.txt").write_text("the hen", encoding)
        assert run("--prompt-file", tmp_path / "prompt.txt", *common).out == given
    for piped, argument in (("the hen", []), ("the fox", ["the hen"])):
        monkeypatch.setattr("sys.stdin", io.StringIO(piped))
        assert run(*argument, *common).out == given


# --serve


def test_the_server_prints_its_address_serves_there_and_ends_on_ctrl_c_in_a_text(
    chat_model: Path,
) -> None:
    asked = {"prompt": "the hen", "max_tokens": 1 << 20, "ban": "q", "temperature": 1}
    body = json.dumps(asked | {"stream": True}).encode()
    command = ["generate.py", "--serve", "0", "--model", chat_model, "--draft", "none"]
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            with urllib.request.urlopen(address + "v1/completions", body, timeout=60) as stream:
                assert stream.headers["X-Content-Type-Options"] == "nosniff"
                assert stream.readline().startswith(b"data: ")
                process.send_signal(signal.SIGINT)
                assert b"the server is stopping" in stream.read()
            rest, said = process.communicate(timeout=60)
            assert (process.returncode, rest) == (130, "")
            assert re.fullmatch(
                r'\[Ctrl-C ends it\]\n\[.* - "POST /v1/completions HTTP/1.1" 200\]\n', said
            )
        finally:
            process.kill()


def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    chat_model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server's libraries are missing: one line says how to get them."""
    monkeypatch.setattr("app.loaded.load_model", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        for address in ("", "eight", "1.2.3.4:99999", "http://a:8000", "192.0.2.1:8000", place):
            said = run("--serve", address, "--model", chat_model).complaint
            assert f"--serve {address}: give [HOST:]PORT, such as 127.0.0.1:8000, and" in said
    monkeypatch.delitem(sys.modules, "app.server.network", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = run("--serve", "0", "--model", chat_model).complaint
    needed = re.findall(r"(?m)^[a-z-]+", (ROOT / "requirements-serve.txt").read_text("utf-8"))
    assert f"pip install {' '.join(needed)}: import of uvicorn" in said
