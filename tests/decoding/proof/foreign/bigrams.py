"""Tables that stand for the models of foreign code, and plain sampling from the target's.

Of the four tokens, token 0 never occurs: some libraries refuse it or pad with it.
"""

import os

import torch

TOKENS = int(os.environ.get("TOKENS", 3))  # of a text
TEMPERATURE = float(os.environ.get("TEMPERATURE", 1))
PROMPT = [1, 2]
ROWS = torch.rand(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
ROWS[:, :, 0] = 0
TARGET, DRAFT = ROWS / ROWS.sum(-1, keepdim=True)


def plain() -> tuple[int, ...]:
    """A text drawn token by token, at TEMPERATURE."""
    text = [*PROMPT]
    for _ in range(TOKENS):
        text.append(torch.multinomial(TARGET[text[-1]] ** (1 / TEMPERATURE), 1).item())
    return tuple(text[len(PROMPT) :])
