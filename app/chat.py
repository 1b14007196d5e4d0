"""Conversation at a terminal: a line from the user, the model's answer, and again.

The KV cache is kept from turn to turn, so that a turn reads only what is new. Ctrl-C ends an
answer; at the prompt it ends the conversation.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console

from app.command_line import say
from app.output import in_words
from app.session import Session
from app.trace import LiveTrace
from model import InputError

HELP = """/draft KIND: draft by auto, none, lookup, lowbit ...   /trace: show drafts, or no longer
/stats: numbers of the last answer   /forget: forget the oldest turn   /reset: begin anew   /quit"""


class Terminal:
    """A conversation at a terminal, whose options its commands change."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.shows_trace = session.request.options.trace
        self.chat = session.chat()

    def obey(self, line: str) -> None:
        """Run the command of a line that begins with "/". Raises InputError."""
        command, _, argument = line.partition(" ")
        options = self.chat.options
        match command:
            case "/reset":
                self.chat = self.session.chat(**options)
            case "/forget":
                self.chat.forget()
            case "/trace":
                self.shows_trace = not self.shows_trace
            case "/stats":
                sample = self.chat.sample
                say(in_words(sample) if sample else "nothing is written yet")
            case "/draft":
                chosen = options | {"draft": argument.strip()}
                self.session.asked(chosen)  # checks it
                self.chat.options = chosen
                say(f"draft: {chosen['draft']}")
            case "/help":
                print(HELP, file=sys.stderr)
            case _:
                raise InputError(f"unknown command {command}: /help lists the commands")

    def answer(self, line: str) -> None:
        """Print the model's answer while it is written."""
        if self.shows_trace:
            grammar = bool(self.session.request.asked.rules.grammar)
            with LiveTrace(Console(), self.session.labels, grammar=grammar) as live:
                self.chat.say(line, readers=[live.add])
            return
        try:
            for piece in self.chat.stream(line):
                print(piece, end="", flush=True)
        finally:
            print()


def lines() -> Iterator[str]:
    """The user's lines, without empty ones, until /quit, the end of input or Ctrl-C."""
    prompt = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        while (line := input(prompt).strip()) != "/quit":
            if line:
                yield line


def converse(session: Session) -> None:
    """A conversation until the user ends it. Raises InputError without a chat template."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives ``input`` its history and editing
    if session.tokenizer.chat_template is None:
        raise InputError("--interactive needs a model with a chat template")
    terminal = Terminal(session)
    say("a conversation: /help lists the commands, Ctrl-C ends an answer")
    for line in lines():
        try:
            if line.startswith("/"):
                terminal.obey(line)
            else:
                terminal.answer(line)
        except InputError as error:
            say(f"{error}")
        except KeyboardInterrupt:
            say("ended; Ctrl-C at the prompt ends the conversation")
