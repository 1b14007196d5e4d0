"""Exception for errors that a user can fix, and other errors in one line."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Wrong input: a file, an option, a prompt, a model that does not fit.

    The message is one sentence that names the thing and the remedy. Command lines print it without
    a traceback, and exit with status 2. Quoted input may hold line breaks or terminal codes: these
    are shown as spaces. ``field`` is the name of the option at fault, as in a call of Python, where
    the check knows it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __str__(self) -> str:
        return "".join(
            character if character.isprintable() else " " for character in super().__str__()
        )


@contextmanager
def explaining(
    trouble: str, errors: tuple[type[BaseException], ...] = (OSError,), field: str | None = None
) -> Iterator[None]:
    """Return a context that turns ``errors`` into an InputError: ``trouble``, then the error's
    message.
    """
    try:
        yield
    except InputError:
        raise
    except errors as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{trouble}: {one_line(reason or error)}", field) from None


def one_line(error: object) -> str:
    """Return the message of an error, or its type, in one line of up to 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def typed_line(error: BaseException) -> str:
    """Return the type of an error and its ``one_line``."""
    return f"{type(error).__name__}: {one_line(error)}"
