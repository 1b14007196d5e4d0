"""Contenders: ways to write a greedy text of a given length, end-of-text ignored. These are ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from decoding.cost_file import kept_costs
from decoding.costs import measure_costs
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.plan_file import read_plan
from decoding.policies import AdaptiveExit, BreakEven, FixedLength, Policy
from decoding.randomness import SeededRandomness
from decoding.rounds import Round
from decoding.sampling import Sampler
from decoding.speculate import speculate
from decoding.stopping import StopRules
from model import Decoder, InputError, KVCache, LayerPlan
from model.clock import now

GAMMA = 4
CONFIDENT = 0.8  # the adaptive exit's first threshold in greedy decoding
WARM_UP_TOKENS = 8
ARGMAX = Sampler()

Prompt = tuple[str, str, list[int]]  # kind, text, token ids


@dataclass(frozen=True)
class Written:
    """A text's tokens, and, where the contender is ours, its rounds and the seconds that reading the prompt took."""

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    prefill: float = 0.0


@dataclass(frozen=True)
class Contender:
    """``write(prompt, count)`` writes so many tokens; ``costs`` names the cost table that predicts its speed."""

    write: Callable[[list[int], int], Written]
    costs: str | None = None


@dataclass(frozen=True)
class ModelDraft:
    """What drafts: the target itself under a layer plan, or a model of its own (then without a plan)."""

    model: Decoder
    plan: LayerPlan | None = None
    policy: Callable[[], Policy] = lambda: FixedLength(GAMMA)
    threshold: float = CONFIDENT


MakeDrafter = Callable[[Tensor, KVCache], Drafter]  # for a prompt, [1, n], and the target's cache, which holds it


def our_contender(
    model: Decoder,
    capacity: int,
    make: MakeDrafter,
    policy: Callable[[], Policy],
    costs: str | None = None,
    sampler: Sampler = ARGMAX,
) -> Contender:
    """Our loop, the prompt's prefill included. All texts, of ``capacity`` tokens at most, use one cache.

    CUDA graphs belong to a cache: with a new one for every text, recording them would be timed.
    """
    caches: list[KVCache] = []

    @torch.inference_mode()
    def write(prompt: list[int], count: int) -> Written:
        began = now(model.device)
        if not caches:
            caches.append(model.new_cache(capacity))
        cache = caches[0]
        cache.truncate(0)
        ids = torch.tensor([prompt[:-1]], dtype=torch.int64, device=model.device)
        model.prefill(ids, cache)
        drafter, randomness = make(ids, cache), SeededRandomness(0, model.device)
        prefill = now(model.device) - began
        rounds = list(speculate(model, cache, prompt, drafter, policy(), sampler, StopRules(count), randomness))
        return Written([token for round in rounds for token in round.emitted], rounds, prefill)

    return Contender(write, costs)


def drafting(target: Decoder, draft: ModelDraft) -> MakeDrafter:
    """How to make the drafter of a model draft; a model of its own reads the prompt too, into one cache for all."""
    caches: list[KVCache] = []

    def make(prompt: Tensor, cache: KVCache) -> Drafter:
        if draft.model is target:
            return ModelDrafter(target, cache, draft.plan)
        if not caches:
            caches.append(draft.model.new_cache(cache.capacity))
        caches[0].truncate(0)
        draft.model.prefill(prompt, caches[0])
        return ModelDrafter(draft.model, caches[0])

    return make


def our_contenders(folder: Path, model: Decoder, capacity: int, drafts: dict[str, ModelDraft]) -> dict[str, Contender]:
    """Plain decoding, lookup, each model draft as it is and with adaptive exit, and what generate.py's auto chooses."""

    def lookup(prompt: Tensor, cache: KVCache) -> Drafter:
        return PromptLookup(model.vocab_size, model.device)

    def no_draft(prompt: Tensor, cache: KVCache) -> Drafter:
        return NoDraft(model.vocab_size, model.device)

    found = {
        "plain": our_contender(model, capacity, no_draft, lambda: FixedLength(0)),
        "lookup": our_contender(model, capacity, lookup, lambda: FixedLength(GAMMA), "lookup"),
    }
    for name, draft in drafts.items():
        make, start = drafting(model, draft), draft.threshold
        found[name] = our_contender(model, capacity, make, draft.policy, name)
        found[f"{name}, adaptive"] = our_contender(model, capacity, make, lambda start=start: AdaptiveExit(start), name)
    own = drafts.get("plan.json")
    draft_model, plan = (own.model, own.plan) if own else (None, None)
    costs = kept_costs(folder, model, plan, ARGMAX.params, lambda: measure_costs(model, draft_model, plan))
    make, name = (drafting(model, own), "plan.json") if own else (lookup, "lookup")
    return found | {"auto": our_contender(model, capacity, make, lambda: BreakEven(costs), name)}


def find_drafts(
    folder: Path, model: Decoder, draft_model: Decoder | None, *, quick: bool, exits: Sequence[int] = ()
) -> dict[str, ModelDraft]:
    """By name: early exits, the folder's own plan and the draft model, if there are any.

    Without ``exits`` two or three layers are tried, the middle and later. Raises InputError for one out of range.
    """
    layers = model.num_layers
    for at in exits:
        if not 1 <= at < layers:
            raise InputError(f"exit layer {at} must be from 1 to {layers - 1}")
    middle, late = layers // 2, exit_layer(layers)
    tried = exits or ([middle, late] if quick else [middle, layers * 2 // 3, late])
    drafts = {f"exit {at}": ModelDraft(model, LayerPlan.early_exit(layers, at)) for at in tried if at}
    own = read_plan(folder / "plan.json", layers, folder) if (folder / "plan.json").exists() else None
    if own is not None and own.gamma != 0:  # 0: the search found that the model should not draft for itself
        start = CONFIDENT if own.threshold is None else own.threshold
        drafts["plan.json"] = ModelDraft(model, own.plan, lambda: own.new_policy(GAMMA), start)
    if draft_model is not None:
        drafts["model"] = ModelDraft(draft_model)
    return drafts


def exit_layer(layers: int, exits: Sequence[int] = ()) -> int:
    """The exit of which transformers is measured too: the deepest."""
    return max(exits, default=max(1, layers * 4 // 5))


@dataclass
class Bench:
    """Everything a section needs: the target, what drafts, the prompts, the options; and notes for the reader."""

    options: argparse.Namespace
    folder: Path
    model: Decoder
    prompts: list[Prompt]
    draft_folder: Path | None = None
    drafts: dict[str, ModelDraft] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def longest_text(self) -> int:
        return max(len(ids) for _, _, ids in self.prompts) + self.options.max_new_tokens

    @property
    def step_repeats(self) -> int:
        """How often single steps are timed; they are short."""
        return 5 if self.options.quick else 15

    def some(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """All of the lengths, or three of the shorter ones in a quick run."""
        return lengths[:5:2] if self.options.quick else lengths
