"""Benchmark: a whole run on a shipped model, tables by a clock that stands still, and bad input."""

import json
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from app.common.parsers import parser_of
from benchmark import __main__ as command
from benchmark import sections, timing
from benchmark.picture import picture
from benchmark.ways import Written
from decoding.rounds import Round
from tests.calls import interrupted, status_of
from tests.commands import Outcome
from tests.folders import write_folder
from tests.pictures import faults
from training.corpus.stories import story_request
from weights.memory import Memory

ROUND = Round(0, [7, 7, 7], 1, [7, 7])
DRAFTS = ["exit 3", "low bits", "model"]
OURS = ["plain", "lookup", *(name + how for name in DRAFTS for how in ("", ", adaptive")), "auto"]
THEIRS = ["transformers", *(f"transformers, {name}" for name in ("lookup", "exit 3", "model"))]
RUN = (
    "--model tiny-llama --draft-model tiny-llama --exit-layer 3 --against transformers --quick"
    " --max-new-tokens 4 --prompts story stories --device cpu --dtype float32 --only"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all sections, on short texts; in float32 transformers' texts are ours. The run
    is interrupted while it prints the last table, and writes its files all the same.
    """
    place = tmp_path_factory.mktemp("report")
    files = "--json", str(place / "report.json"), "--plot", str(place / "report.svg")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "STRUCTURED_TOKENS", 24)
        patch.setattr(sections, "LENGTHS", (8, 64, 2048))
        patch.setattr(sections, "TOGETHER", (1, 3))
        asked = [name for name in sections.SECTIONS if name != "context"]
        interrupted(patch, command, "table", len(sections.SECTIONS))
        assert command.main([*RUN.split(), *asked, "--context", "600", *files]) == 130
    assert "<svg" in (place / "report.svg").read_text()
    return json.loads((place / "report.json").read_text())


def test_all_ways_are_measured_and_all_texts_are_the_plain_ones(report: dict[str, Any]) -> None:
    assert [*report] == ["about", *sections.SECTIONS]
    for section, ways, equal in (
        ("speed", [*OURS, *THEIRS], "2/2"),
        ("structured", ["plain", "forced", "low bits", "auto"], "8/8"),
        ("context", ["plain", "lookup", "low bits", "auto", "low bits, newest 512"], "1/1"),
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
    assert steps[:5] == [("verification", rows) for rows in (1, 2, 4, 8, 16)]
    assert steps[5:] == [(f"draft step, {name}", 1) for name in DRAFTS]
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
    sections_alone = {name: report[name] for name in sections.SECTIONS}
    assert [*faults(lambda: picture(sections_alone))] == []


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


def test_the_drafts_are_those_asked_for_and_a_plan_of_the_folder_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft has a length of its own, so that an adaptive one has that of a user's. A library has
    the same early exits.
    """
    folder = write_folder(tmp_path)
    noted = []
    monkeypatch.setattr(command.ways, "transformers_ways", lambda *given: noted.append(given) or {})

    def drafts(*more: str, **plan: Any) -> list[str]:
        (folder / "plan.json").write_text(json.dumps({"attn": [1], "mlp": [], **plan}))
        given = ["--model", str(folder), "--device", "cpu", "--against", "transformers", *more]
        found = command.prepare(parser_of(command.OPTIONS).parse_args(given)).drafts.items()
        return [name for name, each in found if "adaptive" not in name and each.gamma is None]

    assert drafts(gamma=3) == ["lookup", "exit 2", "exit 3", "low bits", "plan.json", "auto"]
    assert drafts("--exit-layer", "1", gamma=0) == ["lookup", "exit 1", "low bits", "auto"]
    assert [[*exits] for _, exits, _ in noted] == [[2, 3], [1]]


def test_the_stories_are_those_of_old_measurements() -> None:
    """They are made by templates of the corpus."""
    requests = [story_request(Random(seed))[0] for seed in range(command.STORIES)]
    assert sha256("\n".join(requests).encode()).hexdigest()[:16] == "865ac7c38bbe2b62"


BAD = {
    "--max-new-tokens 1": "argument --max-new-tokens: must be at least 2, found 1",
    "--plot picture.gif": "argument --plot: must end in .svg or .png, found picture.gif",
    "--json no/such/folder/x.json": "no/such/folder",
    "--against vllm": "--against vllm: give transformers, or llama.cpp=FILE.gguf",
    "--against transformers --temperature 1": "--against measures greedy texts: leave out",
    "--exit-layer 99": "exit layer 99",
    "--shape lama-1b": "no shape is called 'lama-1b': give smollm2-135m, qwen3-0.6b",
    "--shape qwen3-0.6b --rounds lama-1b": "no shape is called 'lama-1b'",
    "--rounds qwen3-0.6b --draft-model x": "measure random weights: leave out --draft-model",
    "--shape qwen3-0.6b --model x --quick --prompts code --coupling ratio --max-new-tokens 8": (
        "leave out --model, --prompts, --quick, --max-new-tokens, --coupling"
    ),
    "--shape smollm2-135m": "; give a narrower --dtype or a smaller shape",
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
