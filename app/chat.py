"""Conversations: ``Chat``, whose turns share a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from app.prompt import checked_text
from app.sample import Sample, Slot, pieces
from decoding.rounds import Round
from model.errors import InputError

if TYPE_CHECKING:
    from app.session import Session


class Chat:
    """Turns of a user and the model, with a cache of their own.

    ``messages`` are ``{"role": ..., "content": ...}``, as for a chat template; ``sample`` is the
    last answer, ``options`` stand in place of the session's.
    """

    def __init__(self, session: Session, options: dict[str, object]) -> None:
        self.session = session
        self.options = options
        system = session.options.merged(options).system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.slot: Slot | None = None
        self.sample: Sample | None = None

    def say(self, text: str, **options: object) -> Sample:
        """Return the model's answer to the user's turn ``text``.

        Raises InputError where the conversation is longer than its context: the turn is not kept.
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
        if "system" in options:
            raise InputError("system is an option of chat, not of a turn", "system")
        session = self.session
        merged = session.options.merged(self.options).merged(options)
        messages = [*self.messages, {"role": "user", "content": checked_text(text)}]
        self.slot = self.slot or session.new_slot(session.capacity())
        self.sample = session.begin(
            session.encode(messages, merged), merged, context=self.slot.cache.capacity
        )
        self.sample.continues = True
        return self._answer(messages, self.sample)

    def _answer(self, messages: list[dict[str, str]], sample: Sample) -> Iterator[Round]:
        if self.messages != messages[:-1]:
            raise InputError(
                "the conversation went on and cut this stream off: read a stream to its end"
            )
        # Nothing is kept of a turn that could not be answered.
        for round in self.session.rounds(sample, self.slot):
            self.messages = [*messages, {"role": "assistant", "content": sample.text}]
            yield round

    def forget(self) -> None:
        """Forget the oldest turn of the user, if any, with its answer. It ends a stream."""
        if self.slot:
            self.slot.source = None
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        begin, end = [*users, len(self.messages), len(self.messages)][:2]
        del self.messages[begin:end]
