"""Models small enough to know their law exactly, and the law that plain sampling gives them.

``plain_law`` is an oracle of its own: a recursion over texts that shares with the production loop only the
function ``distribution``. It knows no rounds, drafts, caches or rollbacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from decoding import speculate as loop
from decoding.banned import BannedWords
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import FixedLength, Policy
from decoding.proof.enumeration import output_law, total_variation
from decoding.randomness import Randomness, SeededRandomness
from decoding.rounds import Round
from decoding.sampling import Constraint, Sampler, SamplingParams, distribution
from decoding.stopping import StopRules
from model import Decoder, InputError, KVCache, LayerPlan, build, parse_config

TEXTS = (b"a", b"b", b"ab", b"c", b"", b"d")  # token 2 spells what tokens 0 and 1 spell together
DRAFT_PLAN = LayerPlan((True, False), (True, True))
DEAD_END = "every token forbidden"

Outcome = Hashable  # (tokens, finish), or DEAD_END


class TableModel:
    """A language model that is a table: after each text a row of probabilities, chosen by its whole history.

    It writes token ids where a real model writes keys, into a real KVCache of two layers, and reads its
    history back from there. So a wrong position, a hole, a token fed twice or an entry of the draft left in
    the target's history gives a wrong row or an error, just as it would in a transformer.
    """

    max_positions = 64
    device = torch.device("cpu")

    def __init__(self, target: Tensor, draft: Tensor | None = None) -> None:
        """``target``, ``draft``: ``[states, vocab]`` float64; the draft's table answers under DRAFT_PLAN."""
        self.tables = {None: target.log(), DRAFT_PLAN: (target if draft is None else draft).log()}
        self.states, self.vocab_size = target.shape

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(2, 1, 1, capacity, dtype=torch.float64)

    def row(self, history: Sequence[int], plan: LayerPlan | None = None) -> Tensor:
        """Logits ``[vocab]`` after a history: the state mixes all of it, order included."""
        state = 0
        for token in history:
            state = (3 * state + token + 1) % self.states
        return self.tables[plan][state]

    def __call__(self, tokens: Tensor, cache: KVCache, start: int, plan: LayerPlan | None = None) -> Tensor:
        # Keys are ids; the draft's are marked by a half, so that the target can tell its own entries.
        entries = tokens[:, None, :, None].double() + (0.0 if plan is None else 0.5)
        for layer in range(2):
            if plan is None or plan.attention[layer]:
                history, _ = cache.write(layer, start, entries, entries)
        ids = history.flatten().tolist()
        if plan is None:
            assert all(entry == int(entry) for entry in ids), "the target read an entry that a draft wrote"
        else:
            assert all(entry == int(entry) for entry in ids[: cache.lengths[1]]), "the draft lost the target's entries"
        rows = [self.row([int(entry) for entry in ids[: start + 1 + t]], plan) for t in range(tokens.shape[1])]
        return torch.stack(rows)[None]

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        if tokens.shape[1]:
            self(tokens, cache, start)


@dataclass(frozen=True)
class Request:
    """What is asked of a model, apart from how to draft."""

    prompt: tuple[int, ...] = (0,)
    params: SamplingParams = SamplingParams(temperature=1.0)
    max_new_tokens: int = 2
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()
    constraint: Constraint | None = None


def self_draft(model: TableModel, cache: KVCache) -> Drafter:
    """The target under DRAFT_PLAN, sharing its cache."""
    return ModelDrafter(model, cache, DRAFT_PLAN)


def draft_model(model: TableModel, cache: KVCache) -> Drafter:
    """Another model, with the draft's table and a cache of its own."""
    draft = TableModel(model.tables[DRAFT_PLAN].exp())
    return ModelDrafter(draft, draft.new_cache(TableModel.max_positions))


def prompt_lookup(model: TableModel, cache: KVCache) -> Drafter:
    return PromptLookup(model.vocab_size)


def no_draft(model: TableModel, cache: KVCache) -> Drafter:
    return NoDraft(model.vocab_size)


@dataclass(frozen=True)
class Drafting:
    """How to draft: makers of a fresh drafter for a model and its cache, and of a fresh policy."""

    drafter: Callable[[TableModel, KVCache], Drafter] = self_draft
    policy: Callable[[], Policy] = lambda: FixedLength(2)


def run_loop(
    model: TableModel, request: Request, drafting: Drafting, randomness: Randomness, rounds: list[Round] | None = None
) -> Outcome:
    """One text from the production loop: its tokens and why it ended."""
    cache = model.new_cache(TableModel.max_positions)
    model.prefill(torch.tensor([request.prompt[:-1]], dtype=torch.int64), cache)
    banned = BannedWords(request.banned, model.vocab_size) if request.banned else None
    constraints = [request.constraint] if request.constraint else []
    if banned:
        constraints.append(banned.allowed)
    tokens: list[int] = []
    finish = None
    try:
        for round in loop.speculate(
            model,
            cache,
            request.prompt,
            drafting.drafter(model, cache),
            drafting.policy(),
            Sampler(request.params, tuple(constraints)),
            StopRules(request.max_new_tokens, request.eos_ids, request.stop_strings),
            randomness,
            token_bytes=lambda token: TEXTS[token],
            banned=banned,
        ):
            if rounds is not None:
                rounds.append(round)
            tokens += round.emitted
            del tokens[len(tokens) - round.retracted :]
            finish = round.finish
            assert len(tokens) <= request.max_new_tokens + 8, "the loop does not stop"
    except InputError:
        return DEAD_END
    return tuple(tokens), finish


def plain_law(model: TableModel, request: Request) -> dict[Outcome, float]:
    """The law of plain sampling under the request's rules, by recursion over texts."""
    law: defaultdict[Outcome, float] = defaultdict(float)

    def expand(tokens: tuple[int, ...], forbidden: dict[int, frozenset[int]], weight: float) -> None:
        history = request.prompt + tokens
        allowed = torch.ones(model.vocab_size, dtype=torch.bool)
        if request.constraint and (mask := request.constraint(history)) is not None:
            allowed &= mask
        for token in forbidden.get(len(tokens), frozenset()):
            allowed[token] = False
        probs = distribution(model.row(history)[None], torch.tensor(history), request.params, allowed[None])[0]
        if not probs.any():
            law[DEAD_END] += weight
            return
        for token, chance in enumerate(probs.tolist()):
            if chance == 0:
                continue
            longer = (*tokens, token)
            begin = _completed(request.prompt + longer, request.banned, floor=0)
            if begin is not None:
                back = max(_holder(request.prompt + longer, begin) - len(request.prompt), 0)
                kept = {at: banned for at, banned in forbidden.items() if at <= back}
                kept[back] = kept.get(back, frozenset()) | {longer[back]}
                expand(longer[:back], kept, weight * chance)
                continue
            floor = len(b"".join(TEXTS[t] for t in request.prompt))
            if token in request.eos_ids:
                law[longer, "eos"] += weight * chance
            elif _completed(request.prompt + longer, request.stop_strings, floor) is not None:
                law[longer, "stop"] += weight * chance
            elif len(longer) == request.max_new_tokens:
                law[longer, "length"] += weight * chance
            else:
                expand(longer, forbidden, weight * chance)

    expand((), {}, 1.0)
    return dict(law)


def _completed(tokens: Sequence[int], words: Sequence[str], floor: int) -> int | None:
    """Where the word begins that the last token completes first (the longest, if several): by trying every end."""
    text = b"".join(TEXTS[token] for token in tokens)
    for end in range(len(text) - len(TEXTS[tokens[-1]]) + 1, len(text) + 1):
        for word in sorted((word.encode() for word in words), key=len, reverse=True):
            if text[floor:end].endswith(word):
                return end - len(word)
    return None


def _holder(tokens: Sequence[int], offset: int) -> int:
    """The position of the token that spells the byte at ``offset``."""
    spelled = [position for position, token in enumerate(tokens) for _ in TEXTS[token]]
    return spelled[offset]


@dataclass
class Tally:
    """How much has been proven so far: laws enumerated, paths walked, the largest deviation seen."""

    laws: int = 0
    paths: int = 0
    largest: float = 0.0


PROVEN = Tally()


def deviation(run: Callable[[Randomness], Outcome], expected: dict[Outcome, float]) -> float:
    """Total variation between the enumerated law of ``run`` and the expected one; noted in PROVEN."""

    def counted(randomness: Randomness) -> Outcome:
        PROVEN.paths += 1
        return run(randomness)

    distance = total_variation(output_law(counted), expected)
    PROVEN.laws += 1
    PROVEN.largest = max(PROVEN.largest, distance)
    return distance


def tiny_model(family: str, *, vocab: int = 3, layers: int = 3, seed: int = 0, hidden: int = 8) -> Decoder:
    """A random real module in float64, small enough to enumerate; Gemma-2's window is two tokens."""
    raw = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
    }
    if family == "gemma2":
        raw |= {"sliding_window": 2, "query_pre_attn_scalar": 6}
    model = build(parse_config(raw)).double()
    model.initialise(std=0.7, generator=torch.Generator().manual_seed(seed))
    return model.requires_grad_(False).eval()


def small_draft_model(model: Decoder, cache: KVCache) -> Drafter:
    """Another real module, with a cache of its own."""
    draft = tiny_model("llama", vocab=model.vocab_size, layers=1, seed=99)
    return ModelDrafter(draft, draft.new_cache(model.max_positions))


def skipping(model: Decoder, cache: KVCache) -> Drafter:
    return ModelDrafter(model, cache, LayerPlan.skipping(model.num_layers, [0, 2], [1]))


def early_exit(model: Decoder, cache: KVCache) -> Drafter:
    return ModelDrafter(model, cache, LayerPlan.early_exit(model.num_layers, 1))


# Drafters of real modules, under the names of the table models' where they correspond.
REAL_DRAFTERS = {
    "plan": skipping,
    "exit": early_exit,
    "model": small_draft_model,
    "lookup": prompt_lookup,
    "none": no_draft,
}


class Scripted(SeededRandomness):
    """The production verbs over uniform numbers given in advance."""

    def __init__(self, *uniforms: float) -> None:
        super().__init__(0)
        self.script = list(uniforms)

    def uniform(self, count: int) -> Tensor:
        taken, self.script = self.script[:count], self.script[count:]
        return torch.tensor(taken, dtype=torch.float64)


def plans(layers: int = 3) -> st.SearchStrategy[LayerPlan]:
    flags = st.lists(st.booleans(), min_size=layers, max_size=layers).map(tuple)
    return st.builds(LayerPlan, flags, flags)
