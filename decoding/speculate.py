"""The loop: draft, verify, emit, roll back. Everything else in this room serves these lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from decoding.banned import BannedWords
from decoding.drafters import Drafter, raw_probability
from decoding.model_port import Model
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round
from decoding.sampling import Sampler
from decoding.show.details import examine
from decoding.stopping import StopRules
from decoding.text import TokenBytes, Transcript
from decoding.verify import verify
from model.diagnose import explain_nonfinite
from model.errors import InputError


@torch.inference_mode()
def speculate(
    target: Model,
    cache: Any,
    prompt: Sequence[int],
    drafter: Drafter,
    policy: Policy,
    sampler: Sampler,
    stop: StopRules,
    randomness: Randomness,
    *,
    token_bytes: TokenBytes = lambda token: b"",
    banned: BannedWords | None = None,
    details: bool = False,
) -> Iterator[Round]:
    """Write a text token by token with exactly the target's distribution; yields a record of each round.

    Plain decoding is the same loop with an empty draft. ``cache`` must hold the prompt but its last token
    (``target.prefill``) and is left holding it, so calling again draws another sample from one prefill.
    ``details`` asks for the probabilities behind each round, to be looked at; they decide nothing.
    Raises InputError when the constraints allow no token at a position that the text has reached, and when
    the target's logits are not numbers.
    """
    text = Transcript(prompt, token_bytes)
    sampler = replace(sampler, eos_ids=stop.eos_ids)
    cache.truncate(len(prompt) - 1)
    drafter.rollback(len(prompt))
    while True:
        # Invariant: the cache holds every token but the last.
        position = len(text.tokens)
        limit = min(policy.draft_length(), stop.room(text, target.max_positions) - 1)
        context = torch.tensor(text.tokens, device=target.device)  # copied before the draft is queued behind it
        draft = drafter.propose(text.tokens, limit, sampler, policy, randomness)

        context = torch.cat((context, draft.tokens))
        logits = target(context[None, position - 1 :], cache, position - 1)[0]
        target_probs = sampler.distribution(logits, context)
        kept, own = verify(target_probs, draft.probs, draft.tokens, randomness)
        # Judged is the row that the own token came from: those after it belong to no text, those before it accepted.
        # It needs a finite largest logit; others may be -inf.
        broken = ~logits.index_select(0, kept[None]).amax().isfinite()
        report = torch.stack((kept, own, broken))  # what the host reads of a round, at once
        *drafted, accepted, own_token, broken = torch.cat((draft.tokens, report)).tolist()
        if broken:
            raise explain_nonfinite(target, cache, context[: position + accepted])

        finish, retracted, emitted = None, 0, []
        for token in [*drafted[:accepted], own_token]:
            if len(emitted) == accepted and sampler.constraints and not target_probs[accepted].any():
                raise InputError(f"the constraints allow no token at position {len(text.tokens)} of the text")
            text.append(token)
            emitted.append(token)
            retracted = banned.retract(text) if banned else 0
            finish = None if retracted else stop.check(text, target.max_positions)
            if retracted or finish:
                break
        cache.truncate(len(text.tokens) - 1)
        drafter.rollback(len(text.tokens))
        confidence = raw_probability(logits[accepted], own) if policy.reads_target_confidence else None
        seen = examine(draft, accepted, own, target_probs, logits, sampler.params) if details else None
        round = Round(position, drafted, accepted, emitted, retracted, finish, draft.confidence, confidence, seen)
        policy.observe(round)
        yield round
        if finish:
            return
