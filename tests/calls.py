"""Calls as tests see them: records of the calls of a function, Ctrl-C in some of them, a command's
status, and waiting for what others do.
"""

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest


def recorded(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]
) -> list[Any]:
    """A list of ``note(*arguments)`` of every later call of this function of ``owner``."""
    notes: list[Any] = []
    function = getattr(owner, name)

    def recording(*given: Any, **named: Any) -> Any:
        notes.append(note(*given, **named))
        return function(*given, **named)

    patch.setattr(owner, name, recording)
    return notes


def interrupted(patch: pytest.MonkeyPatch, owner: Any, name: str, *calls: int) -> None:
    """Ctrl-C before these later calls of this function of ``owner``, counted from 1."""
    number = count(1)

    def interrupt(*_: Any, **__: Any) -> None:
        if next(number) in calls:
            raise KeyboardInterrupt

    recorded(patch, owner, name, interrupt)


def status_of(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """The status of a command, also where argparse ends it."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def until(true: Callable[[], Any], patience: float = 60.0) -> None:
    """Wait for a condition that another thread or process will make true."""
    ends = time.monotonic() + patience
    while not true():
        assert time.monotonic() < ends, "it never came about"
        time.sleep(0.005)
