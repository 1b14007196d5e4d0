"""The documents name only what exists: files, functions in them, options, sections; and their
examples run.

``make readme`` runs every command of theirs.
"""

import importlib.util
import io
import re
from contextlib import redirect_stdout
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmark.__main__
import decoding.proof.__main__
import generate
import search.__main__
import train
import training.corpus.__main__
from tests import readme
from weights import fetch

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXTS = {document: document.read_text(encoding="utf-8") for document in readme.DOCUMENTS}
ALL = "\n".join(TEXTS.values())
TABLE_OF_TESTS = ROOT / "tests/README.md"  # it has links, and no commands
LINKED = {**TEXTS, TABLE_OF_TESTS: TABLE_OF_TESTS.read_text(encoding="utf-8")}
LINKS = sorted(
    {(doc, link) for doc, text in LINKED.items() for link in re.findall(r"\]\(([^):]+)\)", text)},
    key=str,
)


@pytest.mark.parametrize(
    ("document", "link"), LINKS, ids=[f"{doc.name} {link}" for doc, link in LINKS]
)
def test_every_linked_file_and_section_exists(document: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists()
    if anchor:
        content = target.read_text(encoding="utf-8")
        headings = [
            re.sub(r"[^a-z0-9 -]", "", each.lower()).strip().replace(" ", "-")
            for each in re.findall(r"^#+ (.*)$", content, re.MULTILINE)
        ]
        assert anchor in headings + re.findall(r'<section id="(\w+)"', content)


@pytest.mark.parametrize(
    ("name", "path"),
    sorted(set(re.findall(r"`([A-Za-z_.]+)`\s+(?:in|of)\s+\[`([\w/]+\.py)`\]", ALL))),
)
def test_every_function_stands_in_the_file_it_is_said_to(name: str, path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(
        rf"(def|class) {name.rpartition('.')[2]}\b|^{name}(: .*)? = ", source, re.MULTILINE
    )


@pytest.fixture(scope="module")
def helps() -> str:
    """Help texts of all command lines."""
    said = io.StringIO()
    for command in (
        generate,
        benchmark.__main__,
        train,
        search.__main__,
        training.corpus.__main__,
        fetch,
        decoding.proof.__main__,
    ):
        with redirect_stdout(said), pytest.raises(SystemExit):
            command.main(["--help"])
        description = said.getvalue().split("usage: ")[-1].split("\n\n")[1]
        assert description.endswith("."), "a whole sentence"
    return said.getvalue()


def test_help_ends_in_examples_and_names_existing_sections(helps: str) -> None:
    assert helps.count("\nexamples:\n  python generate.py ") == 1
    links = set(re.findall(r"docs/\w+\.md#[\w-]+", re.sub(r"\s", "", helps)))
    assert len(links) == 2
    for link in links:
        test_every_linked_file_and_section_exists(README, link)


OURS = re.sub(r"torchrun .*? (train|generate)\.py", "", ALL)  # torchrun's options are its own


@pytest.mark.parametrize("option", sorted(set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", OURS))))
def test_every_option_is_one_of_a_command_line(option: str, helps: str) -> None:
    assert re.search(rf"{option}\b", helps)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?m)(?:^|`)make ([a-z]+)", ALL))))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([a-z_.]+)", ALL))))
def test_every_module_that_is_run_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_the_readme_is_short() -> None:
    assert len(TEXTS[README].splitlines()) <= 150


def python_blocks(document: Path) -> list[str]:
    return [content for kind, content in readme.steps(TEXTS[document]) if kind == "python"]


def test_the_examples_from_python_write_what_they_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for block in python_blocks(README) + python_blocks(ROOT / "docs/python.md"):
        defined: dict[str, Any] = {}
        exec(block, defined)
        said = capsys.readouterr().out
        if "sample" in defined:
            assert defined["sample"].text in said
    # The last is the loop, round by round.
    rounds = re.findall(r"^(\d) of (\d) accepted: ", said, re.MULTILINE)
    written = sum(int(accepted) + 1 for accepted, _ in rounds)
    assert written >= len(defined["text"].generated) == 100 > len(rounds)


def toys_distance(source: str) -> float:
    """The distance that the toy prints. It sets torch's default dtype, which is set back."""
    dtype = torch.get_default_dtype()
    try:
        with redirect_stdout(io.StringIO()) as said:
            exec(source, {})
    finally:
        torch.set_default_dtype(dtype)
    assert "total variation from plain sampling" in said.getvalue()
    return float(said.getvalue().split()[-1])


def test_the_toy_computes_that_its_law_is_plain_samplings() -> None:
    assert toys_distance((ROOT / "docs/toy.py").read_text(encoding="utf-8")) < 1e-12


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(p - torch.cat((q, torch.zeros(1, 3)))).clamp(min=0)", "p"),
        ("p[rows, drafted] / q[rows, drafted]", "p[rows, drafted]"),
        ("randomness.draw(q[-1])", "int(q[-1].argmax())"),
        (".cumprod(0).sum()", ".sum()"),
    ],
    ids=["residual", "acceptance", "draft", "prefix"],
)
def test_a_defect_in_the_toy_changes_its_law(right: str, wrong: str) -> None:
    source = (ROOT / "docs/toy.py").read_text(encoding="utf-8")
    assert source.count(right) == 1
    assert toys_distance(source.replace(right, wrong)) > 0.01


def test_a_document_whose_command_is_wrong_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """One of three steps is wrong; the others are run all the same."""
    document = "```sh\ntrue  # fine\nls \\\n    --no-such-option\n```\n\n```python\nprint(1)\n```\n"
    assert readme.failures("made-up.md", document) == 1
    said = capsys.readouterr().out
    assert said.count("made-up.md: ok") == 2 and "no-such-option" in said.split("FAILED")[1]


def test_no_command_is_skipped_that_no_document_has() -> None:
    commands = [content for text in TEXTS.values() for _, content in readme.steps(text)]
    assert all(any(map(str.startswith, commands, repeat(skip))) for skip in readme.SKIPPED)


def test_a_command_is_a_line_or_a_loop_without_its_remark() -> None:
    block = "# a remark\nfirst \\\n    more  # why\n\nfor d in x y; do\n    each $d\ndone\nlast\n"
    assert list(readme.commands(block)) == [
        "first \\\n    more",
        "for d in x y; do\n    each $d\ndone",
        "last",
    ]
