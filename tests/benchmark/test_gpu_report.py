"""Report of a GPU: its parts, without one and on a pretended one."""

import json
from pathlib import Path

import pytest
import torch

from benchmark import gpu_report

ROOT = Path(__file__).parents[2]
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
    _, fails, slow, missing, stubborn, last = (tmp_path / "report.md").read_text().split("\n## ")
    assert fails.startswith("Fails: failed with status 2\n") and "No such file" in fails
    assert slow.startswith("Slow: took too long\n") and "\nslow\n" in slow
    assert missing.startswith("Missing: could not start\n")
    assert stubborn.startswith("Stubborn: took too long\n")
    assert last.startswith("Last: worked\n") and "\nlast\n" in last


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
