"""Packaging: an installation has the command, and needs what the tests run with, but any torch."""

import re
import sys
from pathlib import Path

import pytest

from app.start import specdec

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib: pip install tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_an_installation_needs_what_the_tests_need_but_any_torch_of_a_range() -> None:
    """A library that is added to requirements.txt is added to pyproject.toml too."""
    pinned, *others = (ROOT / "requirements.txt").read_text("utf-8").split()
    ranged, *needed = PROJECT["dependencies"]
    assert sorted(needed) == sorted(others)
    least = re.fullmatch(r"torch>=([\d.]+),<3", ranged)
    exact = re.fullmatch(r"torch==([\d.]+)", pinned)
    assert least and exact
    assert [*map(int, least[1].split("."))] <= [*map(int, exact[1].split("."))] < [3]


def test_the_console_command_is_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROJECT["scripts"] == {"specdec": "app.start:specdec"}
    monkeypatch.setattr(sys, "argv", ["specdec", "--temperature", "-1", "the hen"])
    with pytest.raises(SystemExit, match="2"):
        specdec()
    assert "temperature must be at least 0" in capsys.readouterr().err
