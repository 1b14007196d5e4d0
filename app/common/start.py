"""Settings of a process that a command makes before it imports large libraries."""

import os
import signal
import sys


def start() -> None:
    """Set Ctrl-C, standard streams and idle threads. Ends the process in a deleted folder.

    Ctrl-C ends the process at once until ``run_command`` begins: loading torch takes seconds, in
    which it would otherwise end in a traceback. Characters that the terminal cannot show are
    printed as "?".
    """
    # the shell may have switched it off
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # None: closed, which ``run_command`` reports
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")
    try:
        os.getcwd()
    except OSError:  # torch could not load its libraries
        print("error: the working directory was deleted: change to another", file=sys.stderr)
        sys.exit(2)
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a size: rich would print nothing
        del os.environ["COLUMNS"]
    # Number of times that an idle OpenMP thread of torch looks for work before it sleeps. While it
    # looks, it keeps a core from other programs and from the threads of a compiled step.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
