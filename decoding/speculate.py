"""The loop: draft, verify, extend the text, roll back. Everything else in this room serves these lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoding.drafters import Draft, Drafter
from decoding.model_port import Model
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams, distribution
from decoding.text import Text
from decoding.verify import Verify, verify_by_ratio
from model.diagnose import explain_nonfinite

# Is shown each round's draft, the target's logits and probabilities [k + 1, vocab], how many tokens were accepted, and
# the token after them. It decides nothing.
Observer = Callable[[Draft, Tensor, Tensor, int, Tensor], None]


@torch.inference_mode()
def speculate(
    target: Model,
    cache: Any,
    text: Text,
    drafter: Drafter,
    policy: Policy,
    params: SamplingParams,
    randomness: Randomness,
    verify: Verify = verify_by_ratio,
    *,
    observer: Observer | None = None,
) -> Iterator[Round]:
    """Extend ``text`` to its end with exactly the target's distribution; yields a record of each round.

    Plain decoding is the same loop with an empty draft. ``cache`` must hold the text but its last token
    (``target.prefill``); rolled back to the prompt it serves for another sample. Raises InputError when the constraints
    allow no token at a position that the text has reached, and when the target's logits are not numbers. ``verify`` is
    the rule that goes with the randomness (``decoding.verify.COUPLINGS``).
    """
    cache.truncate(len(text) - 1)
    drafter.rollback(len(text))
    while text.finish is None:
        # Invariant: the cache holds every token of the text but the last.
        position = len(text)
        context = text.tensor(target.device)  # copied before the draft is queued behind it
        draft = drafter.propose(text, min(policy.draft_length(), text.room - 1), params, policy, randomness)
        context = torch.cat((context, draft.tokens))
        logits = target(context[None, position - 1 :], cache, position - 1)[0]
        probs = distribution(logits, context, params, text.allowed(draft.tokens))
        kept, token = verify(probs, draft.probs, draft.tokens, randomness, text.place())
        verdict = read_verdict(draft, kept, token, logits, probs, policy)
        if verdict.broken:
            raise explain_nonfinite(target, cache, context[: position + verdict.accepted])
        extension = text.extend(verdict.tokens)
        cache.truncate(len(text) - 1)
        drafter.rollback(len(text))
        round = Round(position, verdict.drafted, verdict.accepted, *extension, draft.confidence, verdict.confidence)
        policy.observe(round)
        if observer:
            observer(draft, logits, probs, verdict.accepted, token)
        yield round


class Verdict(NamedTuple):
    """What the host knows of a verification.

    ``token``: the one after the accepted ones, None where the constraints allow none; ``broken``: the logits that it
    should come from are not numbers; ``confidence``: its raw softmax probability, if the policy reads it.
    """

    drafted: list[int]
    accepted: int
    token: int | None
    broken: bool
    confidence: float | None

    @property
    def tokens(self) -> list[int | None]:
        """What the text is to be extended by."""
        return [*self.drafted[: self.accepted], self.token]


def read_verdict(
    draft: Draft, accepted: Tensor, token: Tensor, logits: Tensor, probs: Tensor, policy: Policy
) -> Verdict:
    """Copy what the host needs to know: one synchronisation a round, unless no token is allowed.

    A token of probability 0 is only drawn from a row of zeros: where nothing is allowed, or where the logits are not
    numbers. Judged is the row that the token came from: those after it belong to no text, those before it are accepted.
    """
    p = probs.take(accepted[None] * probs.shape[1] + token)
    facts = [draft.tokens, accepted[None], token[None], p]  # together float32 at least, which holds ids below 2²⁴
    if policy.reads_target_confidence:
        row = logits.index_select(0, accepted[None])[0]
        facts.append(torch.softmax(row.float(), dim=-1).index_select(0, token[None]))
    read = torch.cat(facts).tolist()
    *drafted, count, number = map(int, read[: len(draft.tokens) + 2])
    chance, *confidence = read[len(draft.tokens) + 2 :]
    return Verdict(
        drafted,
        count,
        number if chance else None,
        broken=not chance and not logits[count].amax().isfinite(),
        confidence=confidence[0] if confidence else None,
    )
