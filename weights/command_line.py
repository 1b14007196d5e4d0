"""What every command line here shares."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from model.errors import InputError


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like every other."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def say(line: str) -> None:
    """A remark for the person who waits, on standard error."""
    print(f"[{line}]", file=sys.stderr)


def run_command(work: Callable[[], int]) -> int:
    """Stop-gap."""
    try:
        return work()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
