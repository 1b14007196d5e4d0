"""The benchmark measures the same work for every contender and reports what it saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmark
from decoding.costs import expected_tokens
from decoding.rounds import Round
from search.prompts import PROMPTS
from tests.folders import write_folder


def test_a_run_reports_every_contender_on_every_kind_of_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers too, whose greedy texts of this float32 model agree with ours."""
    monkeypatch.setattr(benchmark, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(benchmark, "PROMPTS", {"short": ["the hen"], "long": ["a thin hen in a tin"]})
    folder, report = write_folder(tmp_path / "model"), tmp_path / "report.json"
    options = ["--model", str(folder), "--max-new-tokens", "12", "--repeats", "2", "--json", str(report)]
    assert benchmark.main([*options, "--device", "cpu", "--against", "transformers"]) == 0
    shown = capsys.readouterr().out
    for name in ("plain", "lookup", "exit 2", "exit 3", "auto", "transformers", "transformers, prompt lookup"):
        assert name in shown
    assert shown.count("2/2") == 7, "every greedy text equals the plain one"
    assert "verifying 16 tokens" in shown
    measured = json.loads(report.read_text())
    assert all(list(times) == ["short: the hen", "long: a thin hen in a tin"] for times in measured["seconds"].values())
    assert measured["costs"]["lookup"]["verify"][0] == 1.0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--max-new-tokens", "3"], "--max-new-tokens must be at least 8"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "toaster"], "device 'toaster' is not there"),
        (["--json", "/no/such/folder/report.json"], "--json: the folder /no/such/folder does not exist"),
        (["--model", "/no/model"], "no folder '/no/model'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(write_folder(tmp_path / "model"))]
    assert benchmark.main([*model, *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {complaint}")


def test_the_share_of_tokens_kept_once_looked_at_recovers_the_acceptance_of_the_formula() -> None:
    """Rounds as acceptance α makes them: n kept and one rejected with probability αⁿ(1 - α), all γ with α^γ."""
    alpha, result = 0.5, benchmark.Result()
    for kept, times in zip(range(benchmark.GAMMA + 1), (8, 4, 2, 1, 1), strict=True):
        for _ in range(times):
            result.add(Round(0, [0] * benchmark.GAMMA, kept, [0] * (kept + 1)))
    assert result.kept_share == pytest.approx(alpha)
    assert result.statistics.tokens_per_round == pytest.approx(expected_tokens(alpha, benchmark.GAMMA))
    assert benchmark.Result().kept_share == 0


def test_a_draft_that_the_budget_cut_short_and_that_was_accepted_whole_is_no_rejection() -> None:
    result = benchmark.Result()
    result.add(Round(0, [0] * 4, 4, [0] * 5))
    result.add(Round(5, [0] * 2, 2, [0] * 3))
    assert result.kept_share == 1


def test_there_are_at_least_four_different_prompts_of_every_kind() -> None:
    assert {"story", "question", "code", "summary", "rewriting", "chat"} == PROMPTS.keys()
    assert all(len(set(prompts)) >= 4 for prompts in PROMPTS.values())
