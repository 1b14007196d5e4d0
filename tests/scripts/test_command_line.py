"""``generate.py`` as a user meets it: refusals in one line, the JSON contract, seeds, stops,
Ctrl-C.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import generate
from app import device
from app.characters import TextStream
from tests.calls import interrupted
from tests.commands import Run
from tests.folders import LLAMA, write_folder
from tests.refusal import refusal
from weights.load import model_fingerprint
from weights.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
KEYS = [
    "text",
    "tokens",
    "prompt_tokens",
    "finish_reason",
    "seconds",
    "tokens_per_second",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_rate",
    "tokens_per_round",
    "accepted_histogram",
    "repeat_with",
]


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """The folder of a model that has a plan, which the test writes."""
    return write_folder(tmp_path / "planned")


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
    assert "cannot compute on cuda: try pip install torch" in refusal(device.pick_device, None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give one prompt"),
        (["a", "--prompt-file", "b"], "give one prompt"),
        (["--prompt-file", "/no/such/file"], "/no/such/file cannot be read"),
        ([""], "the prompt must be a string that is not empty"),
        (["\udcff"], "--prompt is not UTF-8 text"),
        (["a", "--stop", "\udcff"], "not UTF-8"),
        (["a", "--temperature", "-1"], "temperature must be at least 0"),
        (["a", "--top-p", "0"], "top-p must be above 0"),
        (["a", "--top-k", "-2"], "top-k must be at least 0"),
        (["a", "--min-p", "2"], "min-p must be from 0 to 1"),
        (["a", "--repetition-penalty", "0"], "repetition-penalty must be from 1e-6"),
        (["a", "--max-new-tokens", "0"], "max-new-tokens must be at least 1"),
        (["a", "--num-samples", "0"], "--num-samples must be from 1 to 65536, found 0"),
        (
            ["a", "--num-samples", "9" * 20],
            "--num-samples must be from 1 to 65536, found 9",
        ),
        (["a", "--stop", ""], "give stop strings and banned words as lists"),
        (["a", "--draft", "lookup", "--gamma", "-1"], "gamma must be at least 0"),
        (["a", "--min-target-confidence", "1.2"], "min-target-confidence must be from 0 to 1"),
        (["a", "--draft", "exit", "--exit-layer", "5"], "exit layer 5 is not in 1..4"),
        (["a", "--draft", "lowbit", "--bits", "5"], "argument --bits: invalid choice: 5"),
        (["a", "--draft", "none", "--gamma", "3"], "--gamma has no effect with --draft none"),
        (["a", "--exit-layer", "2"], "--exit-layer has no effect with --draft auto"),
        (["a", "--draft", "exit", "--plan", "p"], "--plan has no effect with --draft exit"),
        (["a", "--draft", "skip"], "has no plan.json: give --plan FILE"),
        (["a", "--draft", "skip", "--plan", "/no/plan"], "/no/plan cannot be read"),
        (["a", "--json-schema", "nowhere.json"], "nowhere.json cannot be read"),
        (["a", "--json-schema", ""], "--json-schema is empty: give a file, or a JSON object"),
        (["a", "--regex", "\udcff"], "regex is not UTF-8 text"),
        (["a", "--draft", "own.py:"], "no draft is called 'own.py:': give auto, "),
        (["a", "--draft", "/no/own.py:Class"], "FileNotFoundError"),
        (["a", "--draft", "model"], "--draft model needs --draft-model DIR"),
        (["a", "--draft", "model", "--draft-model", "/no/model"], "no folder '/no/model'"),
        (["a", "--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["a", "--device", "meta"], "device 'meta' is not there"),
        (["a", "--device", "mps"], "mps cannot compute in float64: give --device cpu"),
        (["a", "--chat"], "no chat template"),
        (["a", "--system", "s"], "--system needs a chat"),
        (["a " * 300], "shorten the prompt"),
        (["a " * 30, "--context", "20"], "20 are used: shorten the prompt or raise --context"),
        (["a", "--context", "-1"], "--context must be at least 1"),
        (["--serve", "0", "--trace"], "and --serve no --trace"),
        (["--interactive", "--json"], "--serve and --interactive stand alone"),
        (["--serve", "0", "--interactive"], "--serve and --interactive stand alone"),
        (["a", "--serve", "0"], "--serve and --interactive stand alone"),
        (["--interactive", "--num-samples", "2"], "take no prompt, --num-samples, --compare"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_wrong_input_is_one_clear_line_and_status_2(
    arguments: list[str], complaint: str, run: Run, model: str
) -> None:
    assert complaint in run(*arguments, "--model", model).complaint


def test_a_budget_beyond_the_context_is_cut_with_a_line(run: Run, model: str) -> None:
    cut = run("abcd", "--model", model, "--draft", "none", "--max-new-tokens", "100000")
    assert cut.status == 0 and "256 tokens is full, so the text has 252 of" in cut.err
    assert "context" not in run("a", "--model", model, "--max-new-tokens", "9").err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": LLAMA["vocab_size"] + 8}, "must share the target's tokenizer"),
        ({"max_position_embeddings": 8}, "has a context of 8 tokens"),
    ],
)
def test_a_draft_model_that_does_not_suit_the_target_is_refused(
    change: dict[str, int], said: str, run: Run, model: str, tmp_path: Path
) -> None:
    other = write_folder(tmp_path / "other", {**LLAMA, **change})
    outcome = run("abcdef", "--model", model, "--draft", "model", "--draft-model", other)
    assert said in outcome.complaint


def test_a_tokenizer_of_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small", {**LLAMA, "vocab_size": 20})
    said = run("zebra", "--model", folder).complaint
    assert "the tokenizer does not belong to this model" in said


def test_json_is_one_object_a_sample_and_alone_on_standard_output(run: Run, model: str) -> None:
    outcome = run(
        *["the hen", "--model", model, "--draft", "exit", "--temperature", "1", "--seed", "4"],
        *["--num-samples", "3", "--max-new-tokens", "12", "--json"],
    )
    assert outcome.status == 0 and len(outcome.objects) == 3
    tokenizer = Tokenizer(Path(model))
    for result in outcome.objects:
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
            "repeat_with": "--seed 4 --coupling race --num-samples 3",
        }
    assert len({result["text"] for result in outcome.objects}) == 3


def test_without_a_seed_the_seed_is_shown_and_repeats_the_text(run: Run, model: str) -> None:
    common = ["the", "--model", model, "--temperature", "1", "--max-new-tokens", "9"]
    first = run(*common, "--draft", "none")
    (flags,) = re.findall(r"(--seed \d+ --coupling race)\]", first.err)
    other, again = run(*common), run(*common, "--draft", "none", *flags.split())
    assert again.out == first.out != other.out


def test_a_stop_string_cuts_the_text_an_end_token_ends_it_and_a_banned_word_is_never_written(
    run: Run, model: str, tmp_path: Path
) -> None:
    common = ["the hen", "--draft", "lookup", "--max-new-tokens", "30", "--json"]
    whole = run(*common, "--model", model).result
    wanted = whole["text"][3:5]
    cut = run(*common, "--model", model, "--stop", wanted).result
    assert (cut["finish_reason"], cut["text"]) == ("stop", whole["text"].partition(wanted)[0])
    assert len(cut["tokens"]) < len(whole["tokens"])
    # a whole ASCII character: the model writes broken UTF-8 too
    word = re.findall("[!-~]", whole["text"])[0]
    without = run(*common, "--model", model, "--ban", word).result
    assert word not in without["text"] and len(without["tokens"]) == 30
    ending = write_folder(tmp_path / "ending", eos_ids=(whole["tokens"][4], whole["tokens"][2]))
    ended = run(*common, "--model", ending).result
    assert (ended["finish_reason"], ended["tokens"]) == ("eos", whole["tokens"][:3])


def test_ctrl_c_prints_what_was_written_and_exits_130(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, TextStream, "pull", 4)
    outcome = run("the", "--model", model, "--draft", "none", "--num-samples", "2", "--json")
    assert outcome.status == 130
    assert [result["finish_reason"] for result in outcome.objects] == ["interrupted"] * 2
    assert len(outcome.objects[0]["tokens"]) == 4, (
        "those of the round whose text was not shown yet included"
    )
    assert outcome.err.count("tokens/s") == 2 and outcome.err.count("-" * 20) == 1


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
    monkeypatch.delattr("app.session.load_model")
    whole = run("--model", model, "--dry-run")
    assert whole.status == 0 and re.fullmatch(
        r"weights: .+, KV cache at 256 tokens: .+, workspace: .+, total: .+,"
        r" low-bit copies \(at most, if they fit\): .+, free: .+ GB\n",
        whole.out,
    )
    lookup = run("--model", model, "--dry-run", "--draft", "lookup")
    assert "low-bit" not in lookup.out.splitlines()[0]
    short = run("the", "--model", model, "--dry-run", "--max-new-tokens", "5")
    assert f"KV cache at {len(Tokenizer(Path(model)).encode('the')) + 5} tokens" in short.out
    monkeypatch.setattr("weights.memory.free_bytes", lambda device: 1000)
    assert "does not fit" in run("--model", model, "--dry-run").complaint


@pytest.mark.parametrize(
    ("plan", "drafts"),
    [
        (
            {"attn": [1]},
            "all layers in 4 bits; skipping 1 attention and 0 MLP sublayers; prompt",
        ),
        ({"bits": 8}, "all layers in 4 bits; all layers in 8 bits; prompt lookup"),
        ({"bits": 4, "head_bits": 8}, ": all layers in 4 bits; prompt lookup"),
    ],
)
def test_auto_drafts_in_four_bits_and_with_a_plan_that_is_another(
    plan: dict, drafts: str, run: Run, planned: Path
) -> None:
    (planned / "plan.json").write_text(json.dumps({"attn": [], "kept_share": 0.9} | plan))
    outcome = run("the", "--model", planned, "--max-new-tokens", "4", "--dtype", "bfloat16")
    assert drafts in outcome.err.splitlines()[-1]


def test_a_plan_that_says_no_draft_pays_is_obeyed(run: Run, planned: Path) -> None:
    (planned / "plan.json").write_text('{"attn": [1, 2], "mlp": [2], "gamma": 0}')
    options = ["the", "--model", planned, "--max-new-tokens", "6"]
    assert "plain: by the plan, no draft pays" in run(*options, "--draft", "skip").err
    assert "prompt lookup" in run(*options, "--draft", "auto").err
    assert "skipping 2 attention" in run(*options, "--draft", "skip", "--gamma", "2").err


def test_a_plan_made_for_another_model_is_refused(run: Run, model: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    command = ["a", "--model", model, "--draft", "skip", "--plan", plan, "--max-new-tokens", "2"]
    plan.write_text(json.dumps({"attn": [1], "model": model_fingerprint(Path(model))}))
    assert run(*command).status == 0
    plan.write_text('{"attn": [1], "model": "0123456789abcdef"}')
    assert f"{plan} was made for another model than {model}" in run(*command).complaint


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"], ids=["plain", "byte order mark"])
def test_a_prompt_file_is_the_prompt(encoding: str, run: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the hen", encoding)
    common = ["--model", model, "--draft", "none", "--max-new-tokens", "5"]
    assert run("--prompt-file", file, *common).out == run("the hen", *common).out


# As a process


def started(model: object, *options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, ROOT / "generate.py", "the hen", "--model", model, *options]
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a long context."""
    config = {**LLAMA, "max_position_embeddings": 1 << 16}
    return write_folder(tmp_path_factory.mktemp("models") / "endless", config)


def test_ctrl_c_ends_a_process_with_status_130_after_what_it_wrote(endless: Path) -> None:
    options = ["--draft", "lookup", "--max-new-tokens", 1 << 16, "--num-samples", 3]
    with started(endless, *options) as process:
        first = process.stdout.read(40)  # all texts have begun, and are far from their ends
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate()
    assert process.returncode == 130 and first and rest.endswith(b"\n")
    assert said.count(b" tokens in ") == 3 and b"Traceback" not in said


def test_a_reader_that_goes_away_ends_the_process_quietly(endless: Path) -> None:
    """As in ``generate.py ... --trace | head -c 1``, whose console ends the process itself."""
    options = ["--max-new-tokens", 1 << 16, "--draft", "none", "--trace"]
    with started(endless, *options) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
    assert b"Traceback" not in said and b"BrokenPipe" not in said and process.returncode == 0
