"""Session: a loaded model that writes texts, one after another or several at once; and ``Chat``, a
conversation with it.

Everything that writes uses it: the command line, Python, the server, the benchmark and the search.
Knows nothing of screens, sockets and argument lists. Prints only notes, on standard error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from threading import RLock

from app.common.command_line import say
from app.common.parsers import MODEL
from app.drafts import strategy_of
from app.loaded import LoadedModel
from app.options import Options, names_of
from app.prompt import (
    Prompt,
    check_ids,
    checked_text,
    encode_prompt,
    read_grammar,
    with_contents,
)
from app.sample import Sample, Slot, pieces
from decoding.model_port import Model
from decoding.rounds import Round
from decoding.speculate import Observer, speculate
from decoding.text import Conditions, DeadEnd, Text
from model.device import now
from model.errors import InputError
from weights.memory import free_bytes

POSITIONS = 1024  # a cache is made for a multiple of these
MOST_TOGETHER = 16  # texts that share steps
THINK = b"<think>"  # the end of a prompt whose template opens a thinking part


class Session(LoadedModel):
    """A model that writes by ``write``, ``stream``, ``write_all`` and ``chat``. Options of a call
    stand in place of those that the session was made with.

    ``write`` is ``begin``, which makes the text, and ``finish``, which goes through its ``rounds``:
    these read the prompt, choose the draft and run the loop.

    One call is answered at a time: another thread's waits for it. A call that writes on the
    session's own cache ends a stream that has not ended, which then raises InputError: not so a
    conversation, nor ``write_all`` where texts share steps. ``sample`` is the last text that
    ``write`` or ``stream`` began.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.options = self.merged()
        self.mask_seconds = math.inf  # longest that all masks of a text's grammar may take
        self.slot: Slot | None = None
        self.sample: Sample | None = None
        self.lock = RLock()
        self.written = 0  # tokens so far
        self.copies_at_once = False  # whether copies for drafts are made however little is written

    def write(self, prompt: Prompt, **options: object) -> Sample:
        """Return the text after a prompt. Raises InputError."""
        return self.finish(self._begun(prompt, options))

    def stream(self, prompt: Prompt, **options: object) -> Iterator[str]:
        """Return the text after a prompt, in pieces as they are written. Raises InputError."""
        sample = self._begun(prompt, options)
        return pieces(sample, self.rounds(sample))

    def _begun(self, prompt: Prompt, options: dict[str, object]) -> Sample:
        """Return the text of a call, and keep it as ``sample``."""
        merged = self.merged(options)
        self.sample = sample = self.begin(self.encode(prompt, merged), merged)
        return sample

    def merged(self, *changes: Mapping[str, object]) -> Options:
        """Return the session's options with these changes, one after another, and with the contents
        of files in place of their names. Raises InputError.
        """
        return with_contents(reduce(Options.merged, changes, self.options), self.read_plan)

    def write_all(self, prompts: Sequence[Prompt], **options: object) -> list[Sample]:
        """Return a text after each prompt, written in shared steps where the device has them.

        Greedy texts are those of ``write``. Sampled ones have random numbers of their own, by the
        seed and their place in the list. Raises InputError.
        """
        if not isinstance(prompts, list | tuple):
            raise InputError(f"prompts must be a list, found {prompts!r:.80}")
        merged = self.merged(options).seeded()
        samples = [
            self.begin(self.encode(prompt, merged), merged, number)
            for number, prompt in enumerate(prompts)
        ]
        self.finish_all(samples)
        return samples

    def chat(self, **options: object) -> Chat:
        """Return a new conversation, with a cache of its own."""
        return Chat(self, options)

    def encode(self, prompt: Prompt, options: Options | None = None) -> list[int]:
        """Return the token ids of a prompt. Raises InputError for what is none."""
        options = options or self.options
        ids = encode_prompt(self.tokenizer, prompt, options)
        end = self.labels.spelled(ids[-2 * len(THINK) :]).rstrip()
        if (options.stop or options.grammars) and end.endswith(THINK):
            say(
                "the chat template opens a thinking part: grammar and stop strings begin in it, not"
                " after it (see --chat-template-kwargs)"
            )
        return ids

    def begin(
        self,
        ids: Sequence[int],
        options: Options | None = None,
        number: int = 0,
        context: int | None = None,
        continues: bool = False,
    ) -> Sample:
        """Return a text that holds its prompt only, and ends with the ``context``, by default the
        session's; ``number`` is that of several samples, which have random numbers of their own.

        ``options`` come from ``merged``, or from those of the session. ``continues``: see
        ``Sample``. Raises InputError for ids that the model does not have, and for too many.
        """
        context = context or self.context
        check_ids(ids, self.config, context)
        options = (options or self.options).seeded()
        grammar = None
        if found := read_grammar(options):
            from decoding.grammar import Grammar

            grammar = Grammar(*found, self.vocabulary, self.mask_seconds)(len(ids))
        conditions = Conditions(
            min(options.max_new_tokens, context - len(ids)),
            self.tokenizer.eos_ids,
            options.stop,
            options.ban,
            [grammar] if grammar else [],
        )
        text = Text(ids, conditions, self.model, self.tokenizer.token_bytes)
        return Sample(
            text, options, replace(options.rule, sample=number), grammar, continues=continues
        )

    def rounds(
        self,
        sample: Sample,
        slot: Slot | None = None,
        target: Model | None = None,
        observer: Observer | None = None,
    ) -> Iterator[Round]:
        """Read the prompt of a text, prepare its draft, and write it to its end; yields the rounds.

        ``target`` is the model as the loop calls it, which differs from the session's where several
        texts share steps. Raises InputError.
        """
        text = sample.source
        # ``_finish_together`` may have read the prompt, and timed it: its seconds are counted too.
        called = now(self.device) - sample.prompt_seconds
        with self.lock:
            slot = slot or self.slot_for(text.longest)
            target = target or self.model
            slot.source = text
            asked = now(self.device)  # making a cache is not counted
            slot.read(sample, target)
            sample.prompt_seconds += now(self.device) - asked
            strategy = strategy_of(self, sample, slot, target)
            sample.draft = strategy.name
            sample.is_plain = strategy.policy.gamma == 0
        sample.wait = now(self.device) - called
        rounds = speculate(
            target,
            slot.cache,
            text,
            strategy.drafter,
            strategy.policy,
            sample.options.params,
            sample.rule.randomness(self.device),
            sample.rule.verify,
            observer=observer,
        )
        # The clock runs only within a round: between two, the reader of a stream may take long, or
        # call the session.
        while text.finish is None:
            began = now(self.device)
            round = self._next(rounds, sample, slot)
            sample.add(round, now(self.device) - began)
            sample.trouble = self.model.trouble  # a step may have fallen back
            self.written += len(round.emitted)
            yield round

    def _next(self, rounds: Iterator[Round], sample: Sample, slot: Slot) -> Round:
        """Return the next round. Raises InputError where the slot has another text by now, and
        where no token can follow: then with the grammar's reason.
        """
        with self.lock:
            if slot.source is not sample.source:
                raise InputError(
                    "a later call cut this stream off: read a stream to its end first, or make the"
                    " other call in a conversation of its own or with the model loaded again"
                )
            try:
                round = next(rounds)
            except DeadEnd as error:
                reason = sample.grammar and sample.grammar.trouble_after(sample.source.tokens)
                raise DeadEnd(reason or str(error)) from None
            slot.tokens = sample.source.tokens[:-1]
            return round

    def finish(self, sample: Sample) -> Sample:
        """Write a text to its end, and return it."""
        self.finish_all([sample])
        return sample

    def finish_all(self, samples: Sequence[Sample]) -> None:
        """Write texts to their ends, together where they share steps."""
        positions = max((sample.source.longest for sample in samples), default=1)
        with self.lock:
            count = self.slots_for(len(samples), positions)
            if count > 1:
                self._finish_together(samples, [self.new_slot(positions) for _ in range(count)])
                return
            for sample in samples:
                for _ in self.rounds(sample):
                    pass

    def _finish_together(self, samples: Sequence[Sample], slots: Sequence[Slot]) -> None:
        """Write texts to their ends, as many at a time as there are slots.

        A prompt that all share is read once. The first error is raised when all texts have ended.
        """
        from decoding.together import Together

        first, *others = slots
        if all(sample.source.tokens == samples[0].source.tokens for sample in samples):
            began = now(self.device)
            first.read(samples[0], self.model)
            for slot in others:
                slot.copy_from(first)
            for sample in samples[: len(slots)]:
                sample.prompt_seconds = now(self.device) - began
        together = Together(self.model)
        waiting = iter(samples)
        errors: list[InputError] = []

        def write_waiting(slot: Slot) -> None:
            for sample in waiting:  # the next that no other slot has taken
                try:
                    for _ in self.rounds(sample, slot, together):
                        pass
                except InputError as error:
                    errors.append(error)

        try:
            for slot in slots:
                together.start(partial(write_waiting, slot))
            while together.calls:
                together.step()
        finally:
            for loop in [*together.calls]:
                together.stop(loop)
        if errors:
            raise errors[0]

    def slots_for(self, texts: int, positions: int) -> int:
        """Return how many texts are written at once: as many as share steps and fit into memory."""
        if texts < 2 or not self.model.abilities.shares_steps:
            return 1
        memory = self.memory(positions)
        fitting = free_bytes(self.device) // (memory.cache + memory.workspace)
        return max(1, min(texts, MOST_TOGETHER, fitting))

    def new_slot(self, capacity: int) -> Slot:
        """Return an empty cache of this many positions."""
        cache = self.model.new_cache(capacity)
        self.model.make_step(cache)
        return Slot(cache)

    def slot_for(self, positions: int) -> Slot:
        """Return the session's own cache, made anew where it is too small."""
        if self.slot is None or self.slot.cache.capacity < positions:
            if self.slot:
                self.slot.source = None  # ends its stream
                self.slot = None  # frees the old cache before the new one is made
            rounded_up = -(-positions // POSITIONS) * POSITIONS
            self.slot = self.new_slot(min(rounded_up, self.model.max_positions))
        return self.slot

    def warm_up(self, ids: Sequence[int]) -> None:
        """Write a few tokens, with the draft and without, before anything is timed, after as much
        of the prompt as the context holds. Copies for drafts are made.
        """
        self.copies_at_once = True
        few = {"max_new_tokens": min(8, self.options.max_new_tokens)}
        for changes in (few, few | {"draft": "none"}):
            self.finish(self.begin(ids[: self.context - 1], self.options.merged(changes)))


class Chat:
    """Turns of a user and the model, with a cache of their own.

    ``messages`` are ``{"role": ..., "content": ...}``, as for a chat template; ``sample`` is the
    last answer, ``options`` stand in place of the session's.
    """

    def __init__(self, session: Session, options: dict[str, object]) -> None:
        """Begin with no turns. Raises InputError for wrong options."""
        self.session = session
        merged = session.merged(options)
        self.options = {name: getattr(merged, name) for name in options}
        self.messages = (
            [] if merged.system is None else [{"role": "system", "content": merged.system}]
        )
        self.slot: Slot | None = None
        self.sample: Sample | None = None

    def say(self, text: str, **options: object) -> Sample:
        """Return the model's answer to the user's turn ``text``.

        Raises InputError where the conversation is longer than its context: the turn is not kept.
        """
        with self.session.lock:
            sample, rounds = self.begin(text, **options)
            for _ in rounds:
                pass
            return sample

    def stream(self, text: str, **options: object) -> Iterator[str]:
        """Return the model's answer in pieces; of one that is not read to its end, those so far
        stay.
        """
        return pieces(*self.begin(text, **options))

    def begin(self, text: str, **options: object) -> tuple[Sample, Iterator[Round]]:
        """Return the model's answer and the rounds in which it is written. It is ``sample`` from
        the first round on.
        """
        if "system" in options:
            raise InputError("system is an option of chat, not of a turn", "system")
        session = self.session
        merged = session.merged(self.options, options)
        messages = [*self.messages, {"role": "user", "content": checked_text(text)}]
        self.slot = self.slot or session.new_slot(session.capacity())
        sample = session.begin(
            session.encode(messages, merged),
            merged,
            context=self.slot.cache.capacity,
            continues=True,
        )
        return sample, self._answer(messages, sample)

    def _answer(self, messages: list[dict[str, str]], sample: Sample) -> Iterator[Round]:
        if self.messages != messages[:-1]:
            raise InputError(
                "the conversation went on and cut this stream off: read a stream to its end"
            )
        # Nothing is kept of a turn that could not be answered.
        for round in self.session.rounds(sample, self.slot):
            self.sample = sample
            self.messages = [*messages, {"role": "assistant", "content": sample.text}]
            yield round

    def forget(self) -> None:
        """Forget the oldest turn of the user, if any, with its answer. It ends a stream."""
        if self.slot:
            self.slot.source = None
        begin = len(self.messages) % 2  # turns are pairs, after a system message, if any
        del self.messages[begin : begin + 2]


def load(model: str = MODEL["default"], **options: object) -> Session:
    """Return a loaded model, with the options of the command line: see ``Session``."""
    of_model = {name: options.pop(name) for name in names_of("model") if name in options}
    session = Session(Options(model=model, **of_model).merged(options))
    session.check_memory()
    _ = session.model  # loads it
    return session
