"""The documents name only what exists: files, sections, options, modules; and their examples run.
With that of a drafter of one's own come the proof that it is lossless, and a text.

``make readme`` runs every command of theirs.
"""

import importlib.util
import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from app.characters import Labels
from decoding.drafters import Draft
from decoding.proof.loop_law import Setup, bias
from decoding.rounds import Round
from docs import layers, moving
from tests import readme
from tests.calls import status_of
from tests.commands import Run

ROOT = Path(__file__).parents[2]
TEXTS = {document: document.read_text(encoding="utf-8") for document in readme.DOCUMENTS}
ALL = "\n".join(TEXTS.values())
TABLE_OF_TESTS = ROOT / "tests/README.md"  # it has links, and no commands
LINKED = {**TEXTS, TABLE_OF_TESTS: TABLE_OF_TESTS.read_text(encoding="utf-8")}
COMMANDS = (
    *("generate", "train", "weights.fetch", "docs.layers", "benchmark.__main__"),
    *("search.__main__", "training.corpus.__main__", "decoding.proof.__main__"),
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
        ("(p - torch.cat((q, torch.zeros(1, len(P))))).clamp(min=0)", "p"),
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


@pytest.mark.parametrize(
    ("text", "file", "complaint"),
    [
        ("a" * 300, "layers.svg", "context 256"),
        ("a" * 300, "no/layers.svg", "does not exist"),
        ("\udcff a b c d e f", "layers.svg", "cannot be read as UTF-8"),
    ],
    ids=["context", "folder", "bytes"],
)
def test_a_text_that_cannot_be_read_or_drawn_is_refused(
    text: str,
    file: str,
    complaint: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [text, "--model", model, "--svg", str(tmp_path / file)]
    assert status_of(layers.main, command) == 2 and complaint in capsys.readouterr().err


def test_the_moving_picture_is_xml_and_begins_with_both_whole_texts() -> None:
    """One was written token by token. The other had a rejected and a discarded token in its draft.
    Characters of XML are in both.
    """
    labels = Labels([b"<a", b" & b", b" c" * 41].__getitem__, {})
    first = Round(1, [], 0, [0])
    samples = [
        SimpleNamespace(
            draft="none",
            speed=1,
            seconds=3,
            rounds=rounds,
            timeline=[(each, each.position) for each in rounds],
        )
        for rounds in (
            [first, Round(2, [], 0, [1]), Round(3, [], 0, [2])],
            [first, Round(2, [1, 0, 0], 1, [1, 2])],
        )
    ]
    lanes = ElementTree.fromstring(moving.picture(*samples, labels)).iterfind("{*}g")
    shown = [[text.text for text in lane.iterfind("{*}text[@opacity='1']")] for lane in lanes]
    assert shown == [["<a", " & b", " c" * 41]] * 2


def test_a_document_whose_command_is_wrong_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """One of three steps is wrong; the others are run all the same."""
    document = "```sh\ntrue  # fine\nls \\\n    --no-such-option\n```\n\n```python\nprint(1)\n```\n"
    assert readme.failures(document) == 1
    said = capfd.readouterr().out
    assert said.count("ok: ") == 2 and "no-such-option" in said.split("FAILED")[1]


# A drafter of one's own


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document's example, as its reader saves it."""
    (name, code), *_ = readme.steps(TEXTS[ROOT / "docs/own_drafter.md"])
    path = tmp_path_factory.mktemp("own") / name
    path.write_text(code, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def example(file: Path) -> dict[str, Any]:
    """Definitions of the example, which has asserted that its drafter, however bad, is lossless."""
    return runpy.run_path(str(file), run_name="__main__")


def test_a_drafter_that_misstates_its_distribution_is_caught(example: dict[str, Any]) -> None:
    class Flatterer(example["Bigrams"]):  # type: ignore[misc]
        """The same, but it claims that every token was as likely as any other."""

        def propose(self, *request: Any) -> Draft:
            draft = super().propose(*request)
            return Draft(draft.tokens, torch.full_like(draft.probs, 1 / draft.probs.shape[1]))

    assert bias(example["model"], example["request"], Setup(Flatterer)) > 0.01


def test_generate_drafts_with_the_readers_own_class(file: Path, run: Run, model: str) -> None:
    command = ["the hen and the", "--model", model, "--max-new-tokens", "12", "--json"]
    drafted, plain = (
        run(*command, "--draft", draft).result for draft in (f"{file}:Bigrams", "none")
    )
    assert drafted["tokens"] == plain["tokens"] and drafted["drafted"] > 0 == plain["drafted"]


def test_the_file_of_a_drafter_is_run_once_for_all_texts(
    file: Path, run: Run, model: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text("print('<once>')\n" + file.read_text("utf-8"), "utf-8")
    written = run("the", "--model", model, "--draft", f"{own}:Bigrams", "--num-samples", "2")
    assert written.out.count("<once>") == 1


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (None, "A", "FileNotFoundError"),
        ("class A:\n  broken", "A", "NameError: name 'broken' is not defined"),
        ("A = (", "A", "SyntaxError"),
        ("class A: pass", "B", "has no class B"),
        ("class A:\n  def __init__(self): pass", "A", "TypeError"),
        ("import sys\nsys.exit(0)", "A", "mine.py:A, line 2: SystemExit: 0"),
        ("class A:\n  def __init__(self, *_): exit()", "A", "line 2: SystemExit"),
    ],
    ids=["no file", "broken", "no Python", "no such class", "takes nothing", "exits", "exits late"],
)
def test_a_class_that_cannot_be_had_is_one_clear_line(
    content: str | None, name: str, said: str, run: Run, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    complaint = run("the", "--model", model, "--draft", f"{file}:{name}").complaint
    assert complaint.startswith("error: --draft") and said in complaint


FAILING = """
from decoding.drafters import PromptLookup


class Mine(PromptLookup):
    def __init__(self, target, cache):
        super().__init__()

    def {method}(self, given, *rest):
        if {length} > 12: {error}
        return super().{method}(given, *rest)
"""


@pytest.mark.parametrize("samples", ["1", "2"])
@pytest.mark.parametrize(
    ("method", "length", "error", "said"),
    [
        ("propose", "len(given)", "1 / 0", "ZeroDivisionError: division by zero"),
        ("rollback", "given", "exit(0)", "SystemExit: 0"),
    ],
)
def test_an_error_in_a_drafter_says_where_and_keeps_the_text(
    method: str,
    length: str,
    error: str,
    said: str,
    samples: str,
    run: Run,
    model: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(FAILING.format(method=method, length=length, error=error))
    command = ["the hen", "--model", model, "--json", "--max-new-tokens", "30"]
    whole = run(*command, "--draft", "none").result["tokens"]
    outcome = run(*command, "--draft", f"{tmp_path / 'mine.py'}:Mine", "--num-samples", samples)
    assert outcome.status == 2 and len(outcome.objects) == int(samples)
    for each in outcome.objects:
        assert each["finish_reason"] == "interrupted" and len(each["tokens"]) > 3
        assert each["tokens"] == whole[: len(each["tokens"])]
    *trace, last = outcome.err.splitlines()
    assert last.startswith("error: --draft ") and last.endswith(f"mine.py:Mine, line 10: {said}")
    assert f"in {method}" in "\n".join(trace), "the traceback comes before it"
