"""What is optional can be deleted without a change in the heart."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONAL = {
    "grammar": ["decoding/grammar.py"],
    "together": ["decoding/together.py"],
    "auto": ["decoding/auto.py", "app/offers.py"],
    "parallel": ["model/parallel.py", "app/processes.py"],
    "fast": ["model/fast"],
    "server": ["app/server"],
    "proof": ["decoding/proof"],
}
KEPT = ("app", "decoding", "model", "weights", "tests", "generate.py", "pyproject.toml")
COMMAND = [
    *("generate.py", "Once upon a time", "--model", "tiny-llama", "--draft", "exit", "--json"),
    *("--dtype", "float32"),  # without model/fast, bfloat16 would round differently
]
LAWS = [
    *("tests/decoding/test_speculate.py", "tests/decoding/proof/test_exact_law.py"),
    *("-k", "perfect or residual or (pair and plan and budget and free)"),
]


@pytest.fixture(scope="module")
def text() -> list[int]:
    return written(ROOT)


def written(root: Path) -> list[int]:
    done = run(root, *COMMAND)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["tokens"]


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True
    )


def without(folder: Path, *parts: str) -> Path:
    """A copy of the project without these parts."""
    for name in KEPT:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
            continue
        ignored = shutil.ignore_patterns("__pycache__", "smollm2*", "small-llama", "tiny-gemma2")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in [folder / each for part in parts for each in OPTIONAL[part]]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


@pytest.mark.parametrize("part", OPTIONAL)
def test_without_a_part_the_text_is_the_same(part: str, text: list[int], tmp_path: Path) -> None:
    assert written(without(tmp_path, part)) == text


def test_a_draft_whose_file_is_gone_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run(without(tmp_path, "auto"), *COMMAND[:4], "--draft", "auto")
    assert done.returncode == 2 and "--draft auto lacks a file" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_loops_tests_and_laws_need_no_optional_part_but_the_proof(tmp_path: Path) -> None:
    root = without(tmp_path, *OPTIONAL.keys() - {"proof"})
    done = run(root, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *LAWS)
    assert done.returncode == 0, done.stdout[-2000:]
