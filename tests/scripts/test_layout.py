"""The layout: which folder may import which, so that no two need each other, and what an
installation brings.
"""

import ast
import os
import re
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
PROGRAM = """
import sys, specdec
print(hasattr(specdec, "another"), {*specdec.NAMES} <= {*dir(specdec)}, end=" ")
print(*(getattr(specdec, name).__name__ for name in specdec.NAMES), specdec.Session.__module__)
try:
    specdec.load("small-llama")
except specdec.InputError as error:
    print(error)
print(specdec.generate("tiny-llama", "Once", max_new_tokens=8).text)
sys.exit(specdec.main())
"""


def production_files() -> list[Path]:
    """Python files of the folders above."""
    tops = [folder for folder in MAY_IMPORT if "." not in folder]
    return [path.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")]


def folder_of(module: str) -> str:
    """The longest name above that a module lies in."""
    names = [name for name in MAY_IMPORT if f"{module}.".startswith(f"{name}.")]
    return max(names, key=len, default="")


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, also within functions."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", production_files(), ids=str)
def test_a_folder_imports_only_the_folders_below_it(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts)
    own = folder_of(name)
    allowed = MAY_IMPORT[own] | {"", own}
    for module in imported(path):
        assert {folder_of(module), module} & allowed, f"{path} imports {module}"
        assert module.split(".")[0] not in SCRIPTS, f"{path}: {module}"


def test_every_module_of_ours_that_is_imported_exists() -> None:
    paths = (*production_files(), *ROOT.glob("*.py"), *ROOT.glob("docs/*.py"))
    modules = {(module, path) for path in paths for module in imported(path)}
    ours = [each for each in modules if each[0].split(".")[0] in NAMES]
    assert [each for each in ours if not find_spec(each[0])] == []


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
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", base]
    subprocess.run(command, cwd=ROOT, check=True)
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
