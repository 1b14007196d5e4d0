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
    """Help that shows every option's default, unless it has none, is off by default, or its help says so in words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, "", []) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """Argument parser with errors of one line and help that shows defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=DefaultsFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def say(line: str) -> None:
    """Print a remark on standard error."""
    print(f"[{line}]", file=sys.stderr)


def run_command(work: Callable[[], int | None], interrupted: str | None = None) -> int:
    """Do the work of a command line; returns its exit status and prints every failure in one line.

    0, or the result of ``work``; 2 after wrong input, memory that ran out, or a file, a disk or an output that failed;
    130 after Ctrl-C, which prints the line ``interrupted``, if any. When nobody reads the output any more, as in
    ``| head``, it ends in silence with 0. ``work`` should parse the arguments too, so that all this holds for them;
    the parser's SystemExit passes through.
    """
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    repair_standard_streams()
    status, complaint = 2, None
    try:
        try:
            return work() or 0
        finally:
            sys.stdout.flush()  # now, while a failure can still be reported
    except InputError as error:
        complaint = f"error: {error}"
    except KeyboardInterrupt:
        status, complaint = 130, interrupted
    except BrokenPipeError:
        status = 0
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # rich ends so when the reader of its output has gone
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
    """Put /dev/null in the place of closed standard streams, and let the others show any text.

    Otherwise the next file to be opened would get the number of a closed one, and with it the messages of libraries.
    In the place of standard output it is open for reading only: to write there is an error, not a loss.
    """
    for name, mode, access in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, access)  # the lowest free number is the closed one
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - to the end
        stream = getattr(sys, name)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the text


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: of a device, or of the host, of which torch says so in a plain RuntimeError."""
    named = type(error).__name__ == "OutOfMemoryError"  # torch's, which need not be loaded for this
    return named or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _finish(stream: TextIO) -> None:
    """Flush a stream or, where that fails, drop its buffer: the interpreter would report it at exit."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
