"""Distance between the laws of two functions that draw randomly: plain and speculative sampling.

Each is FILE.py:FUNCTION, called without arguments, and returns a text. See docs/judge.md.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from app.files import explaining
from app.parsers import Groups, run_script, within
from app.table import table
from decoding.proof.foreign import PATHS, Comparison, Law, law_of
from decoding.proof.judge import bar_of
from model.errors import InputError

OPTIONS: Groups = {
    "": {
        "plain": {"metavar": "FILE.py:PLAIN", "help": "plain sampling of a text"},
        "speculative": {"metavar": "FILE.py:SPECULATIVE", "help": "what should have the same law"},
        "--bound": {
            "type": within(float, 0),
            "default": 1e-6,
            "metavar": "TV",
            "help": "largest total variation of equal laws: above it the exit code is 1",
        },
        "--paths": {
            "type": within(int, 1),
            "default": PATHS,
            "metavar": "N",
            "help": "most paths of draws that are enumerated; a law of more is sampled",
        },
    },
}


def function_of(name: str) -> Callable[[], Any]:
    """Return the function of FILE.py:FUNCTION. Raises InputError where there is none."""
    file, _, function = name.rpartition(":")
    if not os.path.isfile(file):
        raise InputError(f"{name!r:.200} must be FILE.py:FUNCTION, of a file that is there")
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # as when the file is run
    with explaining(f"{file} cannot be run", (Exception, SystemExit)):
        found = runpy.run_path(file).get(function)
    if not callable(found):
        raise InputError(f"{file} has no function {function}")
    return found


def shown_law(name: str, paths: int) -> Law:
    """Return the law of a function, with a bar of the probability of the paths so far."""
    function = function_of(name)
    with (
        bar_of(f"every outcome of {name.rpartition(':')[2]}") as progress,
        explaining(f"{name} failed", (Exception, SystemExit)),
    ):
        return law_of(function, paths, progress)


def judge(plain: str, speculative: str, bound: float, paths: int) -> int:
    """Print the distance of two laws, and where they differ the results that differ most; returns 1
    there. Raises Refused where sampling tells nothing.
    """
    found = Comparison(shown_law(plain, paths), shown_law(speculative, paths))
    counts = f"{found.plain.paths} and {found.speculative.paths} paths"
    how = "enumerated" if not found.error else f"sampled: up to {found.error:.2g} by chance"
    print(f"total variation {found.distance:.3g} ({counts}, {how})")
    if found.is_within(bound):
        return 0
    rows = [
        {"text": str(text), "plain": f"{p:.6f}", "speculative": f"{q:.6f}"}
        for text, p, q in found.worst()
    ]
    Console(width=None if sys.stdout.isatty() else 100).print(table(rows))
    return 1


def main(arguments: list[str] | None = None) -> int:
    return run_script(
        lambda options: judge(**vars(options)),
        OPTIONS,
        "python -m decoding.proof",
        __doc__,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
