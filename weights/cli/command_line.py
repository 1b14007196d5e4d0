"""Command lines: help, error lines, exit status, standard streams."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from model.errors import InputError
from weights.cli.files import one_line
from weights.cli.start import end_at_once


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the default of every option, unless it is none or off, or is in the option's help text already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, "", []) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """Argument parser with errors of one line and defaults in its help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=DefaultsFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def say(line: str) -> None:
    """Print a note on standard error."""
    print(f"[{line}]", file=sys.stderr)


def run_command(work: Callable[[], int | None], interrupted: str | None = None) -> int:
    """Exit status of the ``work`` of a command line; every failure is printed as one line.

    The result of ``work``, by default 0. 2 after wrong input, too little memory, and failed reading or writing. 130
    after Ctrl-C, which prints the line ``interrupted``, if any. 0 without a message when the output is a closed pipe,
    as after ``| head``. ``work`` includes parsing the arguments; the parser's SystemExit passes through.
    """
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    repair_standard_streams()
    status, complaint = 2, None
    try:
        try:
            return work() or 0
        finally:
            sys.stdout.flush()  # while a failure can still be reported
    except InputError as error:
        complaint = f"error: {error}"
    except KeyboardInterrupt:
        status, complaint = 130, interrupted
    except BrokenPipeError:
        status = 0
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # rich ends so on a closed pipe
            raise
        status = 0
    except OSError as error:
        place = "standard output" if error.filename is None else error.filename
        complaint = f"error: {InputError(f'{place} cannot be read or written: {error.strerror or error}')}"
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        complaint = f"error: out of memory: ask for less, or free some first ({one_line(error)})"
    _finish(sys.stdout)
    if complaint is not None:
        with suppress(OSError):
            print(complaint, file=sys.stderr)
    _finish(sys.stderr)
    return status


def repair_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams, and replace characters that the others cannot show.

    The next opened file would otherwise get the number of a closed stream, and with it the messages of libraries.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open to the end
        stream = getattr(sys, name)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory of a device ran out, or of the host, for which torch raises a plain RuntimeError."""
    named = type(error).__name__ == "OutOfMemoryError"  # by name, since torch may not be loaded
    return named or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _finish(stream: TextIO) -> None:
    """Flush a stream; where that fails, drop its buffer, which the interpreter would otherwise report at exit."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
