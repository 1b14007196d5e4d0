"""Timing of steps in turns."""

import pytest
import torch

from model import clock
from model.clock import take_turns


def test_patience_begins_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up that compiles takes longer than any patience; repeats count from its end."""
    seconds = [0.0]
    monkeypatch.setattr(clock, "now", lambda device: seconds[0])
    takes = iter([60.0, *[1.0] * 20])

    def step() -> None:
        seconds[0] += next(takes)

    assert take_turns([step], 10, torch.device("cpu"), patience=4) == [[1.0] * 5]
