"""Confirmation of the best plans: judged on texts that the search has not seen, then decoding with
them, beside plain decoding, on held-out prompts.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from rich.console import Console
from rich.progress import track

from cli.table import Row
from decoding.run.chooser import Setting, by_plan, fit_head, plan_in_words
from decoding.run.plan_file import DraftPlan
from decoding.run.writer import Drafting, Sample, Writer, plain
from decoding.text import Rules
from decoding.verify import Coupling
from model import LayerPlan
from search.acceptance import Calibration, Continuation
from search.costs import enough_turns, measure_costs
from search.prediction import Prediction, predict
from search.study import SublayerCosts, predict_plan

JUDGED = 12  # best plans of the search that are predicted again
CONFIRMED = 3  # of them, plans that decode; beside them the best early exit


def plans_to_confirm(
    calibration: Calibration, costs: SublayerCosts, predictions: Mapping[LayerPlan, Prediction]
) -> list[DraftPlan]:
    """The plans to confirm, with draft length and threshold: the best of these plans by the
    texts of this calibration, and the best early exit. ``predictions`` are the search's, the best
    first.
    """
    exits = islice(filter(is_exit, predictions), CONFIRMED)
    judged = track(
        dict.fromkeys([*islice(predictions, JUDGED), *exits]),
        "judging the best plans on other texts",
        console=Console(stderr=True),
    )
    again = {plan: predict_plan(calibration, costs, plan) for plan in judged}
    ranked = sorted(again, key=lambda plan: -again[plan].speedup)
    chosen = dict.fromkeys([*ranked[:CONFIRMED], *islice(filter(is_exit, ranked), 1)])
    return [
        DraftPlan(plan, again[plan].gamma, again[plan].threshold, again[plan].kept_share)
        for plan in chosen
    ]


def is_exit(plan: LayerPlan) -> bool:
    """Whether a plan is an early exit in the checkpoint's bits."""
    layers = sum(map(bool, plan.attention))
    return layers > 0 and plan == LayerPlan.early_exit(plan.num_layers, layers)


def confirm(
    setting: Setting,
    held_out: Sequence[Continuation],
    plans: Sequence[DraftPlan],
    rules: Rules,
    coupling: Coupling,
) -> list[tuple[DraftPlan, Row]]:
    """The plans, each with a row of its results on the held-out prompts; the fastest comes first.

    A plan is predicted on the held-out texts by the costs of its own rounds, measured now. Then it
    decodes in turns with plain decoding. Times are those of the loop, without prefill. A speed is
    that of all prompts together: tokens over seconds.
    """
    longest = max(plan.gamma for plan in plans)
    calibration = Calibration(setting.model, held_out, setting.params, coupling.name, longest)
    drafts = [by_plan(setting, fit_head(plan, setting.model.fast_bits)) for plan in plans]
    for draft in drafts:
        draft.preparation.finish()
    tables = measure_costs(setting, [text.prompt for text in held_out], drafts)
    expected = [
        predict(calibration.acceptance(plan.plan), costs, [plan.gamma], [plan.threshold])
        for plan, costs in zip(plans, tables, strict=True)
    ]
    ways = [plain(setting.model), *drafts]
    (plain_tokens, plain_seconds, *_), *sums = decode_in_turns(
        setting, ways, held_out, rules, coupling
    )
    confirmed = []
    for plan, costs, prediction, (tokens, seconds, accepted, drafted) in zip(
        plans, tables, expected, sums, strict=True
    ):
        row = {
            "plan": plan_in_words(plan.plan),
            "γ": plan.gamma,
            "threshold": plan.threshold,
            "draft step": costs.draft,
            "speed-up": tokens / seconds / plain_tokens * plain_seconds,
            "predicted": prediction.speedup,
            "accepted": accepted / max(1, drafted),
            "acceptance predicted": prediction.acceptance_rate,
        }
        confirmed.append((plan, row))
    return sorted(confirmed, key=lambda one: -one[1]["speed-up"])


def decode_in_turns(
    setting: Setting,
    ways: Sequence[Drafting],
    texts: Sequence[Continuation],
    rules: Rules,
    coupling: Coupling,
) -> np.ndarray:
    """Tokens, seconds, accepted and drafted tokens of each way of decoding, summed over texts after
    these prompts: ``[ways, 4]``. The time of a text is the median over its turns.
    """
    longest = max(len(text.prompt) for text in texts) + rules.max_new_tokens
    writer = Writer(setting.model, min(longest, setting.model.max_positions))
    sums = np.zeros((len(ways), 4))
    for text in track(
        texts, "running the best plans on held-out prompts", console=Console(stderr=True)
    ):
        writer.begin(text.prompt)
        turns: list[list[Sample]] = []
        began = time.perf_counter()
        while not enough_turns(len(turns), began):
            turns.append(
                [
                    writer.write(writer.new_text(rules), way, setting.params, coupling)
                    for way in ways
                ]
            )
        for way, samples in enumerate(zip(*turns, strict=True)):
            told = samples[0].statistics  # the same in every turn
            seconds = statistics.median(sample.seconds for sample in samples)
            sums[way] += told.tokens, seconds, told.accepted, told.drafted
    return sums
