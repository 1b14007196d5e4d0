"""Benchmark: contenders in turns, the columns of its tables, pictures, and wrong input."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmark.__main__ as command
from benchmark import libraries, sections
from benchmark.contenders import Bench, Contender, Prompt, Written, model_drafts, our_contenders
from benchmark.picture import picture
from benchmark.sections import SECTIONS, Texts, predicted_speedups, time_texts
from decoding.rounds import Round
from decoding.run.chooser import Drafting, Setting
from decoding.run.costs import CostTable
from decoding.sampling import SamplingParams
from model import Decoder, InputError, LayerPlan, clock
from model.clock import Timing, take_turns
from model.fast import accelerate
from search.prompts import PROMPTS
from tests.folders import GEMMA2, LLAMA, write_folder
from tests.pictures import faults
from tests.weights.test_fetch import write_gguf
from weights.gguf.llama import convert
from weights.load import load_model
from weights.memory import parameter_count
from weights.tokenizer import Tokenizer

CPU = torch.device("cpu")
SMALL_PROMPTS = {"short": ["the hen"], "long": ["a thin hen in a tin"]}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to read, little to write."""
    monkeypatch.setattr(command, "PROMPTS", SMALL_PROMPTS)
    monkeypatch.setattr(command, "STORIES", 3)
    monkeypatch.setattr(sections, "BANDWIDTH_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(sections, "LONGEST_VERIFICATION", 6)


def bench_of(folder: Path, *options: str, model: Decoder | None = None) -> Bench:
    prompts = [Prompt("story", "one", [1]), Prompt("code", "two", [2])]
    setting = Setting(folder, model or load_model(folder), Tokenizer(folder), SamplingParams(), 24)
    arguments = command.parse_arguments([*options])
    arguments.exit_layer = arguments.exit_layer or [2, 3]
    return Bench(arguments, setting, prompts)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until a test moves it: ``ticking[0] += seconds``."""
    time = [0.0]
    for module in (clock, sections):
        monkeypatch.setattr(module, "now", lambda device: time[0])
    return time


@pytest.mark.usefixtures("small")
def test_a_run_reports_every_contender_on_every_kind_of_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers too, by each of its ways to draft: greedy texts of this float32 model agree with ours."""
    folder, report = write_folder(tmp_path / "model"), tmp_path / "report.json"
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [2], "gamma": 3}))
    options = ["--model", str(folder), "--draft-model", str(folder), "--max-new-tokens", "8", "--repeats", "2"]
    files = ["--json", str(report)]
    assert command.main([*options, *files, "--device", "cpu", "--against", "transformers"]) == 0
    captured, measured = capsys.readouterr(), json.loads(report.read_text())
    drafts = ["exit 2", "exit 3", "low bits", "plan.json", "model"]
    names = ["plain", "lookup", *(name + how for name in drafts for how in ("", ", adaptive")), "auto", "transformers"]
    names += ["transformers, lookup", "transformers, exit 3", "transformers, model"]
    rows = {row["decoder"]: row for row in measured["speed"]}
    assert list(rows) == names
    assert all(name in captured.out for name in names)
    assert "not possible" not in captured.err
    for name, row in rows.items():
        assert row["equal"] == "2/2" and len(row["seconds"]) == 2 and row.keys() >= SMALL_PROMPTS.keys()
        one_draft = "transformers" not in name and name not in ("plain", "auto")
        assert (row["predicted"] is not None) == one_draft, "auto drafts in several ways, with different costs"
    assert rows["model"]["accepted"] == 1, "the draft model is the target"
    assert rows["plain"]["speed-up"] == {"median": 1, "lowest": 1, "highest": 1}
    assert list(measured) == ["about", *list(SECTIONS)[:-1]]
    steps = [(row["step"], row.get("tokens")) for row in measured["costs"]]
    assert steps == [("verification", n) for n in range(1, 7)] + [(f"draft step, {name}", None) for name in drafts]
    first = [(row["decoder"], row["tokens"]) for row in measured["first-token"]]
    assert first == [(name, length) for name in ("plain", "transformers") for length in (64, 128, 256)]
    assert measured["about"]["versions"]["transformers"]


@pytest.mark.usefixtures("small")
def test_llama_cpp_is_measured_on_a_file_of_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which compiles for minutes: pip install it to run this"
    )
    folder, file, report = tmp_path / "model", tmp_path / "model.gguf", tmp_path / "report.json"
    write_gguf(file, folder, in_bfloat16=True)
    convert(file, folder)
    options = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--only", "speed", "--quick"]
    files = ["--against", f"llama.cpp={file}", "--json", str(report)]
    assert command.main([*options, "--max-new-tokens", "8", *files]) == 0
    row = next(row for row in json.loads(report.read_text())["speed"] if row["decoder"] == "llama.cpp")
    assert row["equal"] == "2/2" and "llama.cpp: CPU : " in capsys.readouterr().err


@pytest.mark.parametrize("measured", [("costs",), ("speed", "costs", "context")])
def test_the_picture_of_a_report_is_in_order(measured: tuple[str, ...]) -> None:
    names = ["plain", "lookup", "lowbit", "auto", "exit 24, adaptive", "transformers, lookup", "transformers, exit 24"]
    columns = {"speed-up": {"median": 1.1}, **dict.fromkeys(PROMPTS, 1.2)}
    rows = [{"decoder": name, "predicted": {"median": 1.0} if at else None, **columns} for at, name in enumerate(names)]
    verify = [{"step": "verification", "tokens": count, "plain steps": 1 + count / 10} for count in (1, 2, 3)]
    milliseconds = {"median": 20, "lowest": 10, "highest": 30}
    steps = [{"tokens": 128 << at, "ms": milliseconds} for at in range(6)]
    report = {"speed": rows, "costs": [*verify, {"step": "draft step, model"}], "context": steps}
    report = {name: report[name] for name in measured}
    assert list(faults(lambda: picture(report))) == []
    if "speed" in measured:
        speed = picture(report).axes[0]
        assert [label.get_text().split("  ")[0] for label in speed.get_yticklabels()] == names
        predicted = speed.collections[-1].get_offsets()
        assert predicted[:, 1].tolist() == [1, 2, 3, 4, 5, 6], "a prediction where the table has none"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("section", ["speed", "floor"])
def test_a_section_alone_measures_nothing_else(section: str, tmp_path: Path) -> None:
    """But the costs, without which no speed can be predicted."""
    folder, report = write_folder(tmp_path / "model"), tmp_path / "report.json"
    options = ["--model", str(folder), "--quick", "--max-new-tokens", "8", "--json", str(report), "--device", "cpu"]
    drawn = ["--plot", str(tmp_path / "picture.svg")] * (section in command.DRAWN)
    assert command.main([*options, *drawn, "--only", section]) == 0
    assert set(json.loads(report.read_text())) == {section, "about"} | ({"costs"} if section == "speed" else set())
    assert not drawn or "<svg" in Path(drawn[1]).read_text()


@pytest.mark.usefixtures("small")
def test_stories_are_judged_at_every_temperature_and_are_plain_decodings_whatever_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, report = write_folder(tmp_path / "model"), tmp_path / "report.json"
    options = ["--model", str(folder), "--only", "stories", "--repeats", "1", "--max-new-tokens", "12"]
    assert command.main([*options, "--json", str(report), "--device", "cpu"]) == 0
    rows = json.loads(report.read_text())["stories"]
    assert {row["temperature"] for row in rows} == {0, 0.7, 1}
    assert len({row["decoder"] for row in rows}) >= 5  # and low bits, if they gain on this machine
    for row in rows:
        assert row["equal"] == "3/3" and row["about it"] == 0
        plain = next(other for other in rows if other["temperature"] == row["temperature"])
        assert (row["repeated"], row["tokens"]) == (plain["repeated"], plain["tokens"])
    assert "about it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--max-new-tokens", "3"], "--max-new-tokens must be at least 8"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "toaster"], "device 'toaster' is not there"),
        (["--json", "/no/such/folder/report.json"], "/no/such/folder/report.json cannot be written"),
        (["--plot", "picture.gif"], "--plot picture.gif must end in .svg or .png"),
        (["--plot", "picture.png", "--only", "floor"], "--plot concerns the sections speed, costs, context only"),
        (["--only", "speed,everything"], "--only 'everything' is unknown: give costs, bits, speed"),
        (["--against", "transformers,vllm"], "--against 'vllm' is unknown: give transformers, llama.cpp"),
        (
            ["--against", "transformers", "--only", "floor"],
            "--against concerns the sections speed, first-token only",
        ),
        (
            ["--against", f"llama.cpp={__file__}"],
            "--against llama.cpp needs a package that is not installed: pip install llama-cpp",
        ),
        (["--model", "/no/model"], "no folder '/no/model'"),
        (["--max-new-tokens", "250"], "a prompt of "),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "PROMPTS", SMALL_PROMPTS)
    monkeypatch.setattr(command.util, "find_spec", lambda name: None if name == "llama_cpp" else object())
    model = ["--model", str(write_folder(tmp_path / "model"))]
    assert command.main([*model, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {complaint}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("given", "file"), [("llama.cpp", ""), ("llama.cpp=/no/model.gguf", "/no/model.gguf")])
def test_llama_cpp_without_a_gguf_file_is_refused_and_the_remedy_named(
    given: str, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.util, "find_spec", lambda name: object())
    assert command.main(["--against", f"transformers,{given}"]) == 2
    assert capsys.readouterr().err == (
        f"error: --against llama.cpp={file} names no file: write a GGUF file of the model with llama.cpp's "
        "convert_hf_to_gguf.py and give llama.cpp=FILE.gguf\n"
    )


def test_steps_are_warmed_up_and_then_take_turns(ticking: list[float]) -> None:
    """Seconds of the warm-up are left out; median, fastest and slowest are those of each step."""
    order: list[str] = []

    def step(name: str, *seconds: float) -> None:
        ticking[0] += seconds[order.count(name)]
        order.append(name)

    steps = [lambda: step("a", 99, 1, 5, 2), lambda: step("b", 99, 30, 10, 20)]
    timings = take_turns(steps, 3, CPU)
    assert order == ["a", "b"] * 4
    assert timings == [Timing(2, 1, 5, 3), Timing(20, 10, 30, 3)]
    assert sections.timed(timings[1], timings[0]) == {
        "ms": {"median": 20_000, "lowest": 10_000, "highest": 30_000},
        "ratio": 10,
    }


def test_contenders_take_turns_on_each_prompt_after_a_warm_up(ticking: list[float], tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []

    def contender(name: str, seconds: float) -> Contender:
        def write(prompt: list[int], count: int) -> Written:
            calls.append((name, prompt[0], count))
            ticking[0] += seconds * count * (1 + (len(calls) > 6))
            return Written([7] * count)

        return write

    bench = bench_of(write_folder(tmp_path), "--repeats", "2", "--max-new-tokens", "20")
    texts = time_texts(bench, {"a": contender("a", 0.25), "b": contender("b", 0.5)}, bench.prompts)
    warm_up = [(name, 1, libraries.WARM_UP_TOKENS) for name in "ab"]
    assert calls == warm_up + [(name, prompt, 20) for prompt in (1, 2) for name in "ab"] * 2
    assert texts["a"].seconds.tolist() == [7.5, 7.5] and texts["b"].seconds.tolist() == [15, 15]
    assert sections.text_columns(texts["a"], texts["b"])["speed-up"]["median"] == 2


def written(tokens: int, drafted: list[int], prefill: float) -> Written:
    """A text whose rounds had drafts of these lengths, however much of them was accepted."""
    return Written([0] * tokens, [Round(0, [0] * length, 0, [0]) for length in drafted], prefill)


def test_a_prediction_charges_every_round_for_the_draft_it_had() -> None:
    """8 plain tokens take 8 s after a prompt of 2 s, so a step is one second."""
    plain = Texts([written(8, [0] * 8, 2.0)] * 2, np.array([10.0, 10.0]))
    drafted = Texts([written(8, [2, 0, 1], 3.0), written(8, [0] * 8, 2.0)], np.array([99.0, 99.0]))
    rounds = (2 * 0.5 + 1.5) + 1.0 + (0.5 + 1.25)
    costs = CostTable(0.5, (1.0, 1.25, 1.5))
    assert predicted_speedups(drafted, plain, costs) == pytest.approx([10 / (3 + rounds), 1.0])


@pytest.mark.parametrize("tied", [True, False])
def test_the_floor_is_the_time_to_read_every_weight_once_but_of_a_mere_table_one_row(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "take_turns", lambda steps, repeats, device: [Timing(9, 0.5, 9, 7)])
    monkeypatch.setattr(sections, "BANDWIDTH_BYTES", {"cpu": 4000})
    bench = bench_of(write_folder(tmp_path, LLAMA | {"tie_word_embeddings": tied}, dtype=torch.bfloat16))
    config = bench.setting.model.config
    read = 2 * (parameter_count(config) - (0 if tied else config.vocab_size * config.hidden_size))
    (row,) = sections.floor_section(bench)
    assert row == pytest.approx({"MB": read / 1e6, "GB/s": 8e-6, "ms": read / 8, "tokens/s": 8000 / read})


def test_memory_sets_what_is_held_beside_the_estimate(tmp_path: Path) -> None:
    """The tensors of this tiny model are all counted; its decoding stays in the estimate's order of size."""
    folder = write_folder(tmp_path)
    weights, decoding = sections.memory_section(bench_of(folder, model=accelerate(load_model(folder))))
    assert weights["MB"] == pytest.approx(weights["estimated MB"], rel=0.001)
    assert decoding["estimated MB"] / 3 < decoding["MB"] < decoding["estimated MB"] * 3


def test_a_librarys_first_token_is_set_beside_ours_of_the_same_prompt(
    tmp_path: Path, ticking: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns; the other contenders of a library are not timed."""
    read: list[tuple[str, int, int]] = []

    def write(name: str, seconds: int, prompt: list[int], count: int) -> Written:
        read.append((name, len(prompt), count))
        ticking[0] += seconds * len(prompt)
        return Written([0])

    monkeypatch.setattr(sections, "contender", lambda *_: partial(write, "ours", 1))
    bench = bench_of(write_folder(tmp_path), "--quick", "--repeats", "2")
    bench.libraries = {"transformers": partial(write, "theirs", 3), "transformers, lookup": partial(write, "no", 1)}
    rows = sections.first_token_section(bench)
    assert read == [(name, length, 1) for name in ("ours", "theirs") for length in (64, 256)] * 3
    assert [(row["decoder"], row["tokens"], row["ms"]["median"], row["ratio"]) for row in rows] == [
        ("plain", 64, 64_000, 1),
        ("plain", 256, 256_000, 1),
        ("transformers", 64, 192_000, 3),
        ("transformers", 256, 768_000, 3),
    ]


def test_what_a_library_cannot_do_with_a_model_is_a_line_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prompt: list[int], count: int) -> Written:
        raise RuntimeError("no such\nthing")

    def refuse(bench: Bench) -> dict[str, Contender]:
        raise InputError("not this family")

    good = {"good": lambda prompt, count: Written([0] * count), "bad": fail}
    monkeypatch.setattr(libraries, "LIBRARIES", {"transformers": lambda bench: good, "llama.cpp": refuse})
    bench = bench_of(write_folder(tmp_path, GEMMA2), "--against", "transformers,llama.cpp=model.gguf")
    assert list(libraries.library_contenders(bench)) == ["good"]
    assert capsys.readouterr().err.splitlines() == [
        "[bad: not possible with this model: no such thing]",
        "[llama.cpp: not possible with this model: not this family]",
    ]


def drafts_of(folder: Path, *options: str) -> dict[str, Drafting]:
    bench = bench_of(folder, "--quick", *options)
    return model_drafts(bench.setting, bench.options)


def test_a_verification_of_the_longest_draft_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "LONGEST_VERIFICATION", 2)
    bench = bench_of(write_folder(tmp_path), "--quick", "--exit-layer", "2")
    bench.drafts = model_drafts(bench.setting, bench.options)
    rows = sections.costs_section(bench)
    longest = max(draft.new_policy().gamma for draft in bench.drafts.values())
    assert longest > 2 and [row["tokens"] for row in rows if "tokens" in row] == list(range(1, longest + 2))


def test_a_folders_own_plan_is_measured_unless_it_says_not_to_draft(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": []}))
    assert drafts_of(folder)["plan.json"].plan == LayerPlan.skipping(4, [1], [])
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [], "gamma": 0}))
    assert "plan.json" not in drafts_of(folder)


def test_one_cache_serves_every_text_of_every_contender_and_changes_none(tmp_path: Path) -> None:
    bench = bench_of(write_folder(tmp_path), "--draft-model", str(tmp_path))
    drafts = model_drafts(bench.setting, bench.options)
    contenders = our_contenders(bench.setting, drafts)
    prompts = [[5, 9, 2, 7, 5, 9], [1, 2], [7, 7, 7, 3]]
    for name in ("plain", "lookup", "exit 2", "model"):
        together = [contenders[name](prompt, 12).tokens for prompt in prompts]
        alone = [our_contenders(bench.setting, drafts)[name](prompt, 12).tokens for prompt in prompts]
        assert together == alone


def test_exits_are_measured_at_the_layers_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert list(drafts_of(folder, "--exit-layer", "1", "3", "1")) == ["exit 1", "exit 3"]
    with pytest.raises(InputError, match="exit layer 5 is not in"):
        drafts_of(folder, "--exit-layer", "1", "5")
