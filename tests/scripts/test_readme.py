"""The README names only what exists: files, the functions in them, options, and the table of defects."""

from __future__ import annotations

import importlib.util
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import benchmark.__main__
import decoding.corpus.__main__
import generate
import search.__main__
import train
from tests.mutants import table_rows
from weights import fetch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_linked_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("name", "path"), sorted(set(re.findall(r"`([A-Za-z_.]+)`\s+(?:in|of)\s+\[`([\w/]+\.py)`\]", README)))
)
def test_every_function_stands_in_the_file_it_is_said_to(name: str, path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b|^{name}(: .*)? = ", source, re.MULTILINE)


@pytest.fixture(scope="module")
def helps() -> str:
    """What every command line says of its options."""
    said = io.StringIO()
    for command in (generate, benchmark.__main__, train, search.__main__, decoding.corpus.__main__, fetch):
        with redirect_stdout(said), pytest.raises(SystemExit):
            command.main(["--help"])
    return said.getvalue()


OURS = re.sub(r"torchrun .*? train\.py", "", README)  # torchrun's options are its own


@pytest.mark.parametrize("option", sorted(set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", OURS))))
def test_every_option_is_one_of_a_command_line(option: str, helps: str) -> None:
    assert re.search(rf"{option}\b", helps)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z]+)", README))))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([a-z_.]+)", README))))
def test_every_module_that_is_run_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([a-z-]+)\)", README))))
def test_every_section_that_is_linked_exists(anchor: str) -> None:
    headings = [re.sub(r"[^a-z -]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", README, re.MULTILINE)]
    assert anchor in [heading.strip().replace(" ", "-") for heading in headings]


def test_the_table_of_defects_is_the_one_its_command_prints() -> None:
    """Every row but its verdict, which test_mutants checks."""
    for row in table_rows(lambda mutant: True):
        assert row in README
