"""Command lines: the process that runs one, its standard streams, error lines and exit status.

Imports nothing large: ``start`` comes before what takes long to import.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable

from model.errors import InputError, one_line

# Words of torch's messages: on a GPU, on the host
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def start() -> None:
    """Prepare the process: what Ctrl-C does, and how streams are read and printed. It comes before
    large libraries are imported.

    Ctrl-C ends the process at once until ``run_command`` begins: loading torch takes seconds, in
    which it would otherwise end in a traceback. Characters that the terminal cannot show are
    printed as "?".
    """
    # Of a job in the background the shell has switched Ctrl-C off.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A closed stream is None, which ``run_command`` reports. An object that a program has put in a
    # stream's place is left as it is. Escaped bytes are refused later.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "replace")


def say(line: str) -> None:
    """Print a note on standard error."""
    print(f"[{line}]", file=sys.stderr)


def run_command(work: Callable[[], int | None], interrupted: str = "") -> int:
    """Return the exit status of ``work``, all of a command line; every failure is printed as one
    line.

    0      or the result of ``work``; also where the output is a closed pipe, as after ``| head``
    2      wrong input, too little memory, failed reading or writing
    130    Ctrl-C, after the line ``interrupted``

    ``work`` includes the parsing of arguments, which may end with the parser's SystemExit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by ``start``
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if None in (sys.stdin, sys.stdout, sys.stderr):
            raise InputError("standard input, output or error is closed: give /dev/null instead")
        try:
            status = work() or 0
        except SystemExit as end:
            # Rich ends the process with status 1 when the output is a closed pipe.
            status = 0 if isinstance(end.__context__, BrokenPipeError) else end.code
        sys.stdout.flush()  # while a failure can still be reported
        return status
    except InputError as error:
        # Its cause, if any, is an error in the user's own code.
        trace = traceback.format_exception(error.__cause__) if error.__cause__ else []
        return ended(2, f"{''.join(trace)}error: {error}")
    except KeyboardInterrupt:
        return ended(130, interrupted)
    except BrokenPipeError:
        return ended(0)
    except OSError as error:
        # of a stream or a socket there is no name
        name = "a file or a stream" if error.filename is None else error.filename
        # an InputError shows line breaks of a file's name as spaces
        why = InputError(f"{name} cannot be read or written: {error.strerror or error}")
        return ended(2, f"error: {why}")
    except (RuntimeError, MemoryError) as error:
        reason = one_line(error)
        if isinstance(error, RuntimeError) and not any(each in reason for each in OUT_OF_MEMORY):
            raise
        return ended(2, f"error: out of memory: ask for less, or free some first ({reason})")


def ended(status: int, complaint: str = "") -> int:
    """Return the status, after standard output is flushed and the complaint, if any, is printed. A
    closed pipe is not reported.
    """
    for stream, text in ((sys.stdout, ""), (sys.stderr, complaint and f"{complaint}\n")):
        try:
            if stream:
                print(text, end="", file=stream, flush=True)
        except OSError:  # drop the buffer, which the interpreter would otherwise report at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status
