"""What every command line here shares: its help, its complaints, its exit status, its standard streams."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

import torch

from model.errors import InputError
from weights.cli.files import one_line


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every option's default, unless it has none, is off by default, or its help says so in words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, "", []) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like every other, and whose help shows defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=DefaultsFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def say(line: str) -> None:
    """A remark for the person who waits, on standard error."""
    print(f"[{line}]", file=sys.stderr)


def run_command(work: Callable[[], int | None], interrupted: str | None = None) -> int:
    """Do the work of a command line; returns its exit status, and tells every failure in one line.

    0, or what ``work`` returns; 2 after wrong input, memory that ran out, or a file, a disk or an output that failed;
    130 after Ctrl-C, which is answered with the line ``interrupted``, if any. When nobody reads the output any more, as
    in ``| head``, it ends in silence with 0. ``work`` should parse the arguments too, so that all this holds for them;
    the parser's SystemExit passes through.
    """
    repair_standard_streams()
    status, complaint = 2, None
    try:
        try:
            return work() or 0
        finally:
            sys.stdout.flush()  # now, while it can still be told that this fails
    except InputError as error:
        complaint = f"error: {error}"
    except KeyboardInterrupt:
        status, complaint = 130, interrupted
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # so rich ends when the reader of its output has gone
            raise
        status = 0
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            status = 0
        else:
            nameless = "a pipe" if isinstance(error, BrokenPipeError) else "standard output"
            what = nameless if error.filename is None else one_line(error.filename)
            complaint = f"error: {what} cannot be read or written: {one_line(error.strerror or error)}"
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
    """Lay /dev/null where a standard stream is closed, and let the others show any text.

    Where one is closed, the next file to be opened would get its number, and with it what a library writes to standard
    error; and ``print`` takes a standard error that is None for standard output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as we run
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the text


def _reader_has_gone() -> bool:
    """Whether nobody reads our standard output or error any more: a pipe to a process of our own may break too."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # what stands in for a stream in a test has no descriptor
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if poll.poll(0):
                return True
    return False


def _is_out_of_memory(error: Exception) -> bool:
    """Of the device, or of the host: torch then raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _finish(stream: TextIO) -> None:
    """Write out what a stream still holds or, where that fails, throw it away: the interpreter would complain of it."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
