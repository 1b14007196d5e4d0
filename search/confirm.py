"""Confirmation of the best plans: decoding with them, beside plain decoding, on held-out prompts."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from rich.console import Console
from rich.progress import track

from decoding.rounds import Statistics
from decoding.run.acceptance import Calibration, Continuation
from decoding.run.chooser import Setting, plain, plan_in_words, planned
from decoding.run.costs import SublayerCosts
from decoding.run.writer import Sample, Writer
from decoding.text import Rules
from decoding.verify import Coupling
from model.clock import take_turns
from search.study import Candidate, Objective
from weights.cli.table import Row

REPEATS = 2  # runs of each plan on each prompt after a warm-up; the faster counts


def confirm(
    setting: Setting,
    costs: SublayerCosts,
    held_out: Sequence[Continuation],
    found: Sequence[Candidate],
    rules: Rules,
    seed: int,
) -> list[tuple[Candidate, Row]]:
    """Each candidate with a row of its results on the held-out prompts; the fastest comes first.

    It is measured in turns with plain decoding, and predicted at its draft length and threshold. Times are those of the
    loop, without prefill. A speed is that of all prompts together: tokens over seconds.
    """
    model, params, coupling = setting.model, setting.params, Coupling(setting.coupling, seed)
    ways = [plain(model), *(planned(setting, candidate.draft_plan) for candidate in found)]
    longest = max(len(text.prompt) for text in held_out) + rules.max_new_tokens
    writer = Writer(model, min(longest, model.max_positions))
    seconds, sums, written = np.zeros(len(ways)), [Statistics() for _ in ways], dict[int, Sample]()

    def write(way: int) -> None:
        written[way] = writer.write(writer.new_text(rules), ways[way], params, coupling)

    for text in track(held_out, "running the best plans on held-out prompts", console=Console(stderr=True)):
        writer.begin(text.prompt)
        timings = take_turns([partial(write, way) for way in range(len(ways))], REPEATS, model.device)
        seconds += [took.fastest for took in timings]
        for way, sample in written.items():
            for round in sample.rounds:
                sums[way].add(round)
    speeds = np.array([statistics.tokens for statistics in sums]) / seconds
    depths = max(candidate.prediction.gamma for candidate in found)
    predict = Objective(Calibration(model, held_out, params, setting.coupling, depths), costs)
    confirmed = []
    for candidate, statistics, speed in zip(found, sums[1:], speeds[1:] / speeds[0], strict=True):
        chosen = candidate.draft_plan
        predicted = predict(candidate.plan, [chosen.gamma], [chosen.threshold or 0.0])
        row = {"plan": plan_in_words(candidate.plan), "γ": chosen.gamma, "threshold": chosen.threshold}
        row |= {"speed-up": float(speed), "speed-up predicted": predicted.speedup}
        row |= {"accepted": statistics.acceptance_rate or 0.0, "acceptance predicted": predicted.acceptance_rate}
        confirmed.append((candidate, row | {"tokens per round": statistics.tokens_per_round}))
    return sorted(confirmed, key=lambda one: -one[1]["speed-up"])
