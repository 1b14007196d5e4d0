"""Distance between the laws of two functions that draw randomly: plain and speculative sampling.

Each is FILE.py:FUNCTION, called without arguments, and returns a text. See docs/judge.md. Knows
nothing of drafters, options and models.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from decoding.proof.foreign import PATHS, Comparison, Law, law_of
from model.errors import InputError, explaining

ANY_ERROR = (Exception, SystemExit)  # of the user's code


def law_of_named(name: str, paths: int) -> Law:
    """Return the law of FILE.py:FUNCTION. Raises InputError where there is none."""
    file, _, function = name.rpartition(":")
    if not os.path.isfile(file):
        raise InputError(f"{name!r:.200} must be FILE.py:FUNCTION, of a file that is there")
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # as when the file is run
    with explaining(f"{file} cannot be run", ANY_ERROR):
        found = runpy.run_path(file).get(function)
    if not callable(found):
        raise InputError(f"{file} has no function {function}")
    with explaining(f"{name} failed", ANY_ERROR):
        return law_of(found, paths)


def judge(plain: str, speculative: str, bound: float, paths: int) -> int:
    """Print the distance of two laws, and where they differ the texts that differ most. Returns the
    exit status: 1 where they differ. Raises Refused where sampling tells nothing.
    """
    if not bound >= 0 or paths < 1:
        raise InputError("--bound must be at least 0, and --paths at least 1")
    found = Comparison(law_of_named(plain, paths), law_of_named(speculative, paths))
    print(found)
    if found.is_within(bound):
        return 0
    print(found.worst())
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
