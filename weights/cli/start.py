"""First steps of a command, before anything heavy is imported."""

from __future__ import annotations

import os
import signal


def start() -> None:
    """Let Ctrl-C end the process at once with status 130, until ``run_command`` takes over; settle how threads wait.

    Loading torch takes seconds, in which Ctrl-C would otherwise end in a traceback of some library.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell told to ignore it
        signal.signal(signal.SIGINT, end_at_once)
    # Read when OpenMP is loaded: how often a thread looks for work before it sleeps. To wake it takes longer than most
    # products of a step. By default it would keep its core from the other processes of a busy machine for too long.
    os.environ.setdefault("GOMP_SPINCOUNT", "200000")


def end_at_once(*_: object) -> None:
    """Handler of SIGINT."""
    os._exit(130)
