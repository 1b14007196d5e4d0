"""Speculative sampling, complete, on the letters a, b and c, with a proof that it is exact.

Names follow decoding/speculate.py and decoding/verify.py (``verify`` is ``verify_by_ratio``). The
``Enumerator`` is a simpler one than that of decoding/proof/enumeration.py. There is no cache, and
so no rollback.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

torch.set_default_dtype(torch.float64)
# the target: row x is p, the probabilities of the letter after x
P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]])
# the draft: row x is q after x
Q = torch.tensor([[0.6, 0.2, 0.2], [0.3, 0.3, 0.4], [0.0, 0.5, 0.5]])
GAMMA = 2  # most letters drafted per round
LENGTH = 5  # letters of a text


def propose(text: list[int], limit: int, randomness: Enumerator) -> tuple[list[int], Tensor]:
    """Return the drafted letters, and the distribution q that each was drawn from."""
    drafted = []
    q = torch.zeros(0, len(P))
    while len(drafted) < limit:
        last = [*text, *drafted][-1]
        q = torch.cat((q, Q[[last]]))
        drafted.append(randomness.draw(q[-1]))
    return drafted, q


def verify(p: Tensor, q: Tensor, drafted: list[int], randomness: Enumerator) -> tuple[Tensor, int]:
    """Return the number of accepted letters, an int64 tensor ``[]``, and the letter after them."""
    rows = range(len(drafted))
    # up to the first rejection
    accepted = randomness.accept(p[rows, drafted] / q[rows, drafted]).cumprod(0).sum()
    # p - q per drafted letter; the last row is p itself, for the bonus letter
    residual = (p - torch.cat((q, torch.zeros(1, len(P))))).clamp(min=0)
    return accepted, randomness.draw(residual[accepted])


def speculate(text: list[int], randomness: Enumerator) -> list[int]:
    """Return the text, continued to its full length in rounds of a draft and its verification."""
    while len(text) < LENGTH:
        drafted, q = propose(text, min(GAMMA, LENGTH - len(text) - 1), randomness)
        p = P[[text[-1], *drafted]]  # one pass of the target over the last letter and the draft
        accepted, token = verify(p, q, drafted, randomness)
        text = [*text, *drafted[:accepted], token]
    return text


class Enumerator:
    """A source of random draws that follows a path: a list of outcomes, one per draw.

    After the end of the path it takes the first possible outcome of each draw, and notes the paths
    to the others. ``weight`` is the probability of all its outcomes together.
    """

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.depth = 0
        self.weight = 1.0
        self.other_paths = []

    def choose(self, probabilities: list[float]) -> int:
        """Return the outcome that the path has next, or the first possible one."""
        possible = [outcome for outcome, probability in enumerate(probabilities) if probability > 0]
        if self.depth == len(self.path):
            self.other_paths += [[*self.path, outcome] for outcome in possible[1:]]
            self.path = [*self.path, possible[0]]
        outcome = self.path[self.depth]
        self.depth += 1
        self.weight *= probabilities[outcome]
        return outcome

    def draw(self, probs: Tensor) -> int:
        """Return a letter, from probabilities that need not sum to 1."""
        return self.choose((probs / probs.sum()).tolist())

    def accept(self, probabilities: Tensor) -> Tensor:
        """Return 1 or 0 for each probability."""
        return torch.tensor(
            [self.choose([1 - a, a]) for a in probabilities.clamp(max=1).tolist()],
            dtype=torch.int64,
        )


# The proof: the loop runs once for every path. Its texts must have the probabilities that plain
# sampling gives them, which are products of entries of P.
speculative = dict.fromkeys(product([0], *[range(len(P))] * (LENGTH - 1)), 0.0)
paths = [[]]
for path in paths:  # the list grows while it is read
    randomness = Enumerator(path)
    speculative[tuple(speculate([0], randomness))] += randomness.weight
    paths += randomness.other_paths
plain = {text: P[text[:-1], text[1:]].prod().item() for text in speculative}
distance = sum(abs(speculative[text] - plain[text]) for text in plain) / 2
print(f"{len(plain)} texts, {len(paths)} paths: total variation from plain sampling {distance:.1e}")
