"""The speculative loop: draft, verify, extend the text, roll back.

Knows nothing of files, options, tokenizers and clocks.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.drafters import Draft, Drafter
from decoding.model_port import Cache, Model
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams, distribution
from decoding.text import DeadEnd, Text
from decoding.verify import Verify
from model.errors import InputError

NON_FINITE = (
    "the model's numbers stop being finite (NaN or infinity): the checkpoint is damaged, or its"
    " numbers are too large for its dtype: fetch it again, or take bfloat16 or float32"
)

# A callback that records each round's logits of the target, [k + 1, vocab]; called after the round.
Observer = Callable[[Tensor], None]


@torch.inference_mode()
def speculate(
    target: Model,
    cache: Cache,
    text: Text,
    drafter: Drafter,
    policy: Policy,
    params: SamplingParams,
    randomness: Randomness,
    verify: Verify,
    *,
    observer: Observer | None = None,
) -> Iterator[Round]:
    """Decode ``text`` speculatively to its end, with exactly the target's distribution; yield a
    record per round.

    Plain decoding is the same loop with an empty draft. ``cache`` must hold all tokens of the text
    but the last (``target.prefill``). Rolled back to the prompt, it can be used for another sample.
    ``verify`` is the rule that goes with the randomness (``decoding.verify.RULES``). Raises
    InputError where no token can follow the text, because the constraints allow none or the
    target's logits are non-finite. A round in which this happens after accepted tokens keeps them:
    the next one raises the error. A drafter is trusted to keep its contract: ``CheckedDrafter``
    does not trust one.
    """
    cache.truncate(len(text) - 1)
    drafter.rollback(len(text))
    while text.finish is None:
        # The cache holds every token of the text but the last. These steps are outlined in
        # docs/how_it_works.md, "The loop".
        # 1. Draft up to γ tokens, each with the distribution that it was drawn from.
        position = len(text)
        context = text.tensor()  # copied now: after the draft, a copy would wait for its kernels
        limit = max(0, min(policy.draft_length(), text.remaining - 1))
        draft = drafter.propose(text, limit, params, policy, randomness)
        # 2. Verify the last token and the draft in one pass: distributions after each of them.
        context = torch.cat((context, draft.tokens))
        logits = target(context[None, position - 1 :], cache, position - 1)[0]
        probs = distribution(logits, context, params, text.allowed(draft.tokens))
        # 3. Accept a prefix of the draft. 4. Draw the residual or bonus token after it.
        accepted, token = verify(probs, draft.probs, draft.tokens, randomness, text.place())
        verdict = read_verdict(text, draft, accepted, token, logits, probs, policy)  # on the host
        emitted, retracted = text.extend(verdict.kept)
        # 5. Roll back to the text.
        cache.truncate(len(text) - 1)
        drafter.rollback(len(text))
        round = Round(
            position=position,
            drafted=verdict.drafted,
            accepted=verdict.accepted,
            emitted=emitted,
            retracted=retracted,
            finish=text.finish,
            target_confidence=verdict.confidence,
        )
        policy.observe(round)
        if observer:
            observer(logits)
        yield round


class Verdict(NamedTuple):
    """Result of a verification, on the host.

    ``drafted`` are the draft's tokens, and ``accepted`` is the number of accepted ones. ``kept``
    are these and the token after them, if any can follow. ``confidence`` is the target's in that
    token: its raw softmax probability, None unless the policy reads it.
    """

    drafted: list[int]
    accepted: int
    kept: list[int]
    confidence: float | None


def read_verdict(
    text: Text,
    draft: Draft,
    accepted: Tensor,
    token: Tensor,
    logits: Tensor,
    probs: Tensor,
    policy: Policy,
) -> Verdict:
    """Return the result of a verification, copied from the device in one synchronisation.

    No token can follow a row of zeros: the constraints allow none there, or the largest logit is
    NaN or infinite. The accepted tokens before it are kept; where there are none, this raises the
    InputError that says why. Such a row is looked for only if the token drawn has probability 0,
    since looking synchronises again.
    """
    p = probs.take(accepted * probs.shape[1] + token)
    # One tensor, so one copy: at least float32, in which ids below 2²⁴ are exact.
    facts = [draft.tokens, accepted[None], token[None], p[None]]
    if policy.reads_target_confidence:
        row = logits.index_select(0, accepted[None])[0]
        facts.append(torch.softmax(row.float(), dim=-1).take(token[None]))
    read = torch.cat(facts).tolist()
    ids = len(draft.tokens) + 2
    *drafted, count, next_token = map(int, read[:ids])
    probability, *confidence = read[ids:]
    kept = drafted[:count]
    if probability or probs[count].any():  # a wrong rule may draw a token of probability 0
        kept.append(next_token)
    elif not kept:
        if not logits[0].amax().isfinite():
            raise InputError(NON_FINITE)
        raise DeadEnd(
            f"the constraints allow no token at position {len(text)} of the text: loosen the"
            " constraints or the banned words"
        )
    return Verdict(drafted, count, kept, confidence[0] if confidence else None)
