"""The benchmark measures the same work for every contender, in turns, and says of it what the numbers say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import benchmark.__main__ as command
from benchmark import libraries, sections, stories
from benchmark.contenders import (
    WARM_UP_TOKENS,
    Bench,
    Contender,
    Written,
    find_drafts,
    our_contenders,
)
from benchmark.libraries import other_contenders
from benchmark.report import picture
from benchmark.sections import Result
from decoding.rounds import Round
from decoding.run.chooser import Drafting, Setting, planned
from decoding.run.costs import CostTable, filled_cache, predicted_speedup
from decoding.run.plan_file import DraftPlan
from decoding.sampling import SamplingParams
from model import Decoder, InputError, KVCache, LayerPlan, clock
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
OURS, THEIRS = "prompt of {} tokens", "transformers, {} tokens"
SMALL_PROMPTS = {"short": ["the hen"], "long": ["a thin hen in a tin"]}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to read, little to write."""
    monkeypatch.setattr(command, "PROMPTS", SMALL_PROMPTS)
    monkeypatch.setattr(sections, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(sections, "LONGEST_VERIFICATION", 6)


def setting(folder: Path, model: Decoder | None = None, positions: int = 24) -> Setting:
    return Setting(folder, model or load_model(folder), Tokenizer(folder), SamplingParams(), positions)


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
    folder, report, picture = write_folder(tmp_path / "model"), tmp_path / "report.json", tmp_path / "picture.svg"
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [2], "gamma": 3}))
    options = ["--model", str(folder), "--draft-model", str(folder), "--max-new-tokens", "8", "--repeats", "2"]
    files = ["--json", str(report), "--plot", str(picture)]
    assert command.main([*options, *files, "--device", "cpu", "--against", "transformers"]) == 0
    shown, measured = capsys.readouterr().out, json.loads(report.read_text())
    drafts = ["exit 2", "exit 3", "low bits", "plan.json", "model"]
    names = ["plain", "lookup", *(name + how for name in drafts for how in ("", ", adaptive")), "auto", "transformers"]
    names += ["transformers, lookup", "transformers, exit 3", "transformers, model"]
    rows = {row["name"]: row for row in measured["speed"]}
    assert list(rows) == names
    assert all(name in shown for name in names)
    assert measured["notes"] == []
    for row in rows.values():
        assert (row["texts"], row["equal"], row["equal_start"]) == (2, 2, 2)
        assert {prompt: len(times) for prompt, times in row["seconds"].items()} == {
            "short: the hen": 2,
            "long: a thin hen in a tin": 2,
        }
        assert list(row["speed_up_by_kind"]) == list(SMALL_PROMPTS)
        one_draft = "transformers" not in row["name"] and row["name"] not in ("plain", "auto")
        assert (row["predicted"] is not None) == one_draft, "auto drafts in several ways, each with costs of its own"
    assert rows["model"]["acceptance_rate"] == 1, "the draft model is the target"
    assert rows["plain"]["speed_up"] == {"median": 1, "lowest": 1, "highest": 1}
    assert set(measured) == {*command.SECTIONS[:-1], "about", "notes"}
    assert [row["draft"] for row in measured["costs"]["draft"]] == drafts
    assert [row["tokens"] for row in measured["costs"]["verify"]] == [1, 2, 3, 4, 5, 6]
    first = [row["name"] for row in measured["first-token"]]
    assert first == [name.format(length) for name in (OURS, THEIRS) for length in (64, 128, 256)]
    assert measured["about"]["versions"]["transformers"]
    assert "<svg" in picture.read_text()


@pytest.mark.usefixtures("small")
def test_llama_cpp_is_measured_on_a_file_of_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which compiles for minutes: pip install it to run this"
    )
    folder, file, report = tmp_path / "model", tmp_path / "model.gguf", tmp_path / "report.json"
    folder.mkdir()
    write_gguf(file, in_bfloat16=True)
    convert(file, folder)
    options = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--only", "speed", "--quick"]
    files = ["--against", f"llama.cpp={file}", "--json", str(report)]
    assert command.main([*options, "--max-new-tokens", "8", *files]) == 0
    measured = json.loads(report.read_text())
    row = next(row for row in measured["speed"] if row["name"] == "llama.cpp")
    assert (row["texts"], row["equal"]) == (2, 2) and measured["notes"] == []
    assert measured["about"]["llama.cpp"].startswith(f"{file}; CPU : ")
    assert f"llama.cpp: {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize("sections", [("speed",), ("costs",), ("speed", "costs", "context")])
def test_the_picture_of_a_report_is_in_order(sections: tuple[str, ...]) -> None:
    names = ["plain", "lookup", "lowbit", "auto", "exit 24, adaptive", "transformers, lookup", "transformers, exit 24"]
    kinds = dict.fromkeys(PROMPTS, 1.2)
    middle = {"speed_up": {"median": 1.1}, "speed_up_by_kind": kinds}
    rows = [{"name": name, "predicted": {"median": 1.0} if at else None, **middle} for at, name in enumerate(names)]
    steps = [{"tokens": 128 << at, "median": 0.02, "fastest": 0.01, "slowest": 0.03} for at in range(6)]
    verify = [{"tokens": count, "ratio": 1 + count / 10} for count in (1, 2, 3)]
    report = {"speed": rows, "costs": {"verify": verify}, "context": steps}
    assert list(faults(lambda: picture({name: report[name] for name in sections}))) == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("section", command.SECTIONS)
def test_a_section_alone_measures_nothing_else(section: str, tmp_path: Path) -> None:
    """But the costs, without which no speed can be predicted."""
    folder, report = write_folder(tmp_path / "model"), tmp_path / "report.json"
    options = ["--model", str(folder), "--quick", "--max-new-tokens", "8", "--json", str(report), "--device", "cpu"]
    assert command.main([*options, "--only", section]) == 0
    assert set(json.loads(report.read_text())) == {section, "about", "notes"} | (
        {"costs"} if section == "speed" else set()
    )


@pytest.mark.usefixtures("small")
def test_stories_are_judged_at_every_temperature_and_are_plain_decodings_whatever_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = write_folder(tmp_path / "model"), tmp_path / "report.json"
    monkeypatch.setattr(stories, "STORIES", 3)
    options = ["--model", str(folder), "--only", "stories", "--repeats", "1", "--max-new-tokens", "12"]
    assert command.main([*options, "--json", str(report), "--device", "cpu"]) == 0
    rows = json.loads(report.read_text())["stories"]
    assert {row["temperature"] for row in rows} == {0, 0.7, 1} and len({row["name"] for row in rows}) == 6
    for row in rows:
        assert row["equal"] == row["texts"] == 3 and row["mentions"] == 0
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
        (["--plot", "/no/such/folder/picture.png"], "/no/such/folder/picture.png cannot be written"),
        (["--plot", "picture.gif"], "--plot picture.gif must end in .svg or .png"),
        (["--plot", "picture.png", "--only", "floor"], "--plot draws speed, costs, context"),
        (["--only", "speed,everything"], "--only 'everything' is unknown: give speed, costs"),
        (["--against", "transformers,vllm"], "--against 'vllm' is unknown: give transformers, llama.cpp"),
        (
            ["--against", "transformers", "--only", "floor"],
            "--against is measured in the sections speed and first-token",
        ),
        (
            ["--against", f"llama.cpp={__file__}"],
            "--against llama.cpp needs a package that is not installed: pip install llama-cpp",
        ),
        (["--against", "transformers=a.gguf"], "--against transformers takes no file"),
        (["--model", "/no/model"], "no folder '/no/model'"),
        (["--draft-model", "/no/model"], "no folder '/no/model'"),
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


@pytest.mark.parametrize(
    ("given", "said"), [("llama.cpp", "none is given"), ("llama.cpp=/no/model.gguf", "'/no/model.gguf' is no file")]
)
def test_llama_cpp_without_a_gguf_file_is_refused_and_the_remedy_named(
    given: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.util, "find_spec", lambda name: object())
    assert command.main(["--against", f"transformers,{given}"]) == 2
    assert capsys.readouterr().err == (
        f"error: --against llama.cpp needs a GGUF file of the model, and {said}: "
        "write one with llama.cpp's convert_hf_to_gguf.py and give llama.cpp=FILE.gguf\n"
    )


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "model", LLAMA | {"max_position_embeddings": 4096})
    other = write_folder(tmp_path / "other", LLAMA | {"vocab_size": 300})
    assert command.main(["--model", str(folder), "--draft-model", str(other), "--only", "costs"]) == 2
    assert "has another vocabulary (300 entries)" in capsys.readouterr().err


def test_steps_are_warmed_up_and_then_take_turns(ticking: list[float]) -> None:
    """Seconds of the warm-up count for nothing; each step's median, fastest and slowest are its own."""
    order: list[str] = []

    def step(name: str, *seconds: float) -> None:
        ticking[0] += seconds[order.count(name)]
        order.append(name)

    steps = [lambda: step("a", 99, 1, 5, 2), lambda: step("b", 99, 30, 10, 20)]
    timings = take_turns(steps, 3, CPU)
    assert order == ["a", "b"] * 4
    assert timings == [Timing(2, 1, 5, 3), Timing(20, 10, 30, 3)]
    assert timings[1].row("b", timings[0], tokens=7) == {
        "name": "b", "median": 20, "fastest": 10, "slowest": 30, "count": 3, "ratio": 10, "tokens": 7,
    }  # fmt: skip


def test_contenders_take_turns_on_each_prompt_after_a_warm_up(ticking: list[float]) -> None:
    calls: list[tuple[str, int, int]] = []

    def contender(name: str, seconds: float) -> Contender:
        def write(prompt: list[int], count: int) -> Written:
            calls.append((name, prompt[0], count))
            ticking[0] += seconds * count
            return Written([7] * count)

        return Contender(write)

    prompts = [("story", "one", [1]), ("code", "two", [2])]
    results = sections.run({"a": contender("a", 0.25), "b": contender("b", 0.5)}, prompts, 20, 2, CPU)
    warm_up = [("a", 1, WARM_UP_TOKENS), ("b", 1, WARM_UP_TOKENS)]
    assert calls == warm_up + [(name, prompt, 20) for prompt in (1, 2) for name in "ab"] * 2
    assert results["a"].seconds == {("story", "one"): [5.0, 5.0], ("code", "two"): [5.0, 5.0]}
    assert sections.speedups(results["a"], results["b"]) == [2.0, 2.0]
    assert sections.speedups(results["a"], results["b"], "code") == [2.0]


def written(tokens: int, drafted: list[int], prefill: float) -> Written:
    """A text whose rounds drafted so much, however much of it was accepted."""
    return Written([0] * tokens, [Round(0, [0] * length, 0, [0]) for length in drafted], prefill)


def test_a_prediction_charges_every_round_for_the_draft_it_had() -> None:
    """8 plain tokens take 8 s after a prompt of 2 s, so a step is one second."""
    plain, result, costs = Result(), Result(), CostTable(0.5, (1.0, 1.25, 1.5))
    for key in (("story", "one"), ("code", "two")):
        plain.add(key, 10.0, written(8, [0] * 8, 2.0))
    result.add(("story", "one"), 99.0, written(8, [2, 0, 1], 3.0))
    result.add(("code", "two"), 99.0, written(8, [0] * 8, 2.0))
    rounds = (2 * 0.5 + 1.5) + 1.0 + (0.5 + 1.25)
    assert sections.predicted_speedups(result, plain, costs) == pytest.approx([10 / (3 + rounds), 1.0])


@pytest.mark.parametrize("gamma", [1, 3])
def test_of_a_draft_always_accepted_it_is_the_formulas_speedup(gamma: int) -> None:
    plain, result, costs = Result(), Result(), CostTable(0.25, (1.0, 1.1, 1.2, 1.5))
    tokens = 5 * (gamma + 1)
    plain.add(("story", "one"), 7.0, written(tokens, [0] * tokens, 0.0))
    result.add(("story", "one"), 99.0, written(tokens, [gamma] * 5, 0.0))
    expected = predicted_speedup(1.0, gamma, costs)
    assert sections.predicted_speedups(result, plain, costs) == pytest.approx([expected])


def test_cost_tables_are_the_measured_ratios() -> None:
    steps = {"verify": [{"ratio": 1.0}, {"ratio": 1.5}], "draft": [{"draft": "exit 2", "ratio": 0.5}]}
    assert sections.cost_tables(steps) == {
        "lookup": CostTable(0.0, (1.0, 1.5)),
        "exit 2": CostTable(0.5, (1.0, 1.5)),
    }


def test_the_kept_part_of_a_draft_step_is_its_forward_pass_under_the_plan(tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path / "model"))
    plan = LayerPlan.early_exit(4, 2)
    with torch.inference_mode():
        cache = filled_cache(model, 4)
        found = sections.kept_part(planned(model, DraftPlan(plan)), cache)()
        token = torch.zeros(1, 1, dtype=torch.int64)
        assert torch.equal(found, model(token, cache, sections.CONTEXT, plan))
        assert not torch.equal(found, model(token, cache, sections.CONTEXT))


@pytest.mark.parametrize("tied", [True, False])
def test_the_floor_is_the_time_to_read_every_weight_once_but_of_a_mere_table_one_row(
    tied: bool, tmp_path: Path, ticking: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "take_turns", lambda steps, repeats, device: [Timing(9, 0.5, 9, 7)])
    monkeypatch.setattr(sections, "BANDWIDTH_BYTES", 4000)
    folder = write_folder(tmp_path / "model", LLAMA | {"tie_word_embeddings": tied}, dtype=torch.bfloat16)
    model = load_model(folder)
    options = command.parse_arguments([])
    floor = sections.measure_floor(Bench(options, setting(folder, model), []))
    table = 0 if tied else model.config.vocab_size * model.config.hidden_size
    read = 2 * (parameter_count(model.config) - table)
    assert floor == {"weight_bytes": read, "bytes_per_second": 8000.0, "seconds_per_token": read / 8000}


def test_memory_sets_what_is_held_beside_the_estimate(tmp_path: Path) -> None:
    """The tensors of this tiny model are all counted; its decoding stays in the estimate's order of size."""
    folder = write_folder(tmp_path / "model")
    bench = Bench(command.parse_arguments([]), setting(folder, accelerate(load_model(folder))), [])
    weights, decoding = sections.measure_memory(bench)
    assert weights["measured"] == pytest.approx(weights["estimated"], rel=0.001)
    assert decoding["estimated"] / 2 < decoding["measured"] < decoding["estimated"] * 2


def test_a_librarys_first_token_is_set_beside_ours_of_the_same_prompt(tmp_path: Path, ticking: list[float]) -> None:
    """Read as often and in turns; a library's other ways to draft read no prompt of their own."""
    read: list[tuple[int, int]] = []

    def write(prompt: list[int], count: int) -> Written:
        read.append((len(prompt), count))
        ticking[0] += 3 * len(prompt)
        return Written([0])

    model = load_model(write_folder(tmp_path / "model"))
    prefill = model.prefill

    def timed(tokens: Tensor, cache: KVCache) -> None:
        ticking[0] += tokens.shape[1] + 1
        prefill(tokens, cache)

    model.prefill = timed
    bench = Bench(command.parse_arguments(["--quick", "--repeats", "2"]), setting(tmp_path / "model", model), [])
    bench.others = {"transformers": Contender(write), "transformers, lookup": Contender(write)}
    rows = sections.measure_first_token(bench)
    assert read == [(64, 1), (256, 1)] * 3
    assert [(row["name"], row["median"], row["ratio"]) for row in rows] == [
        (OURS.format(64), 64, 1),
        (OURS.format(256), 256, 4),
        (THEIRS.format(64), 192, 3),
        (THEIRS.format(256), 768, 3),
    ]


def test_what_a_library_cannot_do_with_a_model_is_a_note_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(prompt: list[int], count: int) -> Written:
        raise RuntimeError("no such\nthing")

    def refuse(*options: object) -> Contender:
        raise InputError("not this family")

    good = Contender(lambda prompt, count: Written([0] * count))
    monkeypatch.setattr(libraries, "transformers_contenders", lambda *of: {"good": good, "bad": Contender(fail)})
    monkeypatch.setattr(libraries, "llama_cpp_contender", refuse)
    folder = write_folder(tmp_path / "model", GEMMA2)
    options = command.parse_arguments(["--against", "transformers,llama.cpp=model.gguf"])
    bench = Bench(options, setting(folder), [("story", "one", [1])])
    assert list(other_contenders(bench)) == ["good"]
    assert bench.notes == [
        "bad: not possible with this model: no such thing",
        "llama.cpp: not possible with this model: not this family",
    ]


def drafts_of(folder: Path, *options: str) -> dict[str, Drafting]:
    return find_drafts(setting(folder), command.parse_arguments(["--quick", *options]))


def test_auto_drafts_with_the_folders_own_plan_and_else_by_lookup(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert our_contenders(setting(folder), {})["auto"].costs == "lookup"
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": []}))
    assert drafts_of(folder)["plan.json"].plan == LayerPlan.skipping(4, [1], [])
    assert our_contenders(setting(folder), {})["auto"].costs is None, "no table has the costs of both"


def test_a_plan_that_says_not_to_draft_leaves_auto_to_lookup_as_in_generate(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [], "gamma": 0}))
    assert "plan.json" not in drafts_of(folder)
    assert our_contenders(setting(folder), {})["auto"].costs == "lookup"


def test_one_cache_serves_every_text_of_every_contender_and_changes_none(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    drafts = drafts_of(folder, "--draft-model", str(folder))
    contenders = our_contenders(setting(folder), drafts)
    prompts = [[5, 9, 2, 7, 5, 9], [1, 2], [7, 7, 7, 3]]
    for name in ("plain", "lookup", "exit 2", "model"):
        together = [contenders[name].write(prompt, 12).tokens for prompt in prompts]
        alone = [our_contenders(setting(folder), drafts)[name].write(prompt, 12).tokens for prompt in prompts]
        assert together == alone


def test_exits_are_measured_at_the_layers_asked_for_and_else_at_the_middle_and_late(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert list(drafts_of(folder)) == ["exit 2", "exit 3"]
    assert list(drafts_of(folder, "--exit-layer", "1", "3", "1")) == ["exit 1", "exit 3"]
    with pytest.raises(InputError, match="exit layer 4 must be from 1 to 3"):
        drafts_of(folder, "--exit-layer", "1", "4")


def test_there_are_at_least_four_different_prompts_of_every_kind() -> None:
    assert {"story", "question", "code", "summary", "rewriting", "chat"} == PROMPTS.keys()
    assert all(len(set(prompts)) >= 4 for prompts in PROMPTS.values())
