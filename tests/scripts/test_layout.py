"""The layout: which folder may import which, so that no two need each other, what can be deleted
without a change in the heart, and what an installation brings.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from setup import as_installed

ROOT = Path(__file__).parents[2]
WRITING = {"app.options", "app.session"}  # a model that writes, for other folders
SCRIPTS = ("generate", "train", "specdec", "tests")  # that no folder imports
# Folder -> folders and single modules that it may import
MAY_IMPORT = {
    "model": set(),
    "model.fast": {"model"},
    "decoding": {"model"},
    "decoding.proof": {"model", "decoding"},
    "app.common": {"model.errors"},
    "weights": {"model", "model.fast", "app.common"},
    "app": {"model", "model.fast", "weights", "decoding", "app.common"},
    "training": {"model", "model.fast", "weights", "decoding", "app.common", *WRITING},
    "search": {"model", "weights", "decoding", "app.common", "app.plan_file", *WRITING},
    "benchmark": {"model", "weights", "decoding", "app", "app.common", "search", "training"},
}
NAMES = [*(folder for folder in MAY_IMPORT if "." not in folder), "generate", "train"]
OURS = "|".join(NAMES)
# In a module: an import or a command that only the checkout has
OF_THE_CHECKOUT = (
    rf"(?m)^ *from (?:{OURS})\b[\w.]* import|^ *import (?:{OURS})\b"
    rf"|generate\.py|train\.py|python -m (?:{OURS})\b"
)
FILES = [
    path.relative_to(ROOT)
    for folder in MAY_IMPORT
    if "." not in folder
    for path in (ROOT / folder).rglob("*.py")
]
PROGRAM = """
import sys, specdec
print(hasattr(specdec, "another"), {*specdec.__all__} <= {*dir(specdec)}, end=" ")
from specdec import *
print(*(each.__name__ for each in (InputError, Sample, Session, generate, load)), end=" ")
print(Session.__module__)
try:
    specdec.load("small-llama")
except specdec.InputError as error:
    print(error)
print(specdec.generate("tiny-llama", "Once", max_new_tokens=8).text)
sys.exit(specdec.main())
"""


def folder_of(module: str) -> str:
    """The longest name above that a module lies in."""
    return max(
        (name for name in MAY_IMPORT if f"{module}.".startswith(f"{name}.")), key=len, default=""
    )


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, also within functions."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_folder_imports_only_modules_that_exist_of_the_folders_below_it(path: Path) -> None:
    own = folder_of(".".join(path.with_suffix("").parts))
    allowed = MAY_IMPORT[own] | {"", own}
    for module in imported(path):
        assert {folder_of(module), module} & allowed, f"{path} imports {module}"
        assert module.split(".")[0] not in SCRIPTS, f"{path}: {module}"
        assert not folder_of(module) or find_spec(module), f"{path}: no {module}"


def test_an_installation_needs_what_the_tests_need_but_any_torch_of_a_range() -> None:
    """A library that is added to requirements.txt is added to pyproject.toml too."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    torch, *needed = re.findall(
        r'^    "([^"]+)",$', project.partition("[project.scripts]")[0], re.M
    )
    pinned, *others = (ROOT / "requirements.txt").read_text("utf-8").split()
    assert (torch, pinned[:7], sorted(needed)) == ("torch>=2.9,<3", "torch==", sorted(others))


@pytest.mark.parametrize(
    ("source", "installed"),
    [
        ("    from model.plan import LayerPlan", "    from specdec.model.plan import LayerPlan"),
        ("from generate import load", "from specdec.__main__ import load"),
        ("from modelling import plan", None),
        ("read from model.plan import", None),
        ('"""python -m model.plan"""', '"""python -m specdec.model.plan"""'),
        ("# see generate.py", "# see specdec"),
        ('help="python generate.py --draft"', 'help="specdec --draft"'),
        ("# see docs/generate.py and my-generate.py", None),
    ],
)
def test_a_source_is_installed_with_imports_and_commands_of_the_package(
    source: str, installed: str | None
) -> None:
    assert as_installed(source, ["model", "generate"]) == (installed or source)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that an installation brings."""
    base = tmp_path_factory.mktemp("build")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", base], cwd=ROOT, check=True
    )
    return base / "lib"


def test_an_installation_is_one_package_that_names_nothing_of_the_checkout(library: Path) -> None:
    assert os.listdir(library) == ["specdec"]
    assert [path.parent.name for path in library.rglob("model.safetensors")] == ["tiny-llama"]
    for path in library.rglob("*.py"):
        assert not re.findall(OF_THE_CHECKOUT, path.read_text(encoding="utf-8")), path


def test_an_installation_works_beside_a_users_modules_of_the_same_names(
    library: Path, tmp_path: Path
) -> None:
    """From Python, and at the command line, where ``specdec`` calls ``main``."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "Once", "--model", "tiny-llama", "--max-new-tokens", "8"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(library)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    names, refusal, *texts = done.stdout.splitlines()
    assert names == "False True InputError Sample Session generate load specdec.app.session"
    assert "holds tiny-llama: give a path" in refusal
    assert len(texts) == 2 and texts[0] == texts[1]


# What is optional

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
    return subprocess.run(
        [sys.executable, *command],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
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
