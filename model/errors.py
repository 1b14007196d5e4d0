"""The one exception that means: the user can fix this."""


class InputError(ValueError):
    """Wrong input from outside: a file, an option, a prompt, a model that does not fit.

    The message is one sentence that names the thing and the remedy. Command lines print it on
    standard error and exit with status 2; it never comes with a traceback. What a file or a user named may
    hold line breaks or terminal codes: they are shown as spaces.
    """

    def __str__(self) -> str:
        return "".join(character if character.isprintable() else " " for character in super().__str__())
