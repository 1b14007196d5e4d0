"""Law of plain sampling, by recursion over texts: the reference for the law of the loop.

Of the production loop it has only ``distribution``, ``Conditions`` and constraints: no rounds,
drafts, caches or rollbacks.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.proof.enumeration import summed
from decoding.proof.table_model import TEXTS, TableModel
from decoding.sampling import SamplingParams, distribution
from decoding.text import Conditions

DEAD_END = "every token forbidden"


@dataclass(frozen=True)
class Request(Conditions):
    """Prompt and sampling parameters of a text, beside its conditions."""

    max_new_tokens: int = 2
    prompt: tuple[int, ...] = (0,)
    params: SamplingParams = SamplingParams(temperature=1.0)


def plain_law(model: TableModel, request: Request) -> dict[Hashable, float]:
    """Return the probability of every outcome of plain sampling under the request's conditions: of
    ``(tokens, finish)``, and of DEAD_END.
    """
    longest = min(request.max_new_tokens, model.max_positions - len(request.prompt))
    prompt_bytes = len(b"".join(TEXTS[token] for token in request.prompt))

    def expand(
        tokens: tuple[int, ...], forbidden: dict[int, frozenset[int]], weight: float
    ) -> Iterator[tuple[Hashable, float]]:
        """Return the outcomes of all texts that begin with ``tokens``, which have the probability
        ``weight``. ``forbidden`` has the tokens that bans forbid, by position.
        """
        probs = _next_probs(model, request, tokens, forbidden.get(len(tokens), frozenset()))
        if not probs.any():
            yield DEAD_END, weight
        for token in probs.nonzero().flatten().tolist():
            share = weight * probs[token].item()
            longer = (*tokens, token)
            text = request.prompt + longer
            first = _completed(text, request.banned, floor=0)
            if first is not None:  # a banned word: back to before its first token
                back = max(first - len(request.prompt), 0)
                kept = {at: banned for at, banned in forbidden.items() if at <= back}
                kept[back] = kept.get(back, frozenset()) | {longer[back]}
                yield from expand(longer[:back], kept, share)
            elif token in request.eos_ids:
                yield (longer, "eos"), share
            elif _completed(text, request.stop_strings, floor=prompt_bytes) is not None:
                yield (longer, "stop"), share
            elif len(longer) == longest:
                yield (longer, "length"), share
            else:
                yield from expand(longer, forbidden, share)

    return summed(expand((), {}, 1.0))


def _next_probs(
    model: TableModel, request: Request, tokens: tuple[int, ...], forbidden: frozenset[int]
) -> Tensor:
    """Return the probabilities ``[vocab]`` of the token after ``tokens``: all 0 where none is
    allowed.
    """
    history = request.prompt + tokens
    allowed = torch.ones(model.vocab_size, dtype=torch.bool)
    for constraint in request.constraints:
        if (mask := constraint(history)) is not None:
            allowed &= mask
    allowed[list(forbidden)] = False
    return distribution(
        model.row(history)[None], torch.tensor(history), request.params, allowed[None]
    )[0]


def _completed(tokens: Sequence[int], words: Sequence[str], floor: int) -> int | None:
    """Return the number of the token in which a word begins: the word that the last token completes
    first, of several the longest. None where it completes none. Only bytes from ``floor`` on count.
    """
    token_of_byte = [number for number, token in enumerate(tokens) for _ in TEXTS[token]]
    text = b"".join(TEXTS[token] for token in tokens)
    for end in range(len(text) - len(TEXTS[tokens[-1]]) + 1, len(text) + 1):
        for word in sorted((word.encode() for word in words), key=len, reverse=True):
            if text[floor:end].endswith(word):
                return token_of_byte[end - len(word)]
    return None
