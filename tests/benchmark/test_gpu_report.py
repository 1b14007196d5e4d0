"""Report of a GPU: its parts, without one and on a pretended one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark import gpu_report
from benchmark.gpu_report import parts

NOTEBOOK = Path(__file__).parents[2] / "docs/gpu.ipynb"


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "machine", lambda device: "a GPU")
    (tmp_path / "slow.txt").write_text("slow\n")
    wanted = [
        ("Fails", ["ls", "no-such-file"], 60),
        ("Slow", ["tail", "-f", str(tmp_path / "slow.txt")], 1),
        ("Missing", ["no-such-program"], 5),
        ("Last", ["echo", "last"], 60),
    ]
    monkeypatch.setattr(gpu_report, "parts", lambda model: wanted)
    out = tmp_path / "report.md"
    assert gpu_report.main(["--out", str(out)]) == 0
    top, fails, slow, missing, last = out.read_text().split("\n## ")
    assert "* device: a GPU" in top and "* worked: Last\n* failed: Fails, Slow, Missing" in top
    assert "status 2" in fails and "No such file" in fails
    assert "was stopped after 1 seconds" in slow and "\nslow\n" in slow
    assert "could not start" in missing and "no-such-program" in missing
    assert "status 0" in last and "\nlast\n" in last


def test_the_parts_fit_into_ten_minutes_and_name_what_exists() -> None:
    wanted = parts("tiny-llama")
    assert sum(seconds for *_, seconds in wanted) <= 600
    named = [each for _, command, _ in wanted for each in command if each.endswith(".py")]
    assert named and all(Path(each).exists() for each in named)


def test_the_notebook_runs_without_a_gpu_and_says_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    defined: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), defined)
    said = capfd.readouterr().out
    assert "installed: nothing" in said and "There is no GPU" in said and "no report" in said
    assert all(title in said for title, *_ in parts("tiny-llama"))
