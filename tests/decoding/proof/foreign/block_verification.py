"""Block verification as a reader of its paper might write it (arXiv 2403.10444, algorithm 2), for
the judge: right, or with the mistake that MISTAKE in the environment names.

Rounds draft GAMMA tokens by a table. It shares no code with this project's own rule.
"""

import os

import torch

from tests.decoding.proof.foreign import bigrams
from tests.decoding.proof.foreign.bigrams import DRAFT, PROMPT, TARGET

GAMMA = int(os.environ.get("GAMMA", 2))


def write(mistake: str = os.environ.get("MISTAKE", "none")) -> tuple[int, ...]:
    """A text of rounds, cut to its length."""
    text = [*PROMPT]
    while len(text) < len(PROMPT) + bigrams.TOKENS:
        text += block(text[-1], mistake)
    return tuple(text[len(PROMPT) :][: bigrams.TOKENS])


def block(last: int, mistake: str) -> list[int]:
    """Tokens of a round: the accepted ones of the draft X, and Y after them."""
    x = [last]
    for _ in range(GAMMA):
        drawn_from = DRAFT[x[-1]]
        if mistake == "raw q":  # top-k 2, which the q below does not know of
            drawn_from = drawn_from.where(drawn_from >= drawn_from.topk(2).values[-1], 0)
        x.append(torch.multinomial(drawn_from, 1).item())
    p = [1.0]
    tau = 0
    for i in range(1, GAMMA + 1):
        p.append(min(p[-1] * TARGET[x[i - 1], x[i]].item() / DRAFT[x[i - 1], x[i]].item(), 1.0))
        above = (p[i] * TARGET[x[i]] - DRAFT[x[i]]).clamp(min=0).sum()
        h = above / (above + 1 - p[i]) if i < GAMMA else p[i]
        if torch.rand(1) <= h:
            tau = i
        elif mistake == "first failure":
            break
    weights = TARGET[x[tau]]
    if tau < GAMMA:
        reach = 1 if mistake == "ratio residual" else p[tau]
        weights = (reach * TARGET[x[tau]] - DRAFT[x[tau]]).clamp(min=0)
    elif mistake == "bonus residual":
        weights = (TARGET[x[tau]] - DRAFT[x[tau - 1]]).clamp(min=0)
    return [*x[1 : tau + 1], torch.multinomial(weights, 1).item()]
