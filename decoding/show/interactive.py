"""Conversation at a terminal: a line from the user, the model's answer, and again.

The KV cache is kept from turn to turn, so that a turn reads only what is new. Ctrl-C ends an
answer; at the prompt it ends the conversation.
"""

import sys
from contextlib import suppress

from rich.console import Console

from cli.command_line import say
from decoding.run.session import ContextFull, Conversation, Session
from decoding.run.streaming import Labels
from decoding.run.writer import Sample
from decoding.show.output import in_words
from decoding.show.trace import LiveTrace
from model import InputError

HELP = """/draft KIND: draft by auto, none, lookup, lowbit ...   /trace: show drafts, or no longer
/stats: numbers of the last answer   /forget: forget the oldest turn   /reset: begin anew   /quit"""


class Terminal:
    """A conversation with its settings: ``draft`` None is the command line's."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.labels = Labels(session.tokenizer.token_bytes, session.tokenizer.special)
        self.shows_trace = session.request.options.trace
        self.draft: str | None = None
        self.last: Sample | None = None
        self.chat = self.new_chat()

    def new_chat(self) -> Conversation:
        """A conversation without turns."""
        return self.session.chat(self.session.request.options.system)

    def obey(self, line: str) -> bool:
        """Do what a line beginning with "/" says; returns False for /quit."""
        command, _, argument = line.partition(" ")
        if command == "/reset":
            self.chat = self.new_chat()
        elif command == "/forget":
            self.chat.forget()
        elif command == "/trace":
            self.shows_trace = not self.shows_trace
        elif command == "/stats":
            say(in_words(self.last, self.last_draft()) if self.last else "nothing is written yet")
        elif command == "/draft":
            self.session.text_options(
                self.session.options({"draft": argument.strip()})
            )  # checks it
            self.draft = argument.strip()
        elif command != "/quit":
            print(HELP, file=sys.stderr)
        return command != "/quit"

    def last_draft(self) -> str:
        """The kind of draft of the next answer."""
        return self.draft or self.session.request.options.draft

    def answer(self, line: str) -> None:
        """Print the model's answer while it is written."""
        options = {"draft": self.draft} if self.draft else {}
        if self.shows_trace:
            with LiveTrace(Console(), self.labels) as live:
                self.last = self.chat.say(line, readers=[live.add], **options)
            return
        try:
            for piece in self.chat.stream(line, **options):
                print(piece, end="", flush=True)
        finally:
            print()
            self.last = self.chat.sample


def converse(session: Session) -> int:
    """A conversation until /quit, the end of input, or Ctrl-C at the prompt; returns 0."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives ``input`` its history and editing
    if session.tokenizer.chat_template is None:
        raise InputError("--interactive needs a model with a chat template")
    terminal = Terminal(session)
    prompt = "> " if sys.stdin.isatty() else ""
    say("a conversation: /help lists the commands, Ctrl-C ends an answer")
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        try:
            if line.startswith("/"):
                if not terminal.obey(line):
                    return 0
            elif line:
                terminal.answer(line)
        except ContextFull as full:
            say(f"{full}")
            if prompt and input("forget the oldest turn, then say it again? [y/n] ") == "y":
                terminal.chat.forget()
        except InputError as error:
            say(f"{error}")
        except KeyboardInterrupt:
            say("ended; Ctrl-C at the prompt ends the conversation")
