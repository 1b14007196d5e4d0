"""Refusals: one line, whatever was wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from model.errors import InputError


def line_of(error: InputError) -> str:
    """The message of an error, which is one line."""
    message = str(error)
    assert message.strip() and len(message.splitlines()) == 1
    return message


def refusal(work: Callable[..., object], *given: Any, **named: Any) -> str:
    """The line of the InputError that the work raises."""
    with pytest.raises(InputError) as caught:
        work(*given, **named)
    return line_of(caught.value)
