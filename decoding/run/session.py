"""Session: a loaded model that writes texts: one after another, many at once, or a conversation.

``generate.load`` makes one from the options of the command line. Everything that writes uses it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from decoding.run.arguments import checked
from decoding.run.chooser import Draftings, Setting
from decoding.run.options import (
    GRAMMARS,
    Request,
    TextOptions,
    read_grammar,
    read_grammar_files,
    told_schema,
)
from decoding.run.prompt import check_prompt, encode_prompt, tell_schema
from decoding.run.reading import Spans, conversation
from decoding.run.streaming import TextStream
from decoding.run.together import MOST_TOGETHER, Scheduler, Task
from decoding.run.writer import Decisions, Reader, Sample, Writer
from decoding.text import Text
from model import Decoder, InputError
from model.fast import accelerate
from weights.load import load_model
from weights.memory import check_fits, estimate, free_bytes

POSITIONS = 1024  # a cache is made for a multiple of these
Pieces = Generator[str, None, None]


class Session:
    """A loaded model. Options of a call stand in place of those that the session was made with.

    What it learned about drafts stays in it. One text is written at a time: a call ends a stream
    that has not ended.
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
            needs = estimate(request.config, **request.needs(), fast_on=request.device)
            check_fits(needs, request.device)
            model = load_model(request.folder, request.dtype, request.device)
            model = accelerate(model, not request.options.no_compile)
        self.model = model
        self.tokenizer = request.tokenizer
        setting = Setting(
            request.folder,
            model,
            self.tokenizer,
            request.params,
            request.capacity,
            request.coupling.name,
        )
        self.draftings = Draftings(setting)
        self.writer: Writer | None = None
        self.streaming: Pieces | None = None

    def write(self, prompt: str, **options: object) -> Sample:
        """The text after a prompt. Raises InputError, and Interrupted on Ctrl-C."""
        sample, pieces = self._begin(prompt, options)
        for _ in pieces:
            pass
        return sample

    def stream(self, prompt: str, **options: object) -> Iterator[str]:
        """The text after a prompt, in pieces as they are written."""
        return self._begin(prompt, options)[1]

    def write_all(self, prompts: Sequence[str], **options: object) -> list[Sample]:
        """A text after each prompt, in shared steps where the device has them; each is the text
        that it would be alone. Equal prompts have different random numbers.
        """
        self.end_stream()
        given = self.options(options)
        asked = self.text_options(given)
        encoded = [self.encode(prompt, given) for prompt in prompts]
        longest = max(map(len, encoded), default=0) + asked.rules.max_new_tokens
        drafting = self.draftings.of(asked.draft, asked.params)
        tasks = []
        for number, ids in enumerate(encoded):
            text = Text(ids, asked.rules, self.model, self.tokenizer.token_bytes)
            drawn = replace(asked.coupling, sample=number)
            tasks.append(Task(text, drafting, asked.params, drawn))
        capacity = min(longest, self.model.max_positions)
        Scheduler(self.model, capacity, self.slots(len(tasks), capacity)).write_all(tasks)
        return [task.sample for task in tasks]

    def chat(self, system: str | None = None, **options: object) -> Conversation:
        """A new conversation, with a cache of its own."""
        return Conversation(self, system, options)

    def text_options(self, options: Namespace) -> TextOptions:
        """The options of a text among those of a call. Raises InputError."""
        grammar = read_grammar(options, self.tokenizer, self.model.vocab_size)
        return TextOptions.of(options, self.tokenizer.eos_ids, grammar)

    def options(self, given: dict[str, object]) -> Namespace:
        """The options of a call, with those of the session where it gives none. One grammar stands
        in place of another. Raises InputError.
        """
        known = self.request.options
        if GRAMMARS.keys() & given.keys():
            known = Namespace(**vars(known) | dict.fromkeys(GRAMMARS))
        return read_grammar_files(checked(given, known))

    def encode(self, prompt: str, options: Namespace) -> list[int]:
        """Token ids of a prompt. Raises InputError where it is empty or too long."""
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f"the prompt must be a string that is not empty, found {prompt!r:.80}")
        ids = encode_prompt(
            self.tokenizer,
            prompt,
            chat=options.chat,
            system=options.system,
            schema=told_schema(options),
        )
        check_prompt(ids, self.request.config, self.request.folder)
        return ids

    def writer_for(self, positions: int) -> Writer:
        """The session's writer, made anew where its cache is shorter than this."""
        positions = min(positions, self.model.max_positions)
        if self.writer is None or self.writer.capacity < positions:
            capacity = -(-positions // POSITIONS) * POSITIONS
            self.writer = self.new_writer(min(capacity, self.model.max_positions))
        return self.writer

    def new_writer(self, capacity: int) -> Writer:
        """A writer with a cache of its own."""
        return Writer(self.model, capacity, self.tokenizer.token_bytes, self.decide)

    def slots(self, texts: int, capacity: int) -> int:
        """Number of texts that are written at once: as many as share steps and fit into memory."""
        if not self.model.shares_steps:
            return 1
        request = self.request
        needs = request.needs() | {"positions": capacity}
        memory = estimate(request.config, **needs, fast_on=request.device)
        fitting = free_bytes(request.device) // (memory.cache + memory.workspace)
        return max(1, min(texts, MOST_TOGETHER, fitting))

    def end_stream(self) -> None:
        """End a stream that has not ended."""
        if self.streaming is not None:
            self.streaming.close()
            self.streaming = None

    def _begin(self, prompt: str, options: dict[str, object]) -> tuple[Sample, Pieces]:
        self.end_stream()
        given = self.options(options)
        asked = self.text_options(given)
        ids = self.encode(prompt, given)
        writer = self.writer_for(len(ids) + asked.rules.max_new_tokens)
        sample = self.new_sample(ids, asked)
        self.streaming = self.pieces(writer, sample, (), asked)
        return sample, self.streaming

    def new_sample(self, ids: Sequence[int], asked: TextOptions) -> Sample:
        """A sample that holds only the prompt."""
        return Sample(Text(ids, asked.rules, self.model, self.tokenizer.token_bytes))

    def pieces(
        self,
        writer: Writer,
        sample: Sample,
        answers: Spans,
        asked: TextOptions,
        readers: Sequence[Reader] = (),
    ) -> Pieces:
        """The text of a sample that holds only its prompt, in pieces as they are written."""
        writer.begin(sample.source.tokens, answers, reuse=bool(answers))
        drafting = self.draftings.of(asked.draft, asked.params)
        stream = TextStream(sample.source)
        rounds = writer.rounds(sample, drafting, asked.params, asked.coupling)
        with closing(rounds):
            for round in rounds:
                for read in readers:
                    read(round, sample.seconds)
                if piece := stream.pull():
                    yield piece


class ContextFull(InputError):
    """Error of a conversation that is longer than its context."""


class Conversation:
    """Turns of a user and the model, with a cache that keeps what has been read.

    ``messages`` are ``{"role": ..., "content": ...}``, as for a chat template; ``sample`` is the
    last answer.
    """

    def __init__(self, session: Session, system: str | None, options: dict[str, object]) -> None:
        self.session = session
        self.options = options
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.writer: Writer | None = None
        self.sample: Sample | None = None  # the last answer

    def say(self, text: str, *, readers: Sequence[Reader] = (), **options: object) -> Sample:
        """The model's answer to the user's turn ``text``; ``readers`` see each round of it.

        Raises ContextFull where the conversation is longer than its context: the turn is not kept.
        """
        for _ in self._begin(text, options, readers):
            pass
        return self.sample

    def stream(self, text: str, **options: object) -> Iterator[str]:
        """The model's answer in pieces. Of one that is not read to its end, the part so far is
        kept.
        """
        return self._begin(text, options)

    def forget(self, turns: int = 1) -> None:
        """Forget the oldest turns of the user, with their answers."""
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        end = users[turns] if turns < len(users) else len(self.messages)
        del self.messages[users[0] if users else end : end]

    def _begin(
        self, text: str, options: dict[str, object], readers: Sequence[Reader] = ()
    ) -> Pieces:
        session = self.session
        session.end_stream()
        given = session.options(self.options | options)
        asked = session.text_options(given)
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"a turn must be a string that is not empty, found {text!r:.80}")
        messages = [*self.messages, {"role": "user", "content": text}]
        told = tell_schema(session.tokenizer, messages, told_schema(given))
        ids, answers = conversation(session.tokenizer, told)
        if self.writer is None:
            self.writer = session.new_writer(session.draftings.setting.positions)
        room = self.writer.capacity - len(ids)
        if room < 1:
            limit = f"{len(ids)} tokens, its context {self.writer.capacity}"
            raise ContextFull(f"the conversation has {limit}: forget its oldest turns")
        check_prompt(ids, session.request.config, session.request.folder)
        rules = replace(asked.rules, max_new_tokens=min(asked.rules.max_new_tokens, room))
        asked = asked._replace(rules=rules)
        self.sample = session.new_sample(ids, asked)
        pieces = session.pieces(self.writer, self.sample, answers, asked, readers)
        session.streaming = self._answer(messages, pieces)
        return session.streaming

    def _answer(self, messages: list[dict[str, str]], pieces: Pieces) -> Pieces:
        try:
            yield from pieces
        finally:
            self.messages = [*messages, {"role": "assistant", "content": self.sample.text}]
