"""Conversations at a terminal: a line from the user is followed by the model's answer, and again.

Ctrl-C ends an answer; at the prompt it ends the conversation.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress

from app.common.command_line import say
from app.drafts import KINDS
from app.output import statistics_line, view
from app.session import Session
from model.errors import InputError

HELP = f"""/draft KIND: draft by {", ".join(KINDS)}
/trace: show drafts, or no longer
/stats: numbers of the last answer   /forget: forget the oldest turn   /reset: begin anew   /quit"""


class Terminal:
    """A conversation at a terminal, whose options its commands change."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.shows_trace = session.options.trace
        self.chat = session.chat()

    def obey(self, line: str) -> None:
        """Run the command of a line that begins with "/". Raises InputError."""
        options = self.chat.options
        match line.split(maxsplit=1):
            case ["/reset"]:
                self.chat = self.session.chat(**options)
            case ["/forget"]:
                self.chat.forget()
            case ["/trace"]:
                self.shows_trace = not self.shows_trace
            case ["/stats"]:
                sample = self.chat.sample
                say(statistics_line(sample) if sample else "nothing is written yet")
            case ["/draft", *kind]:
                chosen = options | {"draft": "".join(kind)}
                self.session.options.merged(chosen)  # checks it
                self.chat.options = chosen
                say(f"draft: {chosen['draft']}")
            case ["/help"]:
                print(HELP, file=sys.stderr)
            case _:
                raise InputError(f"unknown command {line!r:.80}: /help lists the commands")

    def answer(self, line: str) -> None:
        """Print the model's answer while it is written, or its trace."""
        sample, rounds = self.chat.begin(line)
        labels = self.session.labels if self.shows_trace else None
        with view(sample.source, labels, sys.stdout) as show:
            for round in rounds:
                show(round)


def turns() -> Iterator[str]:
    """Yield the user's lines, without empty ones, until /quit, the end of input or Ctrl-C."""
    sign = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        while (turn := input(sign).strip()) != "/quit":
            if turn:
                yield turn


def converse(session: Session) -> None:
    """Hold a conversation until the user ends it. Raises InputError without a chat template."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives ``input`` history, editing, and pasting of lines
    if session.tokenizer.chat_template is None:
        raise InputError("--interactive needs a model with a chat template")
    session.check_memory()
    terminal = Terminal(session)
    say("a conversation: /help lists the commands, Ctrl-C ends an answer")
    for line in turns():
        try:
            if line.startswith("/"):
                terminal.obey(line)
            else:
                terminal.answer(line)
        except InputError as error:
            say(f"{error}")
        except KeyboardInterrupt:
            say("ended; Ctrl-C at the prompt ends the conversation")
