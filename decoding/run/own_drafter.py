"""Drafter of a class in a file of the user. Errors in it are told with their line."""

import runpy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cli.files import one_line
from decoding.drafters import Drafter
from model import Decoder, InputError, KVCache


def load_drafter(kind: str, model: Decoder) -> Callable[[KVCache], Drafter]:
    """Maker of instances of a ``FILE.py:Class``, from the target's cache.

    Raises InputError where there is no such class. An error in a method of an instance becomes an
    InputError too, whose cause is the original one.
    """
    file, _, name = kind.rpartition(":")
    with blaming(kind):
        found = runpy.run_path(file).get(name)
    if found is None:
        raise InputError(f"--draft {kind}: {file} has no class {name}")

    def make(cache: KVCache) -> Drafter:
        with blaming(kind):
            drafter = found(model, cache)
        for method in ("propose", "rollback"):
            with suppress(AttributeError):  # absent, which the loop reports, or not to be set
                setattr(drafter, method, blaming(kind, in_text=True)(getattr(drafter, method)))
        return drafter

    return make


@contextmanager
def blaming(kind: str, in_text: bool = False) -> Iterator[None]:
    """Context that turns any error of the user's class into an InputError that names its line.

    ``in_text``: with the original error as its cause, so that the traceback is shown.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        file = kind.rpartition(":")[0]
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        place = f"{kind}, line {lines[-1]}" if lines else kind
        said = InputError(f"--draft {place}: {type(error).__name__}: {one_line(error)}")
        raise said from (error if in_text else None)
