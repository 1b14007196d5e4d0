"""Settings of a process that a command makes before it imports large libraries."""

import os
import signal
import sys


def start() -> None:
    """Settings of Ctrl-C, standard streams and idle threads.

    Ctrl-C ends the process at once until ``run_command`` begins: loading torch takes seconds, in which it would
    otherwise end in a traceback. Characters that the terminal cannot show are printed as "?".
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the shell may have switched it off
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed, which ``run_command`` reports
        stream.reconfigure(errors="replace")
    # Number of times that an idle OpenMP thread looks for work before it sleeps. Waking it takes longer than most
    # products of a step. The default would keep a core busy for too long on a machine with other processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "200000")
