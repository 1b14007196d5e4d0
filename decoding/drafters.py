"""Drafters: small objects that propose tokens for the target to verify.

A drafter has two methods. ``propose`` returns tokens to follow the text, each with the distribution
that it was drawn from (one-hot for a token that was not drawn). ``rollback`` tells how long the
text is now. The next ``propose`` receives the text.

Knows nothing of files and options, nor of who chooses a drafter.
"""

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.model_port import Cache, Model
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.sampling import SamplingParams, distribution, one_hot
from decoding.text import Text
from model.errors import InputError
from model.plan import LayerPlan

# most tokens that a draft model reads in one step; of more, it prefills all but the last
CATCH_UP = 16
IDS_AS_CHARACTERS = f"utf-32-{sys.byteorder[0]}e"  # an id in four bytes, as in an array


@dataclass(frozen=True)
class Draft:
    """Drafted tokens ``[k]`` int64 and the distributions ``[k, vocab]`` they were drawn from."""

    tokens: Tensor
    probs: Tensor


class Drafter(Protocol):
    """Interface of a drafter."""

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return up to ``limit`` tokens to follow the text, drawn only through ``randomness``. Each
        must be allowed by ``text.allowed_after`` the ones before it.
        """

    def rollback(self, length: int) -> None:
        """Forget the positions from ``length`` on, the number of the text's tokens. It is called
        before the first ``propose`` of a text too.
        """


@dataclass
class Wrapper:
    """Drafter that asks ``instead`` first, and the ``inner`` drafter where that gives None."""

    inner: Drafter

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return the draft of ``instead``, or that of the inner drafter."""
        own = self.instead(text, limit)
        return self.inner.propose(text, limit, params, policy, randomness) if own is None else own

    def instead(self, text: Text, limit: int) -> Draft | None:
        """Return a draft of up to ``limit`` tokens, if any, in place of the inner drafter's."""

    def rollback(self, length: int) -> None:
        self.inner.rollback(length)


@cache
def empty_draft(vocab_size: int, device: torch.device) -> Draft:
    """Return a draft without tokens."""
    no_tokens = torch.zeros(0, dtype=torch.int64, device=device)
    return Draft(no_tokens, one_hot(no_tokens, vocab_size))


def draft_of(text: Text, tokens: Sequence[int]) -> Draft:
    """Return a draft of known tokens, up to the first that is not allowed or ends the text."""
    drafted: list[int] = []
    for token in tokens:
        allowed = text.allowed_after(drafted)
        if allowed is not None and not allowed[token]:
            break  # a constraint may be called only with texts that it allows
        drafted.append(token)
        if token in text.conditions.eos_ids:
            break
    if not drafted:
        return empty_draft(text.vocab_size, text.device)
    ids = torch.tensor(drafted, dtype=torch.int64, device=text.device)
    return Draft(ids, one_hot(ids, text.vocab_size))


class ModelDrafter:
    """Draft by a model: the target under a layer plan, or a smaller one.

    Self-speculation shares the target's cache: a draft step reads the target's entries and writes
    its entries at new positions, which verification overwrites. Another model has a separate cache,
    which catches up with the text in the first step of a draft, so that a round whose draft was
    accepted whole leaves no hole in it. It drafts up to the end of its own context. Its vocabulary
    may have another size, with the same tokens where both have any: q is 0 for a token that it
    lacks, which it reads as its last one, and it drafts none that the target lacks.

    LayerSkip (arXiv 2404.16710, section 4.3.2) reuses the first layers of an exit's draft in its
    verification. Here they run again: the last drafted token must pass them anyway, and reading
    their weights is most of their cost.
    """

    def __init__(self, model: Model, cache: Cache, plan: LayerPlan | None = None) -> None:
        self.model = model
        self.cache = cache
        self.plan = plan

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return a draft of up to ``limit`` tokens, drawn one by one from the model's
        distributions. It ends early where no token is allowed: that is an error only if the text
        comes to this place.
        """
        limit = min(limit, self.model.max_positions + 1 - len(text))
        # What follows an end-of-text token would be discarded, so a draft ends with it. But a GPU
        # would have to synchronise to see it, as it does only under constraints.
        ends_at_eos = text.device.type == "cpu" or bool(text.conditions.constraints)
        context = text.tensor()
        unread = context[self.cache.length :]  # tokens that are not yet in the cache
        empty = empty_draft(text.vocab_size, text.device)
        tokens = [empty.tokens]
        rows = [empty.probs]
        for count in range(limit):
            logits = self._read(unread, len(context) - len(unread), text.vocab_size)
            # a mask of the next token only
            allowed = text.allowed(context[len(text) :], first=count)
            probs = distribution(logits, context, params, allowed)
            if allowed is not None and not probs.any():
                break
            unread = randomness.draw(probs[0], text.place(count))[None]
            tokens.append(unread)
            rows.append(probs)
            if policy.reads_draft_confidence:
                raw = torch.softmax(logits[0].float(), dim=-1)
                confidence = raw.gather(0, unread).item()  # synchronises
                if not policy.keep_drafting(confidence):
                    break
            if ends_at_eos and int(unread) in text.conditions.eos_ids:
                break
            context = torch.cat((context, unread))
        return Draft(torch.cat(tokens), torch.cat(rows))

    def _read(self, tokens: Tensor, start: int, vocab_size: int) -> Tensor:
        """Return the logits ``[1, vocab]`` of the target's vocabulary after tokens ``[n]`` from
        ``start`` on, which enter the cache.
        """
        lacking = vocab_size - self.model.vocab_size
        if lacking > 0:
            tokens = tokens.clamp(max=self.model.vocab_size - 1)
        if len(tokens) > CATCH_UP and self.plan is None:  # under a plan the layers' lengths differ
            self.model.prefill(tokens[None, :-1], self.cache, start)
            start += len(tokens) - 1
            tokens = tokens[-1:]
        logits = self.model(tokens[None], self.cache, start, self.plan)[0, -1:]
        return F.pad(logits, (0, lacking), value=-math.inf) if lacking else logits

    def rollback(self, length: int) -> None:
        # All but the last token, which is the input of the next step, in draft and target alike.
        self.cache.truncate(length - 1)


class ModelFreeDrafter:
    """Drafter of tokens that are known without running a model. ``find`` gives them.

    ``RATES`` are their acceptance rates by the quality of the guess, before any is observed.
    """

    RATES: ClassVar[Mapping[int, float]] = {}

    def find(self, text: Text, limit: int) -> tuple[int, Sequence[int]]:
        """Return up to ``limit`` tokens, after the number that says how good this guess is: of a
        better one more tokens are accepted.
        """
        return 0, []

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return a draft of up to ``limit`` tokens, not drawn: q is one-hot."""
        return draft_of(text, self.find(text, limit)[1])

    def rollback(self, length: int) -> None:
        """Do nothing: each search reads the text itself."""


class NoDraft(ModelFreeDrafter):
    """Plain decoding: no token is known."""


class PromptLookup(ModelFreeDrafter):
    """Draft by prompt lookup decoding: the tokens that followed the last occurrence of the n-gram
    at the text's end.

    The longest n-gram that occurred before is used, of up to ``LONGEST_NGRAM`` tokens, and its most
    recent occurrence. No model runs, so a draft costs nothing but its verification.
    """

    LONGEST_NGRAM = 16  # tokens
    # α of a token behind an n-gram of each quality
    RATES: ClassVar = {1: 0.3, 2: 0.5, 3: 0.7, 4: 0.7, 8: 0.8, 16: 0.9}

    def find(self, text: Text, limit: int) -> tuple[int, Sequence[int]]:
        """Return the length of the n-gram at the end of the text that occurred before, of long ones
        rounded down to a power of two, and up to ``limit`` tokens after it.

        Each id is the number of a character, since Python searches strings fast. In a vocabulary of
        more tokens than there are characters nothing is found.
        """
        if text.vocab_size > sys.maxunicode + 1:
            return 0, []
        string = array("i", text.tokens).tobytes().decode(IDS_AS_CHARACTERS, "surrogatepass")
        length = after = 0
        for size in range(1, min(self.LONGEST_NGRAM, len(string) - 1) + 1):
            # an occurrence needs at least one token after it
            begin = string.rfind(string[-size:], 0, -1)
            if begin < 0:
                break
            length = size
            after = begin + size
        quality = length if length < 4 else 1 << (length.bit_length() - 1)
        return quality, text.tokens[after : after + limit] if length else []


@dataclass
class CheckedDrafter(Wrapper):
    """Drafter whose drafts are checked before the loop uses them: for a class that is not trusted.

    Raises InputError for an object without the methods of a drafter, and for a draft that breaks
    the contract.
    """

    target: Model

    def __post_init__(self) -> None:
        methods = (getattr(self.inner, name, None) for name in ("propose", "rollback"))
        if not all(map(callable, methods)):
            raise self._error("it must have the methods `propose` and `rollback`")

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        """Return the draft of the inner drafter, after the check."""
        draft = self.inner.propose(text, limit, params, policy, randomness)
        if fault := fault_of(draft, limit, self.target):
            raise self._error(fault)
        return draft

    def _error(self, fault: str) -> InputError:
        return InputError(
            f"the drafter {type(self.inner).__name__} breaks its contract (see"
            f" decoding/drafters.py): {fault}"
        )


def fault_of(draft: Draft, limit: int, target: Model) -> str | None:
    """Return what is wrong with the type or the shapes of a draft, on a CPU also with its numbers;
    None where nothing is.
    """
    if not (
        isinstance(draft, Draft)
        and isinstance(draft.tokens, Tensor)
        and isinstance(draft.probs, Tensor)
    ):
        return f"`propose` must return a Draft of tensors, found {draft!r:.80}"
    tokens = draft.tokens
    probs = draft.probs
    device = target.device
    kind = tokens.dim(), tokens.dtype, tokens.device
    if kind != (1, torch.int64, device) or len(tokens) > limit:
        return (
            f"`tokens` must be [k] int64 on {device} with k at most {limit}, found"
            f" {list(tokens.shape)} {tokens.dtype} on {tokens.device}"
        )
    shape = len(tokens), target.vocab_size
    if (probs.shape, probs.device) != (shape, device) or not probs.is_floating_point():
        return (
            f"`probs` must be {list(shape)} floats on {device}, found {list(probs.shape)}"
            f" {probs.dtype} on {probs.device}"
        )
    if device.type != "cpu":  # reading a GPU's numbers would synchronise
        return None
    ids = tokens.tolist()
    if not all(0 <= token < target.vocab_size for token in ids):
        return f"`tokens` must be from 0 and below {target.vocab_size}, found {ids}"
    sums = probs.double().sum(-1).tolist()
    # 0: of a model with non-finite logits
    if not all(total == 0 or abs(total - 1) < 0.01 for total in sums):
        return f"each row of `probs` must sum to 1, found {sums}"
    if (probs < 0).any():
        return f"`probs` must not be negative, found {probs.amin().item()}"
    return None
