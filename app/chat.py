"""Conversations: ``Chat``, whose cache keeps what has been read, and one at a terminal.

At a terminal a line from the user is followed by the model's answer, and again. Ctrl-C ends an
answer; at the prompt it ends the conversation.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

from rich.console import Console

from app.characters import TextStream
from app.command_line import say
from app.output import in_words
from app.prompt import checked_prompt
from app.session import ContextFull, Sample, Session, Slot
from app.trace import LiveTrace
from decoding.rounds import Round
from model.errors import InputError

HELP = """/draft KIND: draft by auto, none, lookup, lowbit ...   /trace: show drafts, or no longer
/stats: numbers of the last answer   /forget: forget the oldest turn   /reset: begin anew   /quit"""

See = Callable[[Round], None]  # called with each round of an answer


class Chat:
    """Turns of a user and the model. A turn reads only what its cache does not hold.

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

    def say(self, text: str, *, see: See = lambda round: None, **options: object) -> Sample:
        """Return the model's answer to the user's turn ``text``.

        Raises ContextFull where the conversation is longer than its context: the turn is not kept.
        """
        for _ in self.stream(text, see=see, **options):
            pass
        return self.sample

    def stream(
        self, text: str, *, see: See = lambda round: None, **options: object
    ) -> Iterator[str]:
        """Return the model's answer in pieces; of one that is not read to its end, those so far
        stay.
        """
        session = self.session
        session.streaming.close()
        given = session.merged(self.options, options)
        messages = [*self.messages, {"role": "user", "content": checked_prompt(text)}]
        if self.slot is None:
            self.slot = session.new_slot(session.capacity())
        capacity = self.slot.cache.capacity
        try:
            ids = session.encode_messages(messages, given)
        except ContextFull as error:
            raise ContextFull(f"{error}, or forget the oldest turns") from None
        if len(ids) >= capacity:
            raise ContextFull(
                f"the conversation has {len(ids)} tokens, its context {capacity}:"
                " forget its oldest turns"
            )
        room = min(given.max_new_tokens, capacity - len(ids))
        self.sample = session.begin(ids, given.merged({"max_new_tokens": room}))
        self.sample.continues = True
        session.streaming = self._answer(messages, self.sample, see)
        return session.streaming

    def forget(self) -> None:
        """Forget the oldest turn of the user, if any, with its answer."""
        self.session.streaming.close()  # an answer that is not read to its end is kept then
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        begin, end = [*users, len(self.messages), len(self.messages)][:2]
        del self.messages[begin:end]

    def _answer(
        self, messages: list[dict[str, str]], sample: Sample, see: See
    ) -> Generator[str, None, None]:
        stream = TextStream(sample.source)
        try:
            for round in self.session.rounds(sample, self.slot):
                see(round)
                if piece := stream.pull():
                    yield piece
        finally:
            if sample.rounds:  # nothing is kept of a turn that could not be answered
                self.messages = [*messages, {"role": "assistant", "content": sample.text}]


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
                say(in_words(sample) if sample else "nothing is written yet")
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
        """Print the model's answer while it is written."""
        if self.shows_trace:
            with LiveTrace(Console(), self.session.labels) as live:
                self.chat.say(line, see=live.add)
            return
        try:
            for piece in self.chat.stream(line):
                print(piece, end="", flush=True)
        finally:
            print()


def lines() -> Iterator[str]:
    """Yield the user's lines, without empty ones, until /quit, the end of input or Ctrl-C."""
    prompt = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        while (line := input(prompt).strip()) != "/quit":
            if line:
                yield line


def converse(session: Session) -> None:
    """Hold a conversation until the user ends it. Raises InputError without a chat template."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives ``input`` its history and editing
    if session.tokenizer.chat_template is None:
        raise InputError("--interactive needs a model with a chat template")
    session.check_memory()
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
