"""The writer's clock: the seconds of a text are those of its decoding alone."""

import pytest

from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from tests.laws import tiny_model


def test_readers_and_the_observer_take_no_time_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = Writer(tiny_model("llama"), 20)
    writer.begin([1, 2])
    seconds = 0.0
    monkeypatch.setattr(writer, "clock", lambda: seconds)

    def take_time(*_: object) -> None:
        nonlocal seconds
        seconds += 1

    sample = writer.write(
        writer.new_text(Rules(6)),
        writer.plain,
        SamplingParams(),
        Coupling("race", 0),
        readers=[take_time],
        observer=take_time,
    )
    assert (len(sample.rounds), seconds, sample.seconds) == (6, 12.0, 0.0)
