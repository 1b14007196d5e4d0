"""Command lines: error lines, exit status, standard streams."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

from model.errors import InputError, one_line

# in torch's message, by device: a GPU, the host
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def say(line: str) -> None:
    """Print a note on standard error."""
    print(f"[{line}]", file=sys.stderr)


def run_command(work: Callable[[], int | None], interrupted: str = "") -> int:
    """Return the exit status of ``work``, all of a command line; every failure is printed as one
    line.

    0      or the result of ``work``; also where the output is a closed pipe, as after ``| head``
    2      wrong input, too little memory, failed reading or writing
    130    Ctrl-C, after the line ``interrupted``

    ``work`` includes the parsing of arguments; the parser's SystemExit passes through.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by ``start``
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 2
    complaint = ""
    try:
        if None in (sys.stdin, sys.stdout, sys.stderr):
            raise InputError("standard input, output or error is closed: give /dev/null instead")
        try:
            return work() or 0
        finally:
            sys.stdout.flush()  # while a failure can still be reported
    except InputError as error:
        # a cause is an error in the user's own code
        trace = traceback.format_exception(error.__cause__) if error.__cause__ else []
        complaint = f"{''.join(trace)}error: {error}"
    except KeyboardInterrupt:
        status = 130
        complaint = interrupted
    except BrokenPipeError:
        status = 0
    except SystemExit as error:
        if error.code != 1:
            raise
        status = 0  # rich's status when the output is a closed pipe
    except OSError as error:
        # of a stream or a socket there is no name
        name = "a file or a stream" if error.filename is None else error.filename
        # an InputError shows line breaks of a file's name as spaces
        failure = InputError(f"{name} cannot be read or written: {error.strerror or error}")
        complaint = f"error: {failure}"
    except (RuntimeError, MemoryError) as error:
        reason = one_line(error)
        if isinstance(error, RuntimeError) and not any(each in reason for each in OUT_OF_MEMORY):
            raise
        complaint = f"error: out of memory: ask for less, or free some first ({reason})"
    end_streams(complaint)
    return status


def end_streams(complaint: str) -> None:
    """Flush standard output, and print the complaint, if any. A closed pipe is not reported."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, complaint and f"{complaint}\n")):
        try:
            if stream:
                print(text, end="", file=stream, flush=True)
        except OSError:  # drop the buffer, which the interpreter would otherwise report at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
