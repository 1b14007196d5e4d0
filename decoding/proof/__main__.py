"""Distance between the laws of two functions that draw randomly: plain and speculative sampling.

Each is FILE.py:FUNCTION, called without arguments, and returns a text. See docs/judge.md. Knows
nothing of drafters, options and models.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from decoding.proof.foreign import PATHS, Comparison, Law, law_of
from decoding.proof.progress import bar_of
from model.errors import InputError, explaining

ANY_ERROR = (Exception, SystemExit)  # of the user's code


def function_of(name: str) -> Callable[[], Any]:
    """Return the function of FILE.py:FUNCTION. Raises InputError where there is none."""
    file, _, function = name.rpartition(":")
    if not os.path.isfile(file):
        raise InputError(f"{name!r:.200} must be FILE.py:FUNCTION, of a file that is there")
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # as when the file is run
    with explaining(f"{file} cannot be run", ANY_ERROR):
        found = runpy.run_path(file).get(function)
    if not callable(found):
        raise InputError(f"{file} has no function {function}")
    return found


def shown_law(name: str, paths: int) -> Law:
    """Return the law of a function, with a bar of the probability of the paths so far."""
    function = function_of(name)
    with bar_of(f"every outcome of {name}") as progress, explaining(f"{name} failed", ANY_ERROR):
        return law_of(function, paths, progress)


def judge(plain: str, speculative: str, bound: float, paths: int) -> int:
    """Print the distance of two laws, and where they differ the texts that differ most. Returns the
    exit status: 1 where they differ. Raises Refused where sampling tells nothing.
    """
    if not bound >= 0 or paths < 1:
        raise InputError("--bound must be at least 0, and --paths at least 1")
    found = Comparison(shown_law(plain, paths), shown_law(speculative, paths))
    counts = f"{found.plain.paths} and {found.speculative.paths} paths"
    how = "enumerated" if not found.error else f"sampled: up to {found.error:.2g} by chance"
    print(f"total variation {found.distance:.3g} ({counts}, {how})")
    if found.is_within(bound):
        return 0
    rows = [(str(text), p, q) for text, p, q in found.worst()]
    width = max(len(text) for text, *_ in rows) + 2
    print(f"{'text':<{width}}{'plain':>10}{'speculative':>14}")
    for text, p, q in rows:
        print(f"{text:<{width}}{p:>10.6f}{q:>14.6f}")
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 equal laws, 1 different ones, 2 wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m decoding.proof", description=__doc__.splitlines()[0]
    )
    parser.add_argument("plain", metavar="FILE.py:PLAIN", help="plain sampling of a text")
    parser.add_argument(
        "speculative", metavar="FILE.py:SPECULATIVE", help="what should have the same law"
    )
    parser.add_argument(
        "--bound",
        type=float,
        default=1e-6,
        metavar="TV",
        help="largest total variation of equal laws (default: %(default)s)",
    )
    parser.add_argument(
        "--paths",
        type=int,
        default=PATHS,
        metavar="N",
        help="most paths of draws to enumerate; more are sampled (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        return judge(**vars(options))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
