"""Benchmark: a whole run on a shipped model, tables by a clock that stands still, costs and rounds
of shapes, the report of a GPU, and bad input.
"""

import json
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from app.common.files import read_json
from app.common.parsers import parser_of
from benchmark import __main__ as command
from benchmark import gpu_report, rounds, sections, shapes, steps, timing
from benchmark.picture import picture
from benchmark.ways import Written
from decoding.rounds import Round
from model.plan import LayerPlan
from tests.calls import interrupted, recorded, status_of
from tests.commands import Outcome
from tests.folders import LLAMA, write_folder
from tests.laws import tiny_model
from tests.pictures import faults
from tests.refusal import refusal
from training.corpus.stories import story_request
from weights.memory import Memory, parameter_count

ROOT = Path(__file__).parents[2]
ROUND = Round(0, [7, 7, 7], 1, [7, 7])
DRAFTS = ["exit 3", "low bits", "model"]
OURS = ["plain", "lookup", *(name + how for name in DRAFTS for how in ("", ", adaptive")), "auto"]
THEIRS = ["transformers", *(f"transformers, {name}" for name in ("lookup", "exit 3", "model"))]
RUN = (
    "--model tiny-llama --draft-model tiny-llama --exit-layer 3 --against transformers --quick"
    " --max-new-tokens 4 --prompts story stories --device cpu --dtype float32"
    f" --context 600 --only {' '.join(name for name in sections.SECTIONS if name != 'context')}"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all sections, on short texts; in float32 transformers' texts are ours. The run
    is interrupted while it prints the last table, and writes its files all the same. Texts written
    together take a second a token: so short ones have no difference of times to rely on.
    """
    place = tmp_path_factory.mktemp("report")
    files = "--json", str(place / "report.json"), "--plot", str(place / "report.svg")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "STRUCTURED_TOKENS", 24)
        patch.setattr(sections, "LENGTHS", (8, 64, 2048))
        patch.setattr(sections, "TOGETHER", (1, 3))
        patch.setattr(sections, "timed", lambda device, write, count: (write(count), count))
        interrupted(patch, command, "table", len(sections.SECTIONS))
        assert command.main([*RUN.split(), *files]) == 130
    assert "<svg" in (place / "report.svg").read_text()
    return json.loads((place / "report.json").read_text())


def test_all_ways_are_measured_and_all_texts_are_the_plain_ones(report: dict[str, Any]) -> None:
    assert [*report] == ["about", *sections.SECTIONS]
    for section, ways, equal in (
        ("speed", [*OURS, *THEIRS], "2/2"),
        ("structured", ["plain", "forced", "low bits", "auto"], "8/8"),
        ("context", ["plain", "lookup", "auto", "low bits", "low bits, newest 512"], "1/1"),
        ("together", ["plain", "model", "auto"] * 2, "1/1"),  # of one text, and of three
    ):
        assert {row["equal"] for row in report[section]} == {equal}
        assert [row["decoder"] for row in report[section]] == ways
    accepted = {row["decoder"]: row["accepted"] for row in report["speed"] + report["structured"]}
    assert accepted["model"] == 1, "the draft model is the target"
    assert accepted["forced"] == 1 and report["structured"][1]["a round"] > 1


def test_costs_are_those_of_each_step_and_first_tokens_those_of_short_prompts(
    report: dict[str, Any],
) -> None:
    steps = [(row["step"], row["tokens"]) for row in report["costs"]]
    assert steps == [
        *(("verification", rows) for rows in (1, 2, 4, 8, 16)),
        *((f"draft step, {name}", 1) for name in DRAFTS),
    ]
    first = [(row["decoder"], row["tokens"]) for row in report["first-token"]]
    assert first == [(way, length) for length in (8, 64) for way in ("plain", "transformers")]


def test_a_simulated_cost_is_that_of_the_rounds_and_drafts_of_the_written_texts(
    report: dict[str, Any],
) -> None:
    """All texts are also written with drafts of four tokens; each round adds one to the accepted
    ones.
    """
    [written] = [row for row in report["speed"] if row["decoder"] == "exit 3"]
    tokens, rounds = sum(written["tokens"]), sum(written["rounds"])
    drafted = (tokens - rounds) / written["accepted"]
    simulated = [row["speed-up"] for row in report["adaptive"] if row["decoder"] == "length 4"]
    assert simulated == pytest.approx(
        [tokens / (rounds + cost * drafted) for cost in sections.STEP_COSTS]
    )


def test_the_picture_of_a_report_is_in_order(report: dict[str, Any]) -> None:
    assert [*faults(lambda: picture({name: report[name] for name in sections.SECTIONS}))] == []


def test_ways_take_turns_and_a_table_follows_from_their_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only the ways move; each runs once before, untimed. "b" writes another text
    than "plain" in one of three turns, and tells its own seconds, and its round.
    """
    clock = [0.0]
    calls = []

    def write(
        name: str, seconds: float, token: int, told: float | None, turn: tuple[int, ...]
    ) -> Written:
        number, first, count = turn
        calls.append((number, name))
        clock[0] += seconds * count
        return Written([[first or token] * count], [ROUND] if told else [], told)

    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    ways = {
        "plain": partial(write, "plain", 2.0, 7, None),
        "a": partial(write, "a", 1.0, 7, None),
        "b": partial(write, "b", 9.0, 8, 10.0),
    }
    inputs = [(0, 1, 10), (1, 0, 10), (2, 1, 20)]
    rows = sections.compare(ways, inputs, torch.device("cpu"), ["x", "x", "y"])
    turns = [{*calls[at : at + 3]} for at in (0, 3, 6, 9)]
    assert turns == [{(number, name) for name in ways} for number in (0, 0, 1, 2)]
    assert [row["seconds"] for row in rows] == [[20, 20, 40], [10, 10, 20], [10, 10, 10]]
    assert [row["equal"] for row in rows] == ["3/3", "3/3", "2/3"]
    assert {row["repeated"] for row in rows} == {(6 + 6 + 16) / (7 + 7 + 17)}
    expected = {
        "x": 2,
        "y": 4,
        "accepted": 1 / 3,
        "a round": 2,
        "speed-up": {"median": 2, "lowest": 2, "highest": 4},
        "tokens/s": {"median": 1, "lowest": 1, "highest": 2},
    }
    assert rows[2] == rows[2] | expected
    assert "too short to be timed: raise --max-new-tokens" in refusal(
        sections.compare,
        {"plain": lambda _: Written([[7]], seconds=-0.1)},
        [0],
        torch.device("cpu"),
    )


def test_the_drafts_are_those_asked_for_and_a_plan_of_the_folder_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft has a length of its own, so that an adaptive one has that of a user's. A library has
    the same early exits.
    """
    folder = write_folder(tmp_path)
    monkeypatch.setattr(command.ways, "transformers_ways", lambda *given: (None, {}))
    noted = recorded(monkeypatch, command.ways, "transformers_ways", lambda _, exits, draft: exits)

    def drafts(*more: str, **plan: Any) -> list[str]:
        (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [], **plan}))
        given = ["--model", str(folder), "--device", "cpu", "--against", "transformers", *more]
        found = command.prepare(parser_of(command.OPTIONS).parse_args(given)).drafts.items()
        return [name for name, each in found if "adaptive" not in name and each.gamma is None]

    assert drafts(gamma=3) == ["lookup", "exit 2", "exit 3", "low bits", "plan.json", "auto"]
    assert drafts("--exit-layer", "1", gamma=0) == ["lookup", "exit 1", "low bits", "auto"]
    assert [[*exits] for exits in noted] == [[2, 3], [1]]


def test_the_stories_are_those_of_old_measurements() -> None:
    """They are made by templates of the corpus."""
    requests = [story_request(Random(seed))[0] for seed in range(command.STORIES)]
    assert sha256("\n".join(requests).encode()).hexdigest()[:16] == "865ac7c38bbe2b62"


# Shapes

PUBLISHED = {  # parameters of the models
    "smollm2-135m": 134.5e6,
    "qwen3-0.6b": 596.0e6,
    "llama-3.2-1b": 1235.8e6,
    "gemma-2-2b": 2614.3e6,
    "llama-3.2-3b": 3212.7e6,
    "qwen3-4b": 4022.5e6,
    "llama-3.1-8b": 8030.3e6,
}


def test_named_shapes_have_the_published_numbers_of_parameters() -> None:
    counts = {name: parameter_count(shapes.config_of(name)) for name in read_json(shapes.NAMED)}
    assert counts == pytest.approx(PUBLISHED, abs=6e4)


def test_costs_of_a_shape_are_in_its_plain_steps_and_give_its_speedups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only steps move: of a row two seconds, of each row more and of each step of a
    draft half a second. At acceptance 0.8 drafts of two tokens are best: (1 + 0.8 + 0.64) / 2.
    """
    clock = [0.0]

    def run(step: steps.Step, turn: int) -> None:
        clock[0] += step.count * (0.5 if step.drafter.plan else 2 + 0.5 * (step.rows - 1))

    monkeypatch.setattr(steps.Step, "run", run)
    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 4096}))
    given = "--shape", str(tmp_path / "config.json"), "--plot", str(tmp_path / "report.svg")
    assert command.main([*given, "--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["shapes"]
    verification = [(row["tokens"], row["plain rounds"], row["ms"]["median"]) for row in rows[:5]]
    assert verification == [(n, 1 + (n - 1) / 4, 2000 + 500 * (n - 1)) for n in steps.ROWS]
    drafts = [(row["plain rounds"], row["at 0.6"], row["at 0.8"]) for row in rows[5:-2]]
    assert drafts == [pytest.approx((0.25, 1.6 / 1.5, 2.44 / 2))] * 3
    named = [row["step"].removeprefix("draft step, ") for row in rows[5:]]
    assert named == ["exit", "low bits", "exit in low bits", "prompt", "prompt"]


def test_rounds_have_the_given_acceptance_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that moves a second with each step of the target, drafts of four tokens that are
    accepted whole write five tokens a second, and drafts that are rejected one. Lines name their
    shape; a fall-back of the model is told, and no row.
    """
    clock = [0.0]
    model = tiny_model("llama")

    def step(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        clock[0] += not any(isinstance(each, LayerPlan) for each in given)

    model.register_forward_pre_hook(step)
    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    monkeypatch.setattr(rounds, "shape_model", lambda *given: model)
    monkeypatch.setattr(rounds, "bandwidth", lambda device: 1.0)
    monkeypatch.setattr(rounds, "ACCEPTANCES", (0.0, 1.0))
    monkeypatch.setattr(rounds, "TOKENS", 25)
    model.trouble = "steps have fallen back"
    plain, *drafts = rounds.measure_rounds("toy", model.dtype, model.device)
    assert capsys.readouterr().err == "[toy: steps have fallen back]\n"
    lines = picture({"rounds": [plain, *drafts]}).axes[0].lines
    assert [line.get_label() for line in lines] == ["toy, exit"]
    assert plain["tokens/s"] == 1
    assert [(row["decoder"], row["speed-up"]) for row in drafts] == [("exit", 1), ("exit", 5)]


# The report of a GPU

PARTS = [
    ("Fails", ["ls", "no-such-file"], 60),
    ("Slow", ["sh", "-c", "echo slow; exec sleep 60"], 1),
    ("Missing", ["no-such-program"], 5),
    ("Stubborn", ["sh", "-c", "exit 137"], 5),  # as of timeout where it has to kill
    ("Last", ["echo", "last"], 60),
]


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_report, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(gpu_report, "parts", lambda model: PARTS)
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 0
    _, *parts = (tmp_path / "report.md").read_text().split("\n## ")
    assert [part.partition("\n")[0] for part in parts] == [
        "Fails: failed with status 2",
        "Slow: took too long",
        "Missing: could not start",
        "Stubborn: took too long",
        "Last: worked",
    ]
    assert "No such file" in parts[0] and "\nslow\n" in parts[1] and "\nlast\n" in parts[4]


def test_the_notebook_runs_without_a_gpu_and_says_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cells = json.loads((ROOT / "docs/gpu.ipynb").read_text("utf-8"))["cells"]
    exec("\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "code"), {})
    said = capfd.readouterr().out
    assert "not installed" not in said and "There is no GPU" in said and "no report" in said
    parts = gpu_report.parts("tiny-llama")
    assert all(title in said for title, *_ in parts)
    assert sum(seconds for *_, seconds in parts) <= 900


# Bad input

BAD = {
    "--max-new-tokens 1": "argument --max-new-tokens: must be at least 2, found 1",
    "--plot picture.gif": "argument --plot: must end in .svg or .png, found picture.gif",
    "--json no/such/folder/x.json": "no/such/folder",
    "--against vllm": "--against vllm: give transformers, or llama.cpp=FILE.gguf",
    "--against transformers --temperature 1": "--against measures greedy texts: leave out",
    "--exit-layer 99 --only first-token": "exit layer 99",
    "--shape lama-1b": "no shape is called 'lama-1b': give smollm2-135m, qwen3-0.6b",
    "--shape qwen3-0.6b --rounds lama-1b": "no shape is called 'lama-1b'",
    "--rounds qwen3-0.6b --draft-model x": "measure random weights: leave out --draft-model",
    "--shape qwen3-0.6b --model x --quick --prompts code --coupling ratio --max-new-tokens 8": (
        "leave out --model, --prompts, --quick, --max-new-tokens, --coupling"
    ),
    "--shape smollm2-135m": "; give a narrower --dtype or a smaller shape",
    "--only adaptive --against transformers": "other sections use these: leave out --against",
    "--only costs --context 64 --prompts code": "other sections use these: leave out --prompts",
    "--context 5000": "the prompt has 5018 tokens",
    "--model no-such": "no folder 'no-such'",
}


@pytest.mark.parametrize(("options", "complaint"), BAD.items(), ids=BAD)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: str,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No shape fits here."""
    monkeypatch.setattr(command.shapes, "estimate", lambda *_, **__: Memory(10**15, 0, 0, 0))
    model = "" if options.startswith(("--shape", "--rounds")) else "--model tiny-llama "
    status = status_of(command.main, f"{model}--device cpu {options}".split())
    assert complaint in Outcome(status, *capsys.readouterr()).complaint
