"""Settings of a process that a command makes before it imports large libraries."""

import os
import signal


def start() -> None:
    """Make Ctrl-C end the process at once with status 130, until ``run_command`` begins; set how long threads spin.

    Loading torch takes seconds, in which Ctrl-C would otherwise end in a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the shell may have switched it off
        signal.signal(signal.SIGINT, end_at_once)
    # Number of times that an idle OpenMP thread looks for work before it sleeps. Waking it takes longer than most
    # products of a step. The default would keep a core busy for too long on a machine with other processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "200000")


def end_at_once(*_: object) -> None:
    """Handler of SIGINT: end without a message."""
    os._exit(130)
