"""Confirmation of the best plans: decoding with them, beside plain decoding, on held-out prompts."""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from rich.console import Console
from rich.progress import track

from decoding.run.acceptance import Calibration, Continuation
from decoding.run.chooser import Setting, plain, plan_in_words, planned
from decoding.run.plan_file import DraftPlan
from decoding.run.prediction import Prediction
from decoding.run.writer import Writer
from decoding.text import Rules
from decoding.verify import Coupling
from model import LayerPlan
from search.study import SublayerCosts, predicted
from weights.cli.table import Row

CONFIRMED = 3  # plans that are run
REPEATS = 3  # runs of each plan on each prompt; the fastest counts


def confirm(
    setting: Setting,
    costs: SublayerCosts,
    held_out: Sequence[Continuation],
    found: Mapping[LayerPlan, Prediction],
    rules: Rules,
    seed: int,
) -> list[tuple[DraftPlan, Row]]:
    """The first plans found, each with a row of its results on the held-out prompts; the fastest comes first.

    It is measured in turns with plain decoding, and predicted at its draft length and threshold. Times are those of the
    loop, without prefill. A speed is that of all prompts together: tokens over seconds.
    """
    model, params, coupling = setting.model, setting.params, Coupling(setting.coupling, seed)
    first = islice(found.items(), CONFIRMED)
    plans = [DraftPlan(plan, best.gamma, best.threshold, best.kept_share) for plan, best in first]
    ways = [plain(model), *(planned(setting, plan) for plan in plans)]
    longest = max(len(text.prompt) for text in held_out) + rules.max_new_tokens
    writer = Writer(model, min(longest, model.max_positions))
    sums = np.zeros((len(ways), 4))  # of the fastest run on each prompt
    for text in track(held_out, "running the best plans on held-out prompts", console=Console(stderr=True)):
        writer.begin(text.prompt)
        turns = [[writer.write(writer.new_text(rules), way, params, coupling) for way in ways] for _ in range(REPEATS)]
        for way, repeats in enumerate(zip(*turns, strict=True)):
            fastest = min(repeats, key=lambda sample: sample.seconds)
            told = fastest.statistics
            sums[way] += told.tokens, fastest.seconds, told.accepted, told.drafted
    calibration = Calibration(model, held_out, params, setting.coupling, max(plan.gamma for plan in plans))
    (plain_tokens, plain_seconds, *_), *others = sums
    confirmed = []
    for chosen, (tokens, seconds, accepted, drafted) in zip(plans, others, strict=True):
        expected = predicted(calibration, costs, chosen.plan, [chosen.gamma], [chosen.threshold])
        row = {"plan": plan_in_words(chosen.plan), "γ": chosen.gamma, "threshold": chosen.threshold}
        row |= {"speed-up": tokens / seconds / plain_tokens * plain_seconds, "speed-up predicted": expected.speedup}
        row |= {"accepted": accepted / max(1, drafted), "acceptance predicted": expected.acceptance_rate}
        confirmed.append((chosen, row))
    return sorted(confirmed, key=lambda one: -one[1]["speed-up"])
