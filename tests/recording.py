"""What a test notes of the calls of a function while the function does its work."""

from collections.abc import Callable
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
