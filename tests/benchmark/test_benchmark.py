"""Benchmark: contenders in turns, the columns of its tables, texts written together, pictures, and
wrong input.
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmark.__main__ as command
from app.chooser import Setting
from benchmark import sections, timing
from benchmark.contenders import Bench, Written, find_drafts
from benchmark.picture import picture
from benchmark.sections import (
    SECTIONS,
    WARM_UP_TOKENS,
    speedup_by_costs,
    time_texts,
)
from benchmark.timing import take_turns
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from model import LayerPlan
from search.costs import CostTable
from search.texts import PROMPTS
from tests.calls import status_of
from tests.folders import LLAMA, write_folder
from tests.pictures import faults
from tests.refusal import refusal
from tests.weights.test_fetch import write_gguf
from weights.fetch import convert
from weights.load import load_model
from weights.memory import parameter_count
from weights.tokenizer import Tokenizer

SMALL_PROMPTS = {"short": ["the hen"], "long": ["a thin hen in a tin"]}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to read, little to write."""
    monkeypatch.setattr(command, "PROMPTS", SMALL_PROMPTS)
    kinds = command.OPTIONS[""]["--prompts"]
    monkeypatch.setitem(kinds, "choices", [*SMALL_PROMPTS, "stories"])
    monkeypatch.setitem(kinds, "default", tuple(SMALL_PROMPTS))
    monkeypatch.setattr("search.costs.PATIENCE", 0.0)
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("benchmark.contenders.LONGEST_VERIFICATION", 6)
    monkeypatch.setattr(sections, "TOGETHER", (1, 2, 4))


def setting_of(folder: Path) -> Setting:
    return Setting(folder, load_model(folder), Tokenizer(folder), SamplingParams(), 24)


def bench_of(folder: Path, max_new_tokens: int = 64) -> Bench:
    prompts = [("story", [1]), ("code", [2])]
    return Bench(setting_of(folder), prompts, {}, {}, max_new_tokens)


def report_of(folder: Path, *options: str) -> dict[str, Any]:
    """The report of a run of the command."""
    file = folder / "report.json"
    assert command.main([*options, "--device", "cpu", "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until a test moves it: ``ticking[0] += seconds``."""
    time = [0.0]
    monkeypatch.setattr(timing, "now", lambda device: time[0])
    return time


@pytest.mark.usefixtures("small")
def test_a_run_reports_all_contenders_on_all_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers too, by each of its ways to draft: greedy texts of this float32 model agree with
    ours.
    """
    folder, drawn = write_folder(tmp_path / "model"), tmp_path / "picture.svg"
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [2], "gamma": 3}))
    options = f"--model {folder} --draft-model {folder} --max-new-tokens 8 --exit-layer 3"
    # a grammar needs a model with an end-of-text token, as in the test of that section
    wanted = [name for name in SECTIONS if name != "structured"]
    more = ["--against", "transformers", "--only", *wanted, "--plot", str(drawn)]
    measured = report_of(tmp_path, *options.split(), *more)
    captured = capsys.readouterr()
    drafts = ["exit 3", "low bits", "plan.json", "model"]
    rows = {row["decoder"]: row for row in measured["speed"]}
    drafts = [name for name in drafts if name != "low bits" or name in rows]  # where they gain
    names = [
        "plain",
        "lookup",
        *(name + how for name in drafts for how in ("", ", adaptive")),
        "auto",
        "transformers",
    ]
    names += ["transformers, lookup", "transformers, exit 3", "transformers, model"]
    assert list(rows) == names
    assert all(name in captured.out for name in names) and "not possible" not in captured.err
    for name, row in rows.items():
        assert (row["equal"], len(row["seconds"])) == ("2/2", 2)
        assert row.keys() >= SMALL_PROMPTS.keys()
        # auto drafts in several ways, with different costs
        one_draft = "transformers" not in name and name not in ("plain", "auto")
        assert (row["predicted"] is not None) == one_draft
    assert rows["model"]["accepted"] == 1, "the draft model is the target"
    assert rows["plain"]["speed-up"] == {"median": 1, "lowest": 1, "highest": 1}
    assert list(measured) == ["about", *wanted]
    steps = [(row["step"], row.get("tokens")) for row in measured["costs"]]
    longest = len(steps) - len(drafts)
    assert steps[:longest] == [("verification", n + 1) for n in range(longest)] and longest >= 6
    assert steps[longest:] == [(f"draft step, {name}", None) for name in drafts]
    first = [(row["decoder"], row["tokens"]) for row in measured["first-token"]]
    assert first == [(name, length) for length in (64, 256) for name in ("plain", "transformers")]
    together = measured["together"]
    beside = [*product((1, 2, 4), ("plain", "model", "auto"), ["4/4"])]
    assert [(row["texts"], row["decoder"], row["equal"]) for row in together] == beside
    assert measured["about"]["versions"]["transformers"] and "<svg" in drawn.read_text()


@pytest.mark.usefixtures("small")
def test_texts_written_together_equal_those_written_alone(tmp_path: Path) -> None:
    """In bfloat16 and under the race too; the draft is the one named, here the exit."""
    folder = write_folder(tmp_path / "model", dtype=torch.bfloat16)
    options = f"--model {folder} --only together --max-new-tokens 9 --exit-layer 2"
    sampled = "--temperature 0.7 --prompts short stories --quick"
    rows = report_of(tmp_path, *options.split(), *sampled.split())["together"]
    ways = [(way, "4/4") for way in ("plain", "exit 2", "auto")]
    assert [(row["decoder"], row["equal"]) for row in rows] == ways * 3


@pytest.mark.usefixtures("small")
def test_llama_cpp_is_measured_on_a_file_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "llama_cpp",
        reason="needs llama-cpp-python, which compiles for minutes: pip install it to run this",
    )
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    write_gguf(file, folder, in_bfloat16=True)
    convert(file, folder)
    options = f"--model {folder} --dtype float32 --only speed --quick --max-new-tokens 8"
    report = report_of(tmp_path, *options.split(), "--against", f"llama.cpp={file}")
    equal = {row["decoder"]: row["equal"] for row in report["speed"]}
    assert equal["llama.cpp"] == "2/2" and "llama.cpp: CPU : " in capsys.readouterr().err


def test_the_picture_of_a_report_is_in_order() -> None:
    names = ["plain", "lookup", "low bits", "auto", "exit 24, adaptive", "transformers, lookup"]
    columns: dict[str, Any] = {"speed-up": {"median": 1.1}, **dict.fromkeys(PROMPTS, 1.2)}
    rows = [{"decoder": name, **columns} for name in names]
    together = [
        {"texts": n, "decoder": name, "tokens/s": 60.0 * n, "speed-up": 1.2 / n}
        for n in (1, 2, 4, 8, 16)
        for name in ("plain", "low bits", "auto")
    ]
    both = {"speed": rows, "together": together}
    for report in ({"speed": rows, "costs": []}, {"together": together}, both):
        assert list(faults(lambda report=report: picture(report))) == []
    speed = picture({"speed": rows}).axes[0]
    assert [label.get_text().split("  ")[0] for label in speed.get_yticklabels()] == names


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--max-new-tokens", "3"], "argument --max-new-tokens: must be at least 8, found 3"),
        (["--plot", "picture.gif"], "--plot needs a name that ends in .svg or .png"),
        (
            ["--plot", "picture.png", "--only", "floor"],
            "--plot needs a name that ends in .svg or .png, and",
        ),
        (["--against", "transformers,vllm"], "--against takes transformers, llama.cpp=FILE.gguf"),
        (
            ["--against", "llama.cpp=none"],
            "--against llama.cpp needs pip install llama-cpp-python; llama.cpp also needs =FILE",
        ),
        (
            ["--against", "transformers", "--temperature", "0.7"],
            "--against measures greedy texts: leave out --temperature",
        ),
        (["--max-new-tokens", "250"], "the longest text exceeds the context of 256"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("small")
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_folder(tmp_path / "model")
    assert status_of(command.main, ["--model", str(model), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"error: {complaint}")


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_the_first_line_of_a_section_is_the_title_of_its_table(section: Any) -> None:
    assert section.__doc__.splitlines()[0].endswith(".")


def test_steps_are_timed_in_turns_after_a_warm_up(ticking: list[float]) -> None:
    """A warm-up, which may compile, is not timed."""
    takes = iter([60.0, 70.0, 1.0, 2.0, 3.0, 4.0])

    def step() -> None:
        ticking[0] += next(takes)

    turns = take_turns({"a": step, "b": step}, 2, torch.device("cpu"))
    assert turns == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


def test_contenders_take_turns_on_each_prompt_after_a_warm_up(
    ticking: list[float], tmp_path: Path
) -> None:
    calls: list[tuple[float, int, int]] = []

    def write(seconds: float, prompt: list[int], count: int) -> Written:
        calls.append((seconds, prompt[0], count))
        ticking[0] += seconds * count
        return Written([7] * count)

    bench = bench_of(write_folder(tmp_path), 20)
    texts = time_texts(bench, {"a": partial(write, 0.25), "b": partial(write, 0.5)})
    turns = ((1, WARM_UP_TOKENS), (1, 20), (2, 20))  # a prompt, and the number of tokens
    assert calls == [(seconds, *turn) for turn in turns for seconds in (0.25, 0.5)]
    seconds = {name: [text.seconds for text in found] for name, found in texts.items()}
    assert seconds == {"a": [5, 5], "b": [10, 10]}


def test_a_prediction_charges_every_round_for_the_draft_it_had() -> None:
    """8 plain tokens take 8 s after a prompt of 2 s, so a step is one second, however much of a
    draft was accepted.
    """
    plain, costs = Written([0] * 8, prefill=2.0, seconds=10.0), CostTable(0.5, (1.0, 1.25, 1.5))
    drafts = [Round(0, [0] * length, 0, [0]) for length in (2, 0, 1)]
    drafted = Written([0] * 8, drafts, prefill=3.0)
    rounds = (2 * 0.5 + 1.5) + 1.0 + (0.5 + 1.25)
    assert speedup_by_costs(drafted, plain, costs) == pytest.approx(10 / (3 + rounds))


def test_the_floor_is_the_time_to_read_every_matrix_once_but_no_untied_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "take_turns", lambda *how: {"read": [9, 0.5, 9]})
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", {"cpu": 4000})
    for tied in (True, False):
        raw = LLAMA | {"tie_word_embeddings": tied}
        bench = bench_of(write_folder(tmp_path, raw, dtype=torch.bfloat16))
        config = bench.setting.model.config
        unread = (2 * config.num_layers + 1) * config.hidden_size  # norms
        unread += 0 if tied else config.vocab_size * config.hidden_size
        read = 2 * (parameter_count(config) - unread)
        expected = {"MB": read / 1e6, "GB/s": 8e-6, "ms": read / 8, "tokens/s": 8000 / read}
        assert sections.floor_section(bench) == [pytest.approx(expected)]


def test_a_librarys_first_token_is_set_beside_ours_of_the_same_prompt(
    tmp_path: Path, ticking: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns; the other contenders of a library are not timed."""

    def write(seconds: int, prompt: list[int], count: int) -> Written:
        ticking[0] += seconds * len(prompt) * count
        return Written([0])

    monkeypatch.setattr(sections, "decode", lambda *given: write(1, *given[-2:]))
    bench = bench_of(write_folder(tmp_path))
    bench.libraries = {"transformers": partial(write, 3), "transformers, lookup": partial(write, 1)}
    rows = sections.first_token_section(bench)
    ratios = [("plain", 1), ("transformers", 3)]
    expected = [(name, n, ratio * n * 1000, ratio) for n in (64, 256) for name, ratio in ratios]
    assert [(row["decoder"], row["tokens"], row["ms"], row["ratio"]) for row in rows] == expected


def test_a_context_shorter_than_all_timed_prompts_has_no_times(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, LLAMA | {"max_position_embeddings": 48})
    assert sections.first_token_section(bench_of(folder)) == []


def test_the_drafts_are_those_asked_for_and_a_plan_of_the_folder_that_pays(tmp_path: Path) -> None:
    def drafts(*exits: int) -> dict[str, LayerPlan | None]:
        found = find_drafts(setting_of(folder), exits)
        return {name: draft.plan for name, draft in found.items()}

    folder = write_folder(tmp_path / "model")
    exits = ["exit 2", "exit 2, adaptive", "exit 3", "exit 3, adaptive"]
    assert list(drafts()) == ["lookup", *exits, "auto"]
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": []}))
    assert drafts(1)["plan.json"] == LayerPlan.skipping(4, [1], [])
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [], "gamma": 0}))
    assert list(drafts(1)) == ["lookup", "exit 1", "exit 1, adaptive", "auto"]
    assert "exit layer 5 is not in" in refusal(drafts, 5)


@pytest.mark.usefixtures("small")
def test_without_a_draft_by_one_model_verification_has_costs_all_the_same(tmp_path: Path) -> None:
    """A model of one layer has no early exit."""
    bench = bench_of(write_folder(tmp_path, LLAMA | {"num_hidden_layers": 1}))
    bench.drafts = find_drafts(bench.setting)
    costs = bench.costs["lookup"]
    assert list(bench.costs) == ["lookup"]
    assert (costs.draft, costs.verify[0], len(costs.verify)) == (0, 1, 6)


def test_texts_under_a_schema_equal_the_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"enum": ["a longer label", "another one"]}
    (tmp_path / "schemas.json").write_text(json.dumps({"x": {"request": "hi", "schema": schema}}))
    monkeypatch.setattr(sections, "SCHEMAS", tmp_path / "schemas.json")
    options = "--model", "tiny-llama", "--quick", "--only", "structured"
    rows = report_of(tmp_path, *options)["structured"]
    assert {"forced", "auto"} <= {row["decoder"] for row in rows}
    *measured, _ = (row for row in rows if row["decoder"] == "forced")
    assert [(row["schema"], row["equal"]) for row in measured] == [("x", "2/2")]
    assert all(row["a round"] > 1 for row in measured)
