"""Tables that stand for the models of foreign code, and plain sampling from the target's.

Of the four tokens, token 0 never occurs: some libraries refuse it or pad with it.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TOKENS = int(os.environ.get("TOKENS", 3))  # of a text
TEMPERATURE = float(os.environ.get("TEMPERATURE", 1))
PROMPT = [1, 2]
ROWS = torch.rand(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
ROWS[:, :, 0] = 0
TARGET, DRAFT = ROWS / ROWS.sum(-1, keepdim=True)


def take_out(tops: set[str]) -> dict[str, ModuleType]:
    """The imported modules and packages of these names, which are forgotten."""
    names = [name for name in sys.modules if name.split(".")[0] in tops]
    return {name: sys.modules.pop(name) for name in names}


def foreign(path_variable: str, module: str, under: str = "") -> ModuleType:
    """Module of a clone whose folder an environment variable names, or in a folder ``under`` it.
    Its modules do not replace others of the same names.
    """
    folder = os.path.join(os.environ[path_variable], under)
    tops = {name.removesuffix(".py") for name in os.listdir(folder)}
    ours = take_out(tops)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.pop(0)
        take_out(tops)
        sys.modules.update(ours)


class Bigrams:
    """Model as ``transformers`` has them: logits by the last token, and a cache of lengths only."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=4, max_position_embeddings=64)

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, input_ids: Tensor, past_key_values: Any = None, **unused: Any) -> Any:
        length = input_ids.shape[1] + (past_key_values[0][0].shape[2] if past_key_values else 0)
        entries = torch.zeros(1, 1, length, 1)
        return SimpleNamespace(
            logits=self.table.log()[input_ids], past_key_values=[(entries, entries)]
        )

    @contextmanager
    def self_draft(self) -> Iterator[None]:
        """Within, the table of the draft."""
        self.table = DRAFT
        yield
        self.table = TARGET


def unfiltered(logits: Tensor, **thresholds: Any) -> Tensor:
    """Logits as they are, for a filter that is off."""
    return logits


def plain() -> tuple[int, ...]:
    """A text drawn token by token, at TEMPERATURE."""
    text = [*PROMPT]
    for _ in range(TOKENS):
        text.append(torch.multinomial(TARGET[text[-1]] ** (1 / TEMPERATURE), 1).item())
    return tuple(text[len(PROMPT) :])
