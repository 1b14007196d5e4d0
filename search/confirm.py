"""Confirmation of the best plans: judged on texts that the search has not seen, then decoding with
them, beside plain decoding, on held-out prompts, and the fastest written.
"""

import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from app.chooser import Setting, by_plan, plan_in_words
from app.plan_file import DraftPlan, write_plan
from app.table import Row
from app.writer import Drafting, Writer, plain
from decoding.rounds import Statistics
from decoding.text import Rules
from decoding.verify import Coupling
from model import LayerPlan
from search.acceptance import Calibration
from search.costs import SublayerCosts, measure_costs, turns
from search.prediction import Prediction, predict, predict_plan
from search.texts import Continuation

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
    decodes in turns with plain decoding.
    """
    drafts = [by_plan(setting, plan) for plan in plans]
    for draft in drafts:
        draft.preparation.work()
    prompts = [text.prompt for text in held_out]
    _, *costs = measure_costs(setting, prompts, drafts)
    ways = [plain(setting.model), *drafts]
    (plain_speed, _), *found = decode_in_turns(setting, ways, prompts, rules, coupling)
    calibration = Calibration(setting, held_out, max(plan.gamma for plan in plans))
    confirmed = []
    for plan, table, (speed, accepted) in zip(plans, costs, found, strict=True):
        acceptance = calibration.acceptance(plan.plan)
        expected = predict(acceptance, table, [plan.gamma], [plan.threshold])
        row = {
            "plan": plan_in_words(plan.plan),
            "γ": plan.gamma,
            "threshold": plan.threshold,
            "draft step": table.draft,
            "speed-up": speed / plain_speed,
            "predicted": expected.speedup,
            "accepted": accepted,
            "acceptance predicted": expected.acceptance_rate,
        }
        confirmed.append((plan, row))
    return sorted(confirmed, key=lambda one: -one[1]["speed-up"])


def decode_in_turns(
    setting: Setting,
    ways: Sequence[Drafting],
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    coupling: Coupling,
) -> list[tuple[float, float]]:
    """Speed and acceptance rate of each way of decoding, of the texts after all prompts together.

    The speed is tokens over seconds of the loop, without prefill. The time of a text is the median
    over its turns.
    """
    longest = max(map(len, prompts)) + rules.max_new_tokens
    writer = Writer(setting.model, min(longest, setting.model.max_positions))
    sums = [Statistics() for _ in ways]
    seconds = [0.0 for _ in ways]
    for prompt in track(
        prompts, "running the best plans on held-out prompts", console=Console(stderr=True)
    ):
        writer.begin(prompt)
        samples = [
            [writer.write(writer.new_text(rules), way, setting.params, coupling) for way in ways]
            for _ in turns()
        ]
        for way, texts in enumerate(zip(*samples, strict=True)):
            seconds[way] += statistics.median(text.seconds for text in texts)
            for round in texts[0].rounds:  # the same in every turn
                sums[way].add(round)
    return [
        (each.tokens / took, each.acceptance_rate or 0.0)
        for each, took in zip(sums, seconds, strict=True)
    ]


def write_best(
    out: Path, identity: Mapping[str, Any], best: DraftPlan, measured: Row, machine: str
) -> str:
    """Write the plan file of a search; returns a line with the result.

    ``measured`` is the row of the ``best`` plan, ``identity`` that of the study. The draft length
    is 0 where plain decoding is faster.
    """
    chosen = best if measured["speed-up"] > 1 else DraftPlan(best.plan, 0)
    provenance = {
        "acceptance_rate": measured["accepted"],
        "predicted_speedup": measured["predicted"],
        "measured_speedup": measured["speed-up"],
        "sampling": identity["sampling"],
        "dtype": identity["dtype"],
        "machine": machine,
        "date": date.today().isoformat(),
    }
    write_plan(out, chosen, identity["model"], provenance)
    result = (
        f"drafting up to {chosen.gamma} tokens"
        if chosen.gamma
        else "no plan beats plain decoding, so --draft skip decodes plainly"
    )
    return f"{out}: {measured['speed-up']:.2f}x plain decoding, {result}"
