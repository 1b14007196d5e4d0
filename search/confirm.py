"""The best plans run for real, beside plain decoding, on prompts that the search has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decoding.costs import SublayerCosts
from decoding.drafters import Drafter, ModelDrafter, NoDraft
from decoding.plan_file import DraftPlan
from decoding.policies import FixedLength, Policy
from decoding.randomness import SeededRandomness
from decoding.rounds import Statistics
from decoding.sampling import Sampler, SamplingParams
from decoding.speculate import speculate
from decoding.stopping import StopRules
from model import Decoder, KVCache, LayerPlan
from model.clock import now
from search.acceptance import Calibration, Text
from search.prediction import Prediction, predict
from search.study import Candidate

REPEATS = 2  # runs of every contender on every prompt, of which the faster counts

# A cache that holds a prompt -> a drafter and a fresh policy
MakeDrafting = Callable[[KVCache], tuple[Drafter, Policy]]


@dataclass(frozen=True)
class Confirmation:
    """A candidate on the held-out texts: predicted there, at its draft length and threshold, and measured."""

    candidate: Candidate
    predicted: Prediction
    speedup: float
    acceptance_rate: float
    tokens_per_round: float


def draft_plan(candidate: Candidate) -> DraftPlan:
    """The candidate with its draft length and threshold (None: no threshold)."""
    return DraftPlan(candidate.plan, candidate.prediction.gamma, candidate.prediction.threshold or None)


def confirm(
    model: Decoder,
    found: Sequence[Candidate],
    held_out: Sequence[Text],
    costs: SublayerCosts,
    params: SamplingParams,
    eos_ids: frozenset[int],
    max_new_tokens: int,
    seed: int,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Confirmation]:
    """Decode every held-out prompt plainly and with each candidate, in turns; the fastest candidate comes first.

    Timed is the loop, without the prompt's prefill. A speed is that of all prompts together: tokens over seconds.
    """
    contenders: list[MakeDrafting] = [lambda cache: (NoDraft(model.vocab_size, model.device), FixedLength(0))]
    contenders += [_drafting(model, draft_plan(candidate)) for candidate in found]
    sums = [Statistics() for _ in contenders]
    seconds, tokens = [0.0] * len(contenders), [0] * len(contenders)
    sampler = Sampler(params)
    longest = max(candidate.prediction.gamma for candidate in found)
    warm_up = StopRules(longest + 2)  # a draft of full length, and one token after it
    cache = model.new_cache(max(len(text.prompt) for text in held_out) + max(max_new_tokens, warm_up.max_new_tokens))
    for contender in contenders:
        _run(model, cache, held_out[0].prompt, contender, sampler, warm_up, seed, Statistics())
    for text in held_out:
        stop = StopRules(max_new_tokens, eos_ids)
        best, written = [math.inf] * len(contenders), [0] * len(contenders)
        for _ in range(REPEATS):
            for number, contender in enumerate(contenders):
                one = Statistics()
                took = _run(model, cache, text.prompt, contender, sampler, stop, seed, one, sums[number])
                best[number] = min(best[number], took)
                written[number] = one.tokens
        seconds = [total + each for total, each in zip(seconds, best, strict=True)]
        tokens = [total + each for total, each in zip(tokens, written, strict=True)]
        on_prompt()
    calibration = Calibration(model, held_out, params, depths=longest)
    confirmed = []
    speeds = [count / total for count, total in zip(tokens, seconds, strict=True)]
    for candidate, statistics, speed in zip(found, sums[1:], speeds[1:], strict=True):
        acceptance = calibration.acceptance(candidate.plan)
        gammas, thresholds = [candidate.prediction.gamma], [candidate.prediction.threshold]
        predicted = predict(acceptance, held_out, candidate.plan, costs, gammas, thresholds)
        rate = statistics.acceptance_rate or 0.0
        confirmed.append(Confirmation(candidate, predicted, speed / speeds[0], rate, statistics.tokens_per_round))
    return sorted(confirmed, key=lambda one: -one.speedup)


def _drafting(model: Decoder, chosen: DraftPlan) -> MakeDrafting:
    plan, gamma = chosen.plan, chosen.gamma or 0
    return lambda cache: (ModelDrafter(model, cache, plan), chosen.new_policy(gamma))


def _run(
    model: Decoder,
    cache: KVCache,
    prompt: Sequence[int],
    contender: MakeDrafting,
    sampler: Sampler,
    stop: StopRules,
    seed: int,
    *sums: Statistics,
) -> float:
    """Seconds that one text takes; its rounds are added to ``sums``. What the cache held is forgotten."""
    cache.truncate(0)
    with torch.inference_mode():
        model.prefill(torch.tensor([prompt[:-1]], dtype=torch.int64, device=model.device), cache)
    drafter, policy = contender(cache)
    began = now(model.device)
    for round in speculate(model, cache, prompt, drafter, policy, sampler, stop, SeededRandomness(seed, model.device)):
        for statistics in sums:
            statistics.add(round)
    return now(model.device) - began


def without_speculation(plan: LayerPlan) -> DraftPlan:
    """A plan file's way to say that no draft pays on this machine."""
    return DraftPlan(plan, 0, None)
