"""The best plans run for real, beside plain decoding, on prompts that the search has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoding.rounds import Statistics
from decoding.run.acceptance import Calibration, Continuation
from decoding.run.chooser import plain, planned
from decoding.run.costs import SublayerCosts
from decoding.run.plan_file import DraftPlan
from decoding.run.prediction import Prediction
from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from model import Decoder, LayerPlan
from search.study import Candidate, predict_plan

REPEATS = 2  # runs of every contender on every prompt, of which the faster counts


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
    held_out: Sequence[Continuation],
    costs: SublayerCosts,
    params: SamplingParams,
    eos_ids: frozenset[int],
    max_new_tokens: int,
    seed: int,
    coupling: str,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Confirmation]:
    """Decode every held-out prompt plainly and with each candidate, in turns; the fastest candidate comes first.

    Timed is the loop, without the prompt's prefill. A speed is that of all prompts together: tokens over seconds.
    """
    contenders = [plain(model), *(planned(model, draft_plan(candidate)) for candidate in found)]
    sums = [Statistics() for _ in contenders]
    seconds, tokens = [0.0] * len(contenders), [0] * len(contenders)
    longest = max(candidate.prediction.gamma for candidate in found)
    # Room for a warm-up with a draft of full length too, and one token after it.
    writer = Writer(model, max(len(text.prompt) for text in held_out) + max(max_new_tokens, longest + 2))
    writer.begin(held_out[0].prompt)
    for contender in contenders:
        writer.warm_up(contender, params)
    for text in held_out:
        best, written = [math.inf] * len(contenders), [0] * len(contenders)
        for _ in range(REPEATS):
            for number, contender in enumerate(contenders):
                writer.begin(text.prompt)
                sample = writer.write(
                    writer.new_text(Rules(max_new_tokens, eos_ids)), contender, params, Coupling(coupling, seed)
                )
                best[number], written[number] = min(best[number], sample.seconds), sample.statistics.tokens
                for round in sample.rounds:
                    sums[number].add(round)
        seconds = [total + each for total, each in zip(seconds, best, strict=True)]
        tokens = [total + each for total, each in zip(tokens, written, strict=True)]
        on_prompt()
    calibration = Calibration(model, held_out, params, coupling, longest)
    confirmed = []
    speeds = [count / total for count, total in zip(tokens, seconds, strict=True)]
    for candidate, statistics, speed in zip(found, sums[1:], speeds[1:], strict=True):
        acceptance = calibration.acceptance(candidate.plan)
        gammas, thresholds = [candidate.prediction.gamma], [candidate.prediction.threshold]
        predicted = predict_plan(acceptance, candidate.plan, costs, gammas, thresholds)
        rate = statistics.acceptance_rate or 0.0
        confirmed.append(Confirmation(candidate, predicted, speed / speeds[0], rate, statistics.tokens_per_round))
    return sorted(confirmed, key=lambda one: -one.speedup)


def without_speculation(plan: LayerPlan) -> DraftPlan:
    """A plan file's way to say that no draft pays on this machine."""
    return DraftPlan(plan, 0, None)
