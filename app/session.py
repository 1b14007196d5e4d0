"""Session: a loaded model that writes texts: one after another, many at once, or a conversation.

``load`` makes one from the options of the command line. Everything that writes uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from app.characters import Labels, TextStream
from app.chooser import Setting
from app.options import OF_THE_MODEL, make_parser, merge_options
from app.prompt import check_prompt, checked_prompt, conversation
from app.request import Request, TextOptions, read_grammar_files
from app.together import MOST_TOGETHER, Scheduler
from app.writer import Decisions, Reader, Sample, Task, Writer
from decoding.text import Text
from model import Decoder, InputError
from model.fast import accelerate
from weights.load import load_model
from weights.memory import check_fits, free_bytes

POSITIONS = 1024  # a cache is made for a multiple of these
Pieces = Generator[str, None, None]


class Session:
    """A loaded model, which writes by ``write``, ``stream``, ``write_all`` and ``chat``. Options of
    a call stand in place of those that the session was made with.

    ``setting`` keeps the drafts and what was learned about them. One text is written at a time: a
    call ends a stream that has not ended. ``sample`` is the last text that ``write`` or ``stream``
    began.
    """

    def __init__(
        self,
        request: Request,
        model: Decoder | None = None,
        decide: Callable[[Decisions], Decisions] = lambda decisions: decisions,
    ) -> None:
        """``model`` is a prepared one, by default that of the request's folder; for ``decide`` see
        ``Writer``. Raises InputError where the model does not fit into memory.
        """
        self.request = request
        self.decide = decide
        if model is None:
            check_fits(request.memory(), request.device)
            model = load_model(request.folder, request.dtype, request.device)
            model = accelerate(model, not request.options.no_compile)
        self.model = model
        self.tokenizer = request.tokenizer
        self.labels = Labels(self.tokenizer.token_bytes, self.tokenizer.special)
        self.setting = Setting(
            request.folder,
            model,
            self.tokenizer,
            request.asked.params,
            request.capacity,
            request.asked.coupling.name,
        )
        self.writer: Writer | None = None
        self.sample: Sample | None = None
        self.streaming: Pieces = (piece for piece in ())

    def write(self, prompt: str, **options: object) -> Sample:
        """The text after a prompt. Raises InputError."""
        list(self.stream(prompt, **options))
        return self.sample

    def stream(self, prompt: str, **options: object) -> Iterator[str]:
        """The text after a prompt, in pieces as they are written. Raises InputError."""
        self.streaming.close()
        asked = self.asked(options)
        task = self.task(self.request.encode(prompt, asked), asked)
        longest = task.text.longest
        if self.writer is None or self.writer.capacity < longest:
            rounded_up = -(-longest // POSITIONS) * POSITIONS
            self.writer = self.new_writer(min(rounded_up, self.model.max_positions))
        self.sample = task.sample
        self.streaming = pieces(self.writer, task)
        return self.streaming

    def write_all(self, prompts: Sequence[str], **options: object) -> list[Sample]:
        """A text after each prompt, in shared steps where the device has them.

        Greedy texts are those of ``write``. Sampled ones have random numbers of their own, by the
        seed and their place in the list.
        """
        self.streaming.close()
        if not isinstance(prompts, list | tuple):
            raise InputError(f"prompts must be a list of strings, found {prompts!r:.80}")
        asked = self.asked(options)
        tasks = self.tasks([self.request.encode(prompt, asked) for prompt in prompts], asked)
        capacity = max((task.text.longest for task in tasks), default=1)
        Scheduler(self.model, capacity, self.slots(len(tasks), capacity)).write_all(tasks)
        return [task.sample for task in tasks]

    def chat(self, **options: object) -> Conversation:
        """A new conversation, with a cache of its own; its ``system`` message is an option."""
        return Conversation(self, options)

    def asked(self, *calls: dict[str, object]) -> TextOptions:
        """The session's options, with those of each call in their place. Raises InputError."""
        options = self.request.options
        for given in calls:
            if fixed := [name for name in OF_THE_MODEL if name in given]:
                raise InputError(f"{fixed[0]} is an option of load, not of a call")
            options = merge_options(options, given)
        return self.request.text_options(read_grammar_files(options))

    def task(
        self, ids: Sequence[int], asked: TextOptions, positions: int | None = None, **more: Any
    ) -> Task:
        """A text to be written after a prompt, up to this many positions, by default the context;
        ``more`` are further fields.
        """
        room = (positions or self.request.context) - len(ids)
        rules = replace(asked.rules, max_new_tokens=min(asked.rules.max_new_tokens, room))
        text = Text(ids, rules, self.model, self.tokenizer.token_bytes)
        drafting = self.setting.drafting(asked.draft, asked.params)
        return Task(text, drafting, asked.params, asked.coupling, **more)

    def tasks(self, prompts: Sequence[Sequence[int]], asked: TextOptions) -> list[Task]:
        """A text after each prompt, with random numbers of its own."""
        couplings = [replace(asked.coupling, sample=number) for number in range(len(prompts))]
        return [
            self.task(ids, asked._replace(coupling=coupling))
            for ids, coupling in zip(prompts, couplings, strict=True)
        ]

    def new_writer(self, capacity: int) -> Writer:
        """A writer with a cache of its own."""
        return Writer(self.model, capacity, self.tokenizer.token_bytes, self.decide)

    def slots(self, texts: int, capacity: int) -> int:
        """Number of texts that are written at once: as many as share steps and fit into memory."""
        if not self.model.batches_calls:
            return 1
        memory = self.request.memory(positions=capacity)
        fitting = free_bytes(self.request.device) // (memory.cache + memory.workspace)
        return max(1, min(texts, MOST_TOGETHER, fitting))


def load(model: str = "smollm2-135m-instruct", **options: object) -> Session:
    """A loaded model, with the options of the command line: see ``Session``. Raises InputError."""
    known = make_parser().parse_args(["--interactive"])  # prompts are given later
    return Session(Request(merge_options(known, {"model": model} | options)))


def pieces(writer: Writer, task: Task) -> Pieces:
    """A task's text, in pieces as they are written."""
    writer.begin(task.text.tokens, task.answers)
    stream = TextStream(task.text)
    for _ in writer.rounds(task):
        if piece := stream.pull():
            yield piece


class ContextFull(InputError):
    """Error of a conversation that is longer than its context."""


class Conversation:
    """Turns of a user and the model, with a cache that keeps what has been read.

    ``messages`` are ``{"role": ..., "content": ...}``, as for a chat template; ``sample`` is the
    last answer, ``options`` stand in place of the session's.
    """

    def __init__(self, session: Session, options: dict[str, object]) -> None:
        self.session = session
        self.options = options
        system = session.asked(options).system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.writer: Writer | None = None
        self.sample: Sample | None = None

    def say(self, text: str, *, readers: Sequence[Reader] = (), **options: object) -> Sample:
        """The model's answer to the user's turn ``text``; ``readers`` see each round of it.

        Raises ContextFull where the conversation is longer than its context: the turn is not kept.
        """
        list(self.stream(text, readers=readers, **options))
        return self.sample

    def stream(
        self, text: str, *, readers: Sequence[Reader] = (), **options: object
    ) -> Iterator[str]:
        """The model's answer in pieces; of one that is not read to its end, those so far stay."""
        session = self.session
        session.streaming.close()
        asked = session.asked(self.options, options)
        messages = [*self.messages, {"role": "user", "content": checked_prompt(text)}]
        ids, answers = conversation(session.tokenizer, messages, asked.schema)
        if self.writer is None:
            self.writer = session.new_writer(session.request.capacity)
        if len(ids) >= self.writer.capacity:
            raise ContextFull(
                f"the conversation has {len(ids)} tokens, its context {self.writer.capacity}:"
                " forget its oldest turns"
            )
        check_prompt(ids, session.request.config, session.request.folder, self.writer.capacity)
        task = session.task(ids, asked, self.writer.capacity, answers=answers, readers=readers)
        self.sample = task.sample
        session.streaming = self._answer(messages, pieces(self.writer, task))
        return session.streaming

    def forget(self) -> None:
        """Forget the oldest turn of the user, if any, with its answer."""
        self.session.streaming.close()  # an answer that is not read to its end is kept then
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        begin, end = [*users, len(self.messages), len(self.messages)][:2]
        del self.messages[begin:end]

    def _answer(self, messages: list[dict[str, str]], pieces: Pieces) -> Pieces:
        try:
            yield from pieces
        finally:
            if self.sample.rounds:  # nothing is kept of a turn that could not be answered
                self.messages = [*messages, {"role": "assistant", "content": self.sample.text}]
