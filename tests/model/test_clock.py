"""Timing of steps in turns."""

import pytest
import torch

from model import clock
from model.clock import take_turns


def test_steps_are_timed_in_turns_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up, which may compile, is not timed."""
    seconds = [0.0]
    monkeypatch.setattr(clock, "now", lambda device: seconds[0])
    takes = iter([60.0, 70.0, 1.0, 2.0, 3.0, 4.0])

    def step() -> None:
        seconds[0] += next(takes)

    assert take_turns([step, step], 2, torch.device("cpu")) == [[1.0, 3.0], [2.0, 4.0]]
