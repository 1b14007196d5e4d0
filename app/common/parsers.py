"""Command lines from tables of options: their parsers, and scripts that run with them."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from app.common.command_line import run_command

# Arguments of argparse's ``add_argument`` for options of several commands
FLAG = {"action": "store_true", "default": False}
MODEL = {
    "default": "smollm2-135m-instruct",
    "help": "a folder, a name under weights/, or ORG/NAME on the Hugging Face hub",
}
DEVICE = {"help": "cpu, cuda, cuda:1 ... (default: cuda if there is one)"}
DTYPE = {"default": "auto", "help": "number format (default: the checkpoint's)"}
TEMPERATURE = {"default": 0.0, "metavar": "T", "help": "0: greedy"}
# Title of a group in the help, "" for none -> names of an option, with a space between them ->
# arguments of argparse's ``add_argument``
Groups = Mapping[str, Mapping[str, Mapping[str, Any]]]


class OneLineParser(argparse.ArgumentParser):
    """Argument parser with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def parser_of(groups: Groups, **texts: str) -> OneLineParser:
    """Return a parser with the options of all groups; ``texts`` go to ``ArgumentParser``. The help
    of an option ends with its default, if it has one and does not tell it.
    """
    parser = OneLineParser(formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    for title, options in groups.items():
        group = parser.add_argument_group(title) if title else parser
        for name, settings in options.items():
            option = group.add_argument(*name.split(), **settings)
            has_default = option.default is not False and option.default not in (None, "", [], ())
            if has_default and "(default" not in option.help:
                option.help += " (default: %(default)s)"
    return parser


def script(
    work: Callable[[argparse.Namespace], int | None],
    groups: Groups,
    prog: str,
    doc: str,
    interrupted: str = "",
) -> Callable[..., int]:
    """Return the ``main`` of a script: it returns the exit status of ``work`` on the options in its
    arguments, by default those of the process (see ``run_command``). ``doc`` is the docstring of
    the script, whose first line heads the help.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        parser = parser_of(groups, prog=prog, description=doc.splitlines()[0])
        return run_command(lambda: work(parser.parse_args(arguments)), interrupted)

    return main


def within(
    kind: Callable[[str], float], least: float, most: float = math.inf
) -> Callable[[str], float]:
    """Return an argparse type of a finite number from ``least`` to ``most``."""
    finite = " and finite" if kind is float else ""
    bounds = f"from {least} to {most}" if most < math.inf else f"at least {least}{finite}"

    def number(text: str) -> float:
        if least <= (value := kind(text)) <= most and value < math.inf:
            return value
        raise argparse.ArgumentTypeError(f"must be {bounds}, found {text}")

    return number


def picture_file(text: str) -> Path:
    """Return the path of a picture, in a format that can be written. An argparse type."""
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(f"must end in .svg or .png, found {text}")
    return Path(text)
