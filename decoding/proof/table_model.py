"""Table of probabilities as a model, small enough to compute its law exactly."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.proof.enumeration import ProofError
from model.cache import KVCache
from model.errors import InputError
from model.plan import FULL, LayerPlan
from model.steps import Abilities, Steps

# the bytes of its tokens; 2 has those of 0 and 1 together
TEXTS = (b"a", b"b", b"ab", b"c", b"", b"d")
DRAFT_PLAN = LayerPlan((FULL, 0), (FULL, FULL))


class TableModel(Steps):
    """Language model that is a table: one row of probabilities after each whole history.

    It writes token ids where a real model writes keys, into a real KVCache of two layers, and reads
    its history from there. A hash of the history is the number of the row. Histories that differ in
    one token have different rows, if there are no fewer rows than tokens. A wrong position, a hole
    or a token fed twice gives another row after most histories, or an error of the cache. An entry
    of the draft's where one of the target's must stand raises ProofError.
    """

    max_positions = 64
    device = torch.device("cpu")
    abilities = Abilities(why_rows_vary=None)

    def __init__(self, target: Tensor, draft: Tensor | None = None) -> None:
        """Tables ``[states, vocab]`` float64 of at most 6 tokens, ``draft`` under DRAFT_PLAN."""
        if target.shape[1] > len(TEXTS):
            raise InputError(f"a table has at most {len(TEXTS)} tokens, found {target.shape[1]}")
        self.tables = {None: target.log(), DRAFT_PLAN: (target if draft is None else draft).log()}
        self.states, self.vocab_size = target.shape
        # With a common factor the hash would forget early tokens, and an error among them.
        self.multiplier = next(
            odd for odd in range(3, 2 * self.states + 2, 2) if math.gcd(odd, self.states) == 1
        )

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(2, (1, 1, capacity, 1), torch.float64, self.device)

    def row(self, history: Sequence[int], plan: LayerPlan | None = None) -> Tensor:
        """Return the logits ``[vocab]`` after a history, whose hash is the number of the row."""
        state = 0
        for token in history:
            state = (self.multiplier * state + token + 1) % self.states
        return self.tables[plan][state]

    def __call__(
        self, tokens: Tensor, cache: KVCache, start: int, plan: LayerPlan | None = None
    ) -> Tensor:
        """Return the logits ``[1, T, vocab]`` after each of the ``tokens`` ``[1, T]``, as a decoder
        does.
        """
        # Keys are ids. The draft's have a half added, so that the target's entries differ from
        # them.
        entries = tokens[:, None, :, None].double() + (0.0 if plan is None else 0.5)
        for layer in range(2):
            if plan is None or plan.attention[layer]:
                history, _ = cache.write(layer, start, entries, entries)
        ids = history.flatten().tolist()
        of_target = ids if plan is None else ids[: cache.lengths[1]]
        if not all(entry == int(entry) for entry in of_target):
            raise ProofError("an entry of the draft's stands where one of the target's must")
        rows = [
            self.row([int(entry) for entry in ids[: start + 1 + t]], plan)
            for t in range(tokens.shape[1])
        ]
        return torch.stack(rows)[None]

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        if tokens.shape[1]:
            self(tokens, cache, start)
