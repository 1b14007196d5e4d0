"""The documents name only what exists: files, sections, options, modules; and their examples run.

``make readme`` runs every command of theirs.
"""

import importlib.util
import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from docs import layers
from tests import readme
from tests.calls import status_of

ROOT = Path(__file__).parents[2]
TEXTS = {document: document.read_text(encoding="utf-8") for document in readme.DOCUMENTS}
ALL = "\n".join(TEXTS.values())
TABLE_OF_TESTS = ROOT / "tests/README.md"  # it has links, and no commands
LINKED = {**TEXTS, TABLE_OF_TESTS: TABLE_OF_TESTS.read_text(encoding="utf-8")}
COMMANDS = ("generate", "train", "weights.fetch", "docs.layers")
COMMANDS += tuple(
    f"{folder}.__main__" for folder in ("benchmark", "search", "training.corpus", "decoding.proof")
)


def test_every_linked_file_and_section_exists() -> None:
    for document, text in LINKED.items():
        for path, anchor in re.findall(r"\]\(([^):#]*)#?([^):]*)\)", text):
            target = document.parent / path if path else document
            assert target.exists(), f"{document.name} links {path}"
            content = target.read_text(encoding="utf-8") if anchor else ""
            headings = [
                re.sub(r"[^a-z0-9 -]", "", each.lower()).strip().replace(" ", "-")
                for each in re.findall(r"^#+ (.*)$", content, re.MULTILINE)
            ]
            places = ["", *headings, *re.findall(r'<section id="(\w+)"', content)]
            assert anchor in places, f"{document.name} links {path}#{anchor}"


def test_every_option_and_module_of_a_command_exists() -> None:
    said = io.StringIO()
    for command in COMMANDS:
        with redirect_stdout(said):
            assert status_of(importlib.import_module(command).main, ["--help"]) == 0
    ours = re.sub(r"torchrun .*? (train|generate)\.py", "", ALL)  # torchrun's options are its own
    options = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", ours))
    assert options <= set(re.findall(r"--[a-z][a-z-]+", said.getvalue()))
    for module in set(re.findall(r"python -m ([a-z_.]+)", ALL)):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_examples_from_python_write_what_they_print(
    document: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, block in readme.steps(TEXTS[ROOT / document]):
        if kind == "python":
            defined: dict[str, Any] = {}
            exec(block, defined)
            said = capsys.readouterr().out
            assert "sample" not in defined or defined["sample"].text in said
    if "drafter" in defined:  # the loop, round by round
        rounds = re.findall(r"^(\d) of \d accepted: ", said, re.MULTILINE)
        written = sum(int(accepted) + 1 for accepted in rounds)
        assert written >= len(defined["text"].generated) == 100 > len(rounds)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("(p - torch.cat((q, torch.zeros(1, 3)))).clamp(min=0)", "p"),
        ("p[rows, drafted] / q[rows, drafted]", "p[rows, drafted]"),
        ("randomness.draw(q[-1])", "int(q[-1].argmax())"),
        (".cumprod(0).sum()", ".sum()"),
    ],
    ids=["none", "residual", "acceptance", "draft", "prefix"],
)
def test_the_law_of_the_toy_is_plain_samplings_but_with_a_defect(right: str, wrong: str) -> None:
    source = (ROOT / "docs/toy.py").read_text(encoding="utf-8")
    assert not right or source.count(right) == 1
    dtype = torch.get_default_dtype()  # which the toy sets
    try:
        with redirect_stdout(io.StringIO()) as said:
            exec(source.replace(right, wrong), {})
    finally:
        torch.set_default_dtype(dtype)
    *_, distance = said.getvalue().split("total variation from plain sampling")[1].split()
    assert float(distance) > 0.01 if right else float(distance) < 1e-12


def test_no_text_beyond_the_context_is_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beyond = ["a" * 300, "--model", model, "--svg", str(tmp_path / "layers.svg")]
    assert status_of(layers.main, beyond) == 2 and "context 256" in capsys.readouterr().err


def test_a_document_whose_command_is_wrong_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """One of three steps is wrong; the others are run all the same."""
    document = "```sh\ntrue  # fine\nls \\\n    --no-such-option\n```\n\n```python\nprint(1)\n```\n"
    assert readme.failures(document) == 1
    said = capfd.readouterr().out
    assert said.count("ok: ") == 2 and "no-such-option" in said.split("FAILED")[1]
