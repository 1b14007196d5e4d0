"""Builds below one package, ``specdec``, what the checkout has at its top level.

So an installation brings one name, and nothing that hides a user's own ``model`` or ``app``, or is
hidden by it. An editable installation has the checkout's names.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "specdec"
# Modules that make the package: its names for Python, and its command line
NAMED = {"specdec": "__init__", "generate": "__main__"}


def as_installed(source: str, names: Iterable[str]) -> str:
    """Return the source of a module as it is installed: it imports the top-level ``names`` from the
    package, and its texts show imports and commands as they are there.

    Modules here write ``from model.plan import LayerPlan``. They never write ``import model.plan``:
    it binds ``model``, so it could not be rewritten alone. ``tests/scripts/test_layout.py`` checks
    that.
    """
    ours = "|".join(names)
    changes = {
        # Imports stand at the beginning of a line:
        # from model.plan import LayerPlan -> from specdec.model.plan import LayerPlan
        rf"^( *)from (?=({ours})\b[\w.]* import )": rf"\1from {PACKAGE}.",
        # from generate import main -> from specdec.__main__ import main
        rf"^( *)from {PACKAGE}\.generate import ": rf"\1from {PACKAGE}.__main__ import ",
        # Commands stand anywhere, in help, messages and comments. Files of these names in other
        # folders are none.
        # python -m search -> python -m specdec.search
        rf"\bpython -m (?=({ours})\b)": f"python -m {PACKAGE}.",
        # python train.py, train.py -> python -m specdec.train
        r"(python )?(?<![\w./-])train\.py\b": f"python -m {PACKAGE}.train",
        # python generate.py, generate.py -> specdec
        r"(python )?(?<![\w./-])generate\.py\b": PACKAGE,
    }
    for pattern, change in changes.items():
        source = re.sub(pattern, change, source, flags=re.MULTILINE)
    return source


class BuildBelowPackage(build_py):
    """Command ``build_py`` that builds everything below the package."""

    def run(self) -> None:
        self.build_lib = str(Path(self.build_lib, PACKAGE))
        super().run()

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        path, copied = super().build_module(NAMED.get(module, module), module_file, package)
        names = {each.partition(".")[0] for each in (*self.packages, *self.py_modules)}
        source = Path(module_file).read_text(encoding="utf-8")
        Path(path).write_text(as_installed(source, names), encoding="utf-8")
        return path, copied


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildBelowPackage})
