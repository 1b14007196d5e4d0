"""The installation by ``make``: a line per step, and on failure the file with all of its output."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# Stands for python: makes an environment of itself, and installs or fails.
if [ "$2" = venv ]; then
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    exit 0
fi
echo "Collecting a library, by $*"
[ -z "$FAILS" ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the Makefile and a python of its own."""
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", ".venv/ready-dev", "PYTHON=./python"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_installation_prints_one_line_per_step(folder: Path) -> None:
    done = make(folder)
    assert done.returncode == 0 and not done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["making", *["installing"] * 2]
    assert "Collecting" in (folder / ".venv/install.log").read_text()
    assert not make(folder).stdout.strip().startswith("installing"), "done once"


def test_a_failed_installation_shows_its_end_and_names_the_file_with_the_rest(folder: Path) -> None:
    done = make(folder, FAILS="yes")
    assert done.returncode and "Collecting" in done.stdout
    assert "all of its output is in .venv/install.log" in done.stdout
    assert not (folder / ".venv/ready").exists(), "the next run tries again"
