"""Law of plain sampling, by recursion over texts: the reference for the law of the loop.

It shares only ``distribution``, ``Conditions`` and constraints with the production loop, and has
no rounds, drafts, caches or rollbacks.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from decoding.proof.table_model import TEXTS, TableModel
from decoding.sampling import SamplingParams, distribution
from decoding.text import Conditions

DEAD_END = "every token forbidden"

Outcome = Hashable  # (tokens, finish), or DEAD_END


@dataclass(frozen=True)
class Request(Conditions):
    """Prompt and sampling parameters of a text, beside its conditions."""

    max_new_tokens: int = 2
    prompt: tuple[int, ...] = (0,)
    params: SamplingParams = SamplingParams(temperature=1.0)


def plain_law(model: TableModel, request: Request) -> dict[Outcome, float]:
    """Return the probability of every outcome of plain sampling under the request's conditions."""
    law: defaultdict[Outcome, float] = defaultdict(float)
    longest = min(request.max_new_tokens, model.max_positions - len(request.prompt))
    prompt_bytes = len(b"".join(TEXTS[token] for token in request.prompt))

    def expand(
        tokens: tuple[int, ...], forbidden: dict[int, frozenset[int]], weight: float
    ) -> None:
        """Add the outcomes of all texts that begin with ``tokens``, which have the probability
        ``weight``. ``forbidden`` has the tokens that bans forbid, by position.
        """
        history = request.prompt + tokens
        allowed = torch.ones(model.vocab_size, dtype=torch.bool)
        for constraint in request.constraints:
            if (mask := constraint(history)) is not None:
                allowed &= mask
        for token in forbidden.get(len(tokens), frozenset()):
            allowed[token] = False
        probs = distribution(
            model.row(history)[None], torch.tensor(history), request.params, allowed[None]
        )[0]
        if not probs.any():
            law[DEAD_END] += weight
            return
        for token, probability in enumerate(probs.tolist()):
            if probability == 0:
                continue
            longer = (*tokens, token)
            begin = _completed(request.prompt + longer, request.banned, floor=0)
            if begin is not None:  # a banned word: back to before the token in which it began
                back = max(_holder(request.prompt + longer, begin) - len(request.prompt), 0)
                kept = {at: banned for at, banned in forbidden.items() if at <= back}
                kept[back] = kept.get(back, frozenset()) | {longer[back]}
                expand(longer[:back], kept, weight * probability)
                continue
            stop = _completed(request.prompt + longer, request.stop_strings, floor=prompt_bytes)
            if token in request.eos_ids:
                law[longer, "eos"] += weight * probability
            elif stop is not None:
                law[longer, "stop"] += weight * probability
            elif len(longer) == longest:
                law[longer, "length"] += weight * probability
            else:
                expand(longer, forbidden, weight * probability)

    expand((), {}, 1.0)
    return dict(law)


def _completed(tokens: Sequence[int], words: Sequence[str], floor: int) -> int | None:
    """Return the offset in bytes of the word that the last token completes first, of several words
    the longest; None where it completes none. Only bytes from ``floor`` on count.
    """
    text = b"".join(TEXTS[token] for token in tokens)
    for end in range(len(text) - len(TEXTS[tokens[-1]]) + 1, len(text) + 1):
        for word in sorted((word.encode() for word in words), key=len, reverse=True):
            if text[floor:end].endswith(word):
                return end - len(word)
    return None


def _holder(tokens: Sequence[int], offset: int) -> int:
    """Return the position of the token that holds the byte at ``offset``."""
    spelled = [position for position, token in enumerate(tokens) for _ in TEXTS[token]]
    return spelled[offset]
