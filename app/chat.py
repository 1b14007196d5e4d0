"""Conversations: ``Chat``, whose turns share a cache, and one at a terminal.

At a terminal a line from the user is followed by the model's answer, and again. Ctrl-C ends an
answer; at the prompt it ends the conversation.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from select import select

from app.common.command_line import say
from app.output import statistics_line, view
from app.prompt import checked_text
from app.session import ContextFull, Sample, Session, Slot, pieces
from decoding.rounds import Round
from model.errors import InputError

PASTED = 0.05  # seconds after a line, in which the next one can only be pasted
HELP = """/draft KIND: draft by auto, none, lookup, lowbit ...   /trace: show drafts, or no longer
/stats: numbers of the last answer   /forget: forget the oldest turn   /reset: begin anew   /quit"""


class Chat:
    """Turns of a user and the model, with a cache of their own.

    ``messages`` are ``{"role": ..., "content": ...}``, as for a chat template; ``sample`` is the
    last answer, ``options`` stand in place of the session's.
    """

    def __init__(self, session: Session, options: dict[str, object]) -> None:
        self.session = session
        self.options = options
        system = session.merged(options).system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.slot: Slot | None = None
        self.sample: Sample | None = None

    def say(self, text: str, **options: object) -> Sample:
        """Return the model's answer to the user's turn ``text``.

        Raises ContextFull where the conversation is longer than its context: the turn is not kept.
        """
        with self.session.lock:
            for _ in self.rounds(text, **options):
                pass
            return self.sample

    def stream(self, text: str, **options: object) -> Iterator[str]:
        """Return the model's answer in pieces; of one that is not read to its end, those so far
        stay.
        """
        rounds = self.rounds(text, **options)
        return pieces(self.sample, rounds)

    def rounds(self, text: str, **options: object) -> Iterator[Round]:
        """Return the rounds in which the model's answer is written, which is then ``sample``."""
        session = self.session
        given = session.merged(self.options, options)
        messages = [*self.messages, {"role": "user", "content": checked_text(text)}]
        if self.slot is None:
            self.slot = session.new_slot(session.capacity())
        capacity = self.slot.cache.capacity
        try:
            ids = session.encode(messages, given, capacity)
        except ContextFull as error:
            raise ContextFull(f"{error}, or forget the oldest turns") from None
        room = min(given.max_new_tokens, capacity - len(ids))
        self.sample = session.begin(ids, given.merged({"max_new_tokens": room}))
        self.sample.continues = True
        return self._answer(messages, self.sample)

    def _answer(self, messages: list[dict[str, str]], sample: Sample) -> Iterator[Round]:
        # nothing is kept of a turn that could not be answered
        for round in self.session.rounds(sample, self.slot):
            self.messages = [*messages, {"role": "assistant", "content": sample.text}]
            yield round

    def forget(self) -> None:
        """Forget the oldest turn of the user, if any, with its answer. It ends a stream."""
        if self.slot:
            self.slot.text = None
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        begin, end = [*users, len(self.messages), len(self.messages)][:2]
        del self.messages[begin:end]


class Terminal:
    """A conversation at a terminal, whose options its commands change."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.shows_trace = session.options.trace
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
                say(statistics_line(sample) if sample else "nothing is written yet")
            case "/draft":
                chosen = options | {"draft": argument.strip()}
                self.session.merged(chosen)  # checks it
                self.chat.options = chosen
                say(f"draft: {chosen['draft']}")
            case "/help":
                print(HELP, file=sys.stderr)
            case _:
                raise InputError(f"unknown command {command}: /help lists the commands")

    def answer(self, line: str) -> None:
        """Print the model's answer while it is written, or its trace."""
        rounds = self.chat.rounds(line)
        labels = self.session.labels if self.shows_trace else None
        with view(self.chat.sample.source, labels, sys.stdout) as show:
            for round in rounds:
                show(round)


def turns() -> Iterator[str]:
    """Yield the user's lines, without empty ones, until /quit, the end of input or Ctrl-C.

    Lines that a terminal has at once are pasted: they are one turn.
    """
    is_terminal = sys.stdin.isatty()
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            lines = [input("> " if is_terminal else "")]
            while is_terminal and select([sys.stdin], [], [], PASTED)[0]:
                lines.append(input())
            turn = "\n".join(lines).strip()
            if turn == "/quit":
                return
            if turn:
                yield turn


def converse(session: Session) -> None:
    """Hold a conversation until the user ends it. Raises InputError without a chat template."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives ``input`` its history and editing
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
