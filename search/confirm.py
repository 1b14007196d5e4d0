"""Confirmation of the best plans: run for real, beside plain decoding, on prompts that the search has not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from decoding.rounds import Round, Statistics
from decoding.run.acceptance import Calibration, Continuation
from decoding.run.chooser import Setting, plain, planned
from decoding.run.costs import SublayerCosts
from decoding.run.plan_file import DraftPlan
from decoding.run.prediction import Prediction
from decoding.run.writer import Writer
from decoding.text import Rules
from decoding.verify import Coupling
from search.study import Candidate, Objective

REPEATS = 2  # runs of each plan on each prompt; the faster counts


@dataclass(frozen=True)
class Confirmation:
    """A candidate on the held-out texts: predicted there, at its draft length and threshold, and measured.

    ``kept_by_depth`` is measured as Prediction's is predicted.
    """

    candidate: Candidate
    predicted: Prediction
    speedup: float
    acceptance_rate: float
    tokens_per_round: float
    kept_by_depth: list[float]


def draft_plan(candidate: Candidate) -> DraftPlan:
    """The candidate with its draft length and threshold (None: no threshold)."""
    return DraftPlan(candidate.plan, candidate.prediction.gamma, candidate.prediction.threshold or None)


def kept_by_depth(rounds: Sequence[Round], gamma: int) -> list[float]:
    """The share of drafts number d + 1 of their round that the target accepted, of those that it came to."""
    shares = []
    for depth in range(gamma):
        reached = [
            round.accepted > depth
            for round in rounds
            if round.accepted >= depth < min(len(round.drafted), len(round.emitted))
        ]
        shares.append(sum(reached) / len(reached) if reached else 0.0)
    return shares


def confirm(
    setting: Setting,
    costs: SublayerCosts,
    held_out: Sequence[Continuation],
    found: Sequence[Candidate],
    rules: Rules,
    seed: int,
) -> list[Confirmation]:
    """Decode the prompts held out plainly and with each candidate, in turns; the fastest candidate comes first.

    Timed is the loop, without the prompt's prefill. A speed is that of all prompts together: tokens over seconds.
    """
    model, params, coupling = setting.model, setting.params, setting.coupling
    ways = [plain(model), *(planned(setting, draft_plan(candidate)) for candidate in found)]
    rounds: list[list[Round]] = [[] for _ in ways]
    sums, seconds = [Statistics() for _ in ways], [0.0] * len(ways)
    longest = max(candidate.prediction.gamma for candidate in found)
    # A warm-up drafts once at full length, and writes one token more.
    writer = Writer(model, max(len(text.prompt) for text in held_out) + max(rules.max_new_tokens, longest + 2))
    writer.begin(held_out[0].prompt)
    for way in ways:
        writer.warm_up(way, params)
    for text in track(held_out, "running the best plans on held-out prompts", console=Console(stderr=True)):
        fastest = [math.inf] * len(ways)
        for repeat in range(REPEATS):
            for number, way in enumerate(ways):
                writer.begin(text.prompt)
                sample = writer.write(writer.new_text(rules), way, params, Coupling(coupling, seed))
                fastest[number] = min(fastest[number], sample.seconds)
                if not repeat:
                    rounds[number] += sample.rounds
        seconds = [total + each for total, each in zip(seconds, fastest, strict=True)]
    for statistics, done in zip(sums, rounds, strict=True):
        for round in done:
            statistics.add(round)
    plain_speed, *speeds = (one.tokens / total for one, total in zip(sums, seconds, strict=True))
    predict, confirmed = Objective(Calibration(model, held_out, params, coupling, depths=longest), costs), []
    for candidate, done, statistics, speed in zip(found, rounds[1:], sums[1:], speeds, strict=True):
        gamma, threshold = candidate.prediction.gamma, candidate.prediction.threshold
        predicted, rate = predict(candidate.plan, [gamma], [threshold]), statistics.acceptance_rate or 0.0
        measured = speed / plain_speed, rate, statistics.tokens_per_round, kept_by_depth(done, gamma)
        confirmed.append(Confirmation(candidate, predicted, *measured))
    return sorted(confirmed, key=lambda one: -one.speedup)
