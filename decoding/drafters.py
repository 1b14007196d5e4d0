"""Drafters: small objects that propose tokens for the target to verify.

Two verbs. ``propose`` gives up to ``limit`` tokens after the text, together with the distributions they were really
drawn from (one-hot for a drafter that does not draw). ``rollback`` says that the text is now ``length`` tokens long:
whatever the drafter knows of later positions is void (0: another text begins). It need not be told what was accepted;
the next ``propose`` carries the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.model_port import Model
from decoding.policies import Offer, Policy
from decoding.randomness import Randomness
from decoding.sampling import SamplingParams, distribution
from decoding.text import Text
from model.plan import LayerPlan

CATCH_UP = 16  # tokens a draft model may lag behind and still catch up within its first draft step


@dataclass(frozen=True)
class Draft:
    """Drafted tokens ``[k]`` int64, the distributions they were drawn from ``[k, vocab]``, and, if the policy reads
    it, the raw softmax probability of each. ``logits`` are those behind the distributions, ``[1, vocab]`` each, where
    a model drafted: to be looked at, they decide nothing."""

    tokens: Tensor
    probs: Tensor
    confidence: list[float] | None = None
    logits: Sequence[Tensor] = ()


class Drafter(Protocol):
    """See the module's docstring. ``propose`` may draw only through ``randomness``."""

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft: ...

    def rollback(self, length: int) -> None: ...


class ModelDrafter:
    """Draft with a model: the target itself under a layer plan, or a smaller model of the same vocabulary.

    Self-speculation shares the target's cache: a draft step reads the target's entries and writes its own
    at new positions, which verification overwrites. A model of its own has a cache of its own, which
    catches up with the text at the first step of a draft, so an all-accepted round leaves no hole in it.

    LayerSkip (arXiv 2404.16710, section 4.3.2) also spares verification the first E of L layers for tokens
    that an early exit has drafted. Not so here: the last drafted token must pass those layers anyway, and
    reading their weights is what they cost. What is left to spare is (v - 1)·E/L of a plain step, v being
    the verification of γ + 1 tokens: with v = 1.07, γ = 4, E/L = 1/2 (measured on SmolLM2, two CPU cores)
    one hundredth of a round.
    """

    def __init__(self, model: Model, cache: Any, plan: LayerPlan | None = None) -> None:
        self.model, self.cache, self.plan = model, cache, plan

    def propose(self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness) -> Draft:
        """Sample up to ``limit`` tokens one by one, each from the distribution of the model's logits."""
        context = text.tensor(self.model.device)
        start = self.cache.length
        if limit and start < len(text) - CATCH_UP:
            self.model.prefill(context[None, start:-1], self.cache, start)
            start = len(text) - 1
        rows: list[Tensor] = []
        unprocessed: list[Tensor] = []
        confidence: list[float] = []
        while len(rows) < limit:
            logits = self.model(context[None, start:], self.cache, start, self.plan)[0, -1:]
            allowed = text.allowed(context[len(text) :], first=len(rows))
            probs = distribution(logits, context, params, allowed)
            if allowed is not None and not probs.any():
                break  # nothing is allowed here; if the text gets so far, the loop says so
            token = randomness.draw(probs[0], text.place(len(rows)))
            start, context = len(context), torch.cat((context, token[None]))
            rows.append(probs)
            unprocessed.append(logits)
            if policy.reads_draft_confidence:
                confidence.append(raw_probability(logits[0], token))
                if not policy.keep_drafting(confidence[-1]):
                    break
        probs = torch.cat(rows) if rows else torch.zeros(0, self.model.vocab_size, device=self.model.device)
        sure = confidence if policy.reads_draft_confidence else None
        return Draft(context[len(text) :], probs, sure, unprocessed)

    def rollback(self, length: int) -> None:
        # All but the last token: the next step feeds that one again, in draft and target alike.
        self.cache.truncate(max(0, length - 1))


class PromptLookup:
    """Draft what followed the last time the text ended like this (prompt lookup decoding).

    The longest n-gram at the text's end that occurred before decides, ``longest`` tokens down to one; of
    its occurrences the most recent. No model runs, so a draft costs nothing but its verification.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", longest: int = 3) -> None:
        self.vocab_size, self.device, self.longest = vocab_size, device, longest

    def propose(self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness) -> Draft:
        """Up to ``limit`` tokens, surely chosen: their distributions are one-hot and their confidence is 1."""
        drafted: list[int] = []
        for token in self.find(text.tokens, limit)[1]:
            allowed = text.allowed_after(drafted)
            if allowed is not None and not allowed[token]:
                break  # a constraint is asked about texts that it allows only
            drafted.append(token)
            if token in text.rules.eos_ids:
                break
        ids = torch.tensor(drafted, dtype=torch.int64, device=self.device)
        return Draft(ids, F.one_hot(ids, self.vocab_size).float(), [1.0] * len(drafted))

    def rollback(self, length: int) -> None:
        """Nothing to forget: each search reads the text itself."""

    def find(self, tokens: Sequence[int], limit: int) -> tuple[int, Sequence[int]]:
        """How many tokens at the end of the text occurred before, and up to ``limit`` that followed them there."""
        ids = array("i", tokens)
        data, width = ids.tobytes(), ids.itemsize
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            tail = data[-size * width :]
            end = len(data) - width  # an occurrence needs at least one token after it
            while (at := data.rfind(tail, 0, end)) >= 0:
                if at % width == 0:
                    after = at // width + size
                    return size, ids[after : after + limit].tolist()
                end = at + len(tail) - 1
        return 0, []


class BestOf:
    """Several drafters, of which the policy chooses one each round."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self.drafters = drafters

    def propose(self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness) -> Draft:
        """What the chosen one proposes. A lookup's past acceptance counts by how many tokens of the text it found."""
        offers = []
        for name, drafter in self.drafters.items():
            if isinstance(drafter, PromptLookup):
                size, tokens = drafter.find(text.tokens, limit)
                offers.append(Offer(name, f"{name} {size}", tokens))
            else:
                offers.append(Offer(name, name))
        taken, length = policy.choose(offers)
        drafter = self.drafters[taken.name if taken else offers[0].name]
        return drafter.propose(text, min(limit, length), params, policy, randomness)

    def rollback(self, length: int) -> None:
        for drafter in self.drafters.values():
            drafter.rollback(length)


class NoDraft:
    """Plain decoding: an empty draft every round."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.empty = Draft(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, vocab_size, device=device))

    def propose(self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness) -> Draft:
        return self.empty

    def rollback(self, length: int) -> None:
        """There is nothing to forget."""


def raw_probability(logits: Tensor, token: Tensor) -> float:
    """Confidence: the softmax probability of ``token`` under unprocessed logits ``[vocab]``. Synchronises."""
    return torch.softmax(logits.float(), dim=-1).gather(0, token[None]).item()
