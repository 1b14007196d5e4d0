"""Confirmation of the best plans: decoding with them, beside plain decoding, on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
    """Results of a candidate on the held-out texts: ``predicted``, at its draft length and threshold, and measured.

    The other fields are measured; they mean the same as those of Prediction.
    """

    candidate: Candidate
    predicted: Prediction
    speedup: float
    acceptance_rate: float
    tokens_per_round: float
    kept_by_depth: list[float]


def draft_plan(candidate: Candidate) -> DraftPlan:
    """Plan, draft length and threshold (None: no threshold) of a candidate."""
    return DraftPlan(candidate.plan, candidate.prediction.gamma, candidate.prediction.threshold or None)


def kept_by_depth(rounds: Sequence[Round], gamma: int) -> list[float]:
    """Accepted share of the drafts number d + 1 of their round, of those that verification reached, by depth d."""
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
    """Results of each candidate on the held-out prompts, in turns with plain decoding; the fastest comes first.

    Times are those of the loop, without prefill. A speed is that of all prompts together: tokens over seconds.
    """
    model, params, coupling = setting.model, setting.params, setting.coupling
    ways = [plain(model), *(planned(setting, draft_plan(candidate)) for candidate in found)]
    rounds: list[list[Round]] = [[] for _ in ways]
    seconds = np.zeros((len(held_out), REPEATS, len(ways)))
    longest = max(candidate.prediction.gamma for candidate in found)
    # A warm-up drafts once at full length, and writes one token more.
    writer = Writer(model, max(len(text.prompt) for text in held_out) + max(rules.max_new_tokens, longest + 2))
    writer.begin(held_out[0].prompt)
    for way in ways:
        writer.warm_up(way, params)
    turns = list(np.ndindex(seconds.shape))
    for turn in track(turns, "running the best plans on held-out prompts", console=Console(stderr=True)):
        text, repeat, way = turn
        writer.begin(held_out[text].prompt)
        sample = writer.write(writer.new_text(rules), ways[way], params, Coupling(coupling, seed))
        seconds[turn] = sample.seconds
        rounds[way] += sample.rounds if repeat == 0 else []
    sums = [Statistics() for _ in ways]
    for statistics, done in zip(sums, rounds, strict=True):
        for round in done:
            statistics.add(round)
    speeds = np.array([statistics.tokens for statistics in sums]) / seconds.min(axis=1).sum(axis=0)
    predict, confirmed = Objective(Calibration(model, held_out, params, coupling, depths=longest), costs), []
    for candidate, done, statistics, speed in zip(found, rounds[1:], sums[1:], speeds[1:], strict=True):
        gamma, threshold = candidate.prediction.gamma, candidate.prediction.threshold
        predicted, rate = predict(candidate.plan, [gamma], [threshold]), statistics.acceptance_rate or 0.0
        measured = float(speed / speeds[0]), rate, statistics.tokens_per_round, kept_by_depth(done, gamma)
        confirmed.append(Confirmation(candidate, predicted, *measured))
    return sorted(confirmed, key=lambda one: -one.speedup)
