"""The README names only what exists: files, the functions in them, options, and the table of defects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import benchmark
import generate
from tests.mutants import table_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_linked_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("name", "path"), sorted(set(re.findall(r"`([A-Za-z_.]+)`\s+(?:in|of)\s+\[`([\w/]+\.py)`\]", README)))
)
def test_every_function_stands_in_the_file_it_is_said_to(name: str, path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b|^{name} = ", source, re.MULTILINE)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", README))))
def test_every_option_is_one_of_a_command_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (generate.main, benchmark.main):
        with pytest.raises(SystemExit):
            command(["--help"])
    assert re.search(rf"{option}\b", capsys.readouterr().out)


def test_the_table_of_defects_is_the_one_its_command_prints() -> None:
    """Every row but its verdict, which test_mutants checks."""
    for row in table_rows(lambda mutant: True):
        assert row in README
