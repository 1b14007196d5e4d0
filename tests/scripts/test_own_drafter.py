"""The documents' example: a drafter of your own, the proof that it is lossless, and a text written
with it.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters import Draft
from decoding.proof.loop_law import Setup, bias
from tests.commands import Run

DOCUMENT = Path(__file__).parents[2] / "docs/own_drafter.md"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document's example, as its reader saves it."""
    (code, *_) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    path = tmp_path_factory.mktemp("own") / "my_drafter.py"
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


def test_the_file_is_run_once_for_all_texts(
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
    outcome = run("the", "--model", model, "--draft", f"{file}:{name}")
    assert outcome.status == 2 and outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: --draft") and said in outcome.err


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
    draft = f"{tmp_path / 'mine.py'}:Mine"
    outcome = run(*command, "--draft", draft, "--num-samples", samples)
    assert outcome.status == 2 and len(outcome.objects) == int(samples)
    for each in outcome.objects:
        assert each["finish_reason"] == "interrupted" and len(each["tokens"]) > 3
        assert each["tokens"] == whole[: len(each["tokens"])]
    *trace, last = outcome.err.splitlines()
    assert last.startswith("error: --draft ") and last.endswith(f"mine.py:Mine, line 10: {said}")
    assert f"in {method}" in "\n".join(trace), "the traceback comes before it"
